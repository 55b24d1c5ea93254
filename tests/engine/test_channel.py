from __future__ import annotations

import asyncio
import socket
import threading

import msgspec
import pytest

from octavo.core.config import EngineConfig
from octavo.core.records import EngineStats, FinishReason, Request, RequestOutput, SamplingParams, TokenLogprobs
from octavo.engine.async_channel import AsyncChannel
from octavo.engine.channel import BlockingChannel, ChannelClosedError, FrameBuffer, encode_frame
from octavo.engine.messages import Abort, Configure, Failed, FromEngine, Outputs, Ping, Refusal, Shutdown, Submit

REQUEST = Request(
    request_id="r",
    prompt_token_ids=[1, 2, 70000],
    params=SamplingParams(seed=-5, stop=("é", "\n"), max_tokens=7),
    arrival_time=12.5,
    cache_salt="salt",
)
TO_ENGINE = [Configure(EngineConfig("m.gguf", isa="avx512"), 7), Submit(REQUEST), Abort("r"), Ping(), Shutdown()]
OUTPUTS = Outputs(
    [
        RequestOutput(
            request_id="r",
            token_ids=[5],
            text=b"\xe2\x82",
            logprobs=[TokenLogprobs(-0.25, 2, [9, 5], [-0.1, float("-inf")])],
            finish_reason=FinishReason.STOP,
            stop_reason="é",
        )
    ],
    EngineStats(num_blocks=3),
    [Refusal("q", "no", "prompt", None)],
)


def test_frames_cut_at_every_byte_come_out_whole_and_in_order() -> None:
    stream = b"".join(encode_frame(message) for message in TO_ENGINE)
    whole = FrameBuffer().feed(stream)
    assert len(whole) == len(TO_ENGINE)
    for cut in range(len(stream) + 1):
        frames = FrameBuffer()
        assert frames.feed(stream[:cut]) + frames.feed(stream[cut:]) == whole


def test_every_message_to_the_engine_arrives_as_it_was_sent() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = BlockingChannel(theirs)
        ours.sendall(b"".join(encode_frame(message) for message in TO_ENGINE))
        assert channel.receive(wait=True) == TO_ENGINE


def test_polling_an_empty_channel_returns_at_once_and_waiting_sleeps_until_a_whole_message_is_there() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        channel = BlockingChannel(theirs)
        assert channel.receive(wait=False) == []
        frame = encode_frame(Abort("late"))
        ours.sendall(frame[:3])
        assert channel.receive(wait=False) == []
        timer = threading.Timer(0.05, ours.sendall, [frame[3:]])
        timer.start()
        assert channel.receive(wait=True) == [Abort("late")]
        timer.join()


def test_the_end_of_either_side_is_an_error_on_the_other() -> None:
    ours, theirs = socket.socketpair()
    channel = BlockingChannel(theirs)
    ours.close()
    with pytest.raises(ChannelClosedError):
        channel.receive(wait=True)
    with pytest.raises(ChannelClosedError):
        channel.send(Failed("ConfigError", "no"))
    theirs.close()


def test_the_async_end_hears_messages_then_the_end_and_answers() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        heard: list[FromEngine] = []
        closed = asyncio.Event()
        channel = await AsyncChannel.open(ours, heard.append, closed.set)
        engine = BlockingChannel(theirs)
        channel.send(Submit(REQUEST))
        assert await asyncio.to_thread(engine.receive, True) == [Submit(REQUEST)]
        engine.send(OUTPUTS)
        engine.send(Failed("ConfigError", "no"))
        theirs.close()
        await asyncio.wait_for(closed.wait(), 5)
        assert heard == [OUTPUTS, Failed("ConfigError", "no")]

    asyncio.run(scenario())


def test_a_large_prompt_crosses_in_one_piece() -> None:
    big = msgspec.structs.replace(REQUEST, prompt_token_ids=list(range(300_000)))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=ours.sendall, args=[encode_frame(Submit(big))])
        sender.start()
        assert BlockingChannel(theirs).receive(wait=True) == [Submit(big)]
        sender.join()
