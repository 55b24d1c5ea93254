"""The API as the `openai` package sees it, over real sockets."""

from __future__ import annotations

import asyncio
import json
import socket

import httpx
import openai
import pytest

from tests.server.fake_engine import EOS, MODEL_NAME
from tests.server.harness import ServerProcess, fake_server, metric, openai_client, wait_until

USER = [{"role": "user", "content": "hello"}]
PROMPT_TEXT = "user:hello\n>"  # what the fake's template makes of USER


def test_a_chat_reply_has_text_reason_and_usage(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=USER, max_tokens=15)
    (choice,) = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == (PROMPT_TEXT * 2)[:15]
    assert choice.finish_reason == "length"
    assert reply.model == MODEL_NAME
    assert reply.id.startswith("chatcmpl-")
    assert reply.usage is not None
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (12, 15, 27)
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 0


def test_a_streamed_chat_says_the_role_first_and_the_same_text(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model=MODEL_NAME, messages=USER, max_tokens=15, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:-1])
    assert "".join(c.choices[0].delta.content or "" for c in chunks[:-1]) == (PROMPT_TEXT * 2)[:15]
    assert [c.choices[0].finish_reason for c in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 15
    assert len({c.id for c in chunks}) == 1


def test_without_max_tokens_a_chat_may_fill_the_model_and_a_completion_gets_16(client: openai.OpenAI) -> None:
    chat = client.chat.completions.create(model=MODEL_NAME, messages=USER)
    assert chat.usage is not None
    assert chat.usage.total_tokens == 1024
    completion = client.completions.create(model=MODEL_NAME, prompt="abc")
    assert completion.choices[0].text == ("abc" * 6)[:16]
    nearly_full = client.completions.create(model=MODEL_NAME, prompt="a" * 1020)
    assert nearly_full.usage is not None
    assert nearly_full.usage.completion_tokens == 4


def test_a_default_of_the_makers_gives_way_to_what_fits_and_to_what_is_asked() -> None:
    for process in fake_server(flags=["--override-generation-config", '{"max_new_tokens": 1000}']):
        client = openai_client(process)
        chat = client.chat.completions.create(model=MODEL_NAME, messages=USER)
        assert chat.usage is not None
        assert chat.usage.completion_tokens == 1000
        long = [{"role": "user", "content": "x" * 500}]
        assert client.chat.completions.create(model=MODEL_NAME, messages=long).usage.total_tokens == 1024
        assert client.completions.create(model=MODEL_NAME, prompt="x" * 500).usage.total_tokens == 1024
        for asked in ({"max_tokens": 5}, {"max_completion_tokens": 5}):
            reply = client.chat.completions.create(model=MODEL_NAME, messages=USER, **asked)
            assert reply.usage.completion_tokens == 5
        for asked in ({"max_tokens": 1000}, {"max_completion_tokens": 1000}):
            with pytest.raises(openai.BadRequestError, match=f"{next(iter(asked))} is 1,?000"):
                client.chat.completions.create(model=MODEL_NAME, messages=long, **asked)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_a_reply(client: openai.OpenAI, stream: bool) -> None:
    reply = client.completions.create(model=MODEL_NAME, prompt="one two ", max_tokens=50, stop=["two"], stream=stream)
    last = list(reply)[-1] if isinstance(reply, openai.Stream) else reply
    assert last.choices[0].finish_reason == "stop"
    assert last.choices[0].model_extra == {"stop_reason": "two"}


def test_end_of_sequence_stops_unless_ignored(client: openai.OpenAI) -> None:
    prompt = [65, 66, EOS, 67]
    stopped = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=6)
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == ("AB", "stop")
    ignoring = client.completions.create(model=MODEL_NAME, prompt=prompt, max_tokens=6, extra_body={"ignore_eos": True})
    assert (ignoring.choices[0].text, ignoring.choices[0].finish_reason) == ("ABCAB", "length")


def test_characters_of_several_tokens_are_never_broken_in_a_stream(client: openai.OpenAI) -> None:
    text = "héllo 🤔 wörld — "
    num_tokens = len(text.encode())
    stream = client.completions.create(model=MODEL_NAME, prompt=text, max_tokens=num_tokens, stream=True)
    pieces = [chunk.choices[0].text for chunk in stream]
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)
    cut = client.completions.create(model=MODEL_NAME, prompt=text, max_tokens=2)
    assert cut.choices[0].text == "h\ufffd"


def test_a_batch_of_prompts_gets_a_choice_each(client: openai.OpenAI) -> None:
    prompts = ["abc", "xy", "0123456789"]
    whole = client.completions.create(model=MODEL_NAME, prompt=prompts, max_tokens=4)
    expected = [(p * 4)[:4] for p in prompts]
    assert [c.text for c in whole.choices] == expected
    assert [c.index for c in whole.choices] == [0, 1, 2]
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (15, 12)
    texts = ["", "", ""]
    for chunk in client.completions.create(model=MODEL_NAME, prompt=prompts, max_tokens=4, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == expected


def test_chat_logprobs_have_the_tokens_bytes_and_alternatives(client: openai.OpenAI) -> None:
    kwargs = {"model": MODEL_NAME, "messages": USER, "max_tokens": 3, "logprobs": True, "top_logprobs": 3}
    reply = client.chat.completions.create(**kwargs)
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content
    assert content is not None
    assert [(t.token, t.bytes, t.logprob) for t in content] == [(c, [ord(c)], -0.5) for c in "use"]
    best, half_character, impossible = content[0].top_logprobs
    assert (best.token, best.logprob) == ("u", -0.5)
    assert (half_character.token, half_character.bytes) == ("\ufffd", [0xE2])
    assert impossible.logprob == -9999.0  # JSON has no infinity
    streamed = [c for c in client.chat.completions.create(stream=True, **kwargs) if c.choices[0].logprobs]
    assert [t for c in streamed for t in c.choices[0].logprobs.content] == content


def test_chat_logprobs_without_top_logprobs_have_no_alternatives(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=USER, max_tokens=1, logprobs=True)
    assert reply.choices[0].logprobs is not None
    assert reply.choices[0].logprobs.content is not None
    assert reply.choices[0].logprobs.content[0].top_logprobs == []


def test_completion_logprobs_are_four_parallel_lists_with_character_offsets(client: openai.OpenAI) -> None:
    kwargs = {"model": MODEL_NAME, "prompt": "aéb", "max_tokens": 4, "logprobs": 2}
    whole = client.completions.create(**kwargs).choices[0].logprobs
    assert whole is not None
    assert whole.tokens == ["a", "bytes:\\xc3", "bytes:\\xa9", "b"]
    assert whole.text_offset == [0, 1, 2, 2]
    assert whole.token_logprobs == [-0.5] * 4
    assert whole.top_logprobs is not None
    assert whole.top_logprobs[0] == {"a": -0.5, "bytes:\\xe2": -1.5}
    offsets = []
    for chunk in client.completions.create(stream=True, **kwargs):
        assert chunk.choices[0].logprobs is not None
        offsets += chunk.choices[0].logprobs.text_offset or []
    assert offsets == whole.text_offset


def test_token_ids_are_returned_on_request(client: openai.OpenAI) -> None:
    extra = {"return_token_ids": True}
    reply = client.completions.create(model=MODEL_NAME, prompt="ab", max_tokens=3, extra_body=extra)
    assert reply.choices[0].model_extra is not None
    assert reply.choices[0].model_extra["token_ids"] == [97, 98, 97]
    assert reply.choices[0].model_extra["prompt_token_ids"] == [97, 98]
    chunks = list(
        client.chat.completions.create(model=MODEL_NAME, messages=USER, max_tokens=3, stream=True, extra_body=extra)
    )
    assert chunks[0].model_extra is not None
    assert bytes(chunks[0].model_extra["prompt_token_ids"]).decode() == PROMPT_TEXT
    assert [t for c in chunks for t in (c.choices[0].model_extra or {}).get("token_ids", [])] == list(b"use")


@pytest.mark.parametrize("extra", [{"return_seed": True}, {"return_seed": True, "seed": 7}])
def test_seeds_are_returned_on_request(client: openai.OpenAI, extra: dict[str, object]) -> None:
    def seeds(choices: list[object]) -> list[int]:
        return [c.model_extra["seed"] for c in choices if "seed" in (c.model_extra or {})]  # type: ignore[attr-defined]

    for stream in (False, True):
        kwargs = {"model": MODEL_NAME, "max_tokens": 3, "stream": stream, "extra_body": extra}
        completion = client.completions.create(prompt=["ab", "cd"], **kwargs)
        chat = client.chat.completions.create(messages=USER, **kwargs)
        first, second = seeds([c for chunk in completion for c in chunk.choices] if stream else completion.choices)
        (third,) = seeds([c for chunk in chat for c in chunk.choices] if stream else chat.choices)
        assert len({first, second, third}) == (1 if "seed" in extra else 3)
        assert first == extra.get("seed", first)


def test_usage_can_come_with_every_chunk(client: openai.OpenAI) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = client.completions.create(model=MODEL_NAME, prompt="ab", max_tokens=3, stream=True, stream_options=options)
    assert [c.usage.completion_tokens for c in stream if c.usage is not None] == [1, 2, 3, 3]


def test_messages_may_be_lists_of_text_parts_and_developer_means_system(client: openai.OpenAI) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be"}, {"role": "user", "content": parts}]
    reply = client.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=19)
    assert reply.choices[0].message.content == "system:be\nuser:a\nb\n"


def test_a_reply_can_be_sent_back_as_a_message(client: openai.OpenAI) -> None:
    reply = client.chat.completions.create(model=MODEL_NAME, messages=USER, max_tokens=5)
    messages = [*USER, reply.choices[0].message.model_dump(), {"role": "user", "content": "more"}]
    assert client.chat.completions.create(model=MODEL_NAME, messages=messages, max_tokens=5).choices


def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == MODEL_NAME
    assert model.model_extra is not None
    assert model.model_extra["max_model_len"] == 1024
    assert client.models.retrieve(MODEL_NAME).id == MODEL_NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_a_request_id_is_echoed_and_names_the_reply(quick_server: ServerProcess) -> None:
    body = {"prompt": "a", "request_id": "mine"}
    reply = httpx.post(f"{quick_server.url}/v1/completions", json=body, headers={"X-Request-Id": "trace-7"})
    assert reply.headers["x-request-id"] == "trace-7"
    assert reply.json()["id"] == "cmpl-mine"


def test_two_requests_with_one_id_do_not_meet(steady_server: ServerProcess) -> None:
    async def scenario() -> list[str]:
        async with httpx.AsyncClient(base_url=steady_server.url, timeout=20) as client:
            replies = await asyncio.gather(
                *(client.post("/v1/completions", json={"prompt": p, "request_id": "same"}) for p in ("ab", "cd"))
            )
            return [reply.json()["choices"][0]["text"] for reply in replies]

    assert asyncio.run(scenario()) == ["ab" * 8, "cd" * 8]


def test_small_routes_answer(quick_server: ServerProcess) -> None:
    assert httpx.get(f"{quick_server.url}/health").status_code == 200
    assert httpx.get(f"{quick_server.url}/ping").status_code == 200
    assert "version" in httpx.get(f"{quick_server.url}/version").json()


def test_metrics_count_what_happened(quick_server: ServerProcess) -> None:
    before = {name: metric(quick_server, name) for name in METRICS}
    openai_client(quick_server).completions.create(model=MODEL_NAME, prompt="abc", max_tokens=5)
    grown = {name: metric(quick_server, name) - before[name] for name in METRICS}
    assert grown == METRICS
    assert metric(quick_server, "kv_cache_usage_perc") == 0
    assert metric(quick_server, "num_requests_running") == 0


def test_each_prompt_of_a_batch_is_timed_as_its_tokens_come(steady_server: ServerProcess) -> None:
    names = ("time_to_first_token_seconds_sum", "e2e_request_latency_seconds_sum")
    before = [metric(steady_server, name) for name in names]
    openai_client(steady_server).completions.create(model=MODEL_NAME, prompt=["a", "b", "c"], max_tokens=30)
    first_token, whole = (metric(steady_server, name) - b for name, b in zip(names, before, strict=True))
    assert first_token < whole / 4


METRICS = {
    "prompt_tokens_total": 3,
    "generation_tokens_total": 5,
    "time_to_first_token_seconds_count": 1,
    "inter_token_latency_seconds_count": 4,
    "e2e_request_latency_seconds_count": 1,
    "prefix_cache_queries_total": 0,
    "prefix_cache_hits_total": 0,
    "num_preemptions_total": 0,
}


def test_fifty_streams_at_once_each_get_their_own_text(steady_server: ServerProcess) -> None:
    async def one(client: openai.AsyncOpenAI, i: int) -> str:
        stream = await client.completions.create(model=MODEL_NAME, prompt=f"<{i:02d}>", max_tokens=40, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def scenario() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{steady_server.url}/v1", api_key="none", max_retries=0) as client:
            return await asyncio.gather(*(one(client, i) for i in range(50)))

    assert asyncio.run(scenario()) == [f"<{i:02d}>" * 10 for i in range(50)]


def test_a_client_that_leaves_in_mid_stream_is_aborted_and_its_blocks_return(steady_server: ServerProcess) -> None:
    aborted = 'request_success_total{engine="0",finished_reason="abort"'
    with openai_client(steady_server) as client:
        stream = client.chat.completions.create(model=MODEL_NAME, messages=USER, stream=True)
        for _ in range(3):
            next(stream)
        assert metric(steady_server, "num_requests_running") == 1
        assert metric(steady_server, "kv_cache_usage_perc") > 0
        generated = metric(steady_server, "generation_tokens_total")
        stream.close()
    wait_until(lambda: metric(steady_server, "num_requests_running") == 0)
    assert metric(steady_server, "kv_cache_usage_perc") == 0
    assert metric(steady_server, "generation_tokens_total") < generated + 200  # it was to become 1,000
    assert aborted in httpx.get(f"{steady_server.url}/metrics").text


def test_a_client_that_never_reads_its_stream_holds_up_nobody(steady_server: ServerProcess) -> None:
    body = json.dumps({"prompt": ["a", "b", "c", "d"], "max_tokens": 400, "logprobs": 3, "stream": True}).encode()
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        host, port = steady_server.url.removeprefix("http://").split(":")
        sock.connect((host, int(port)))
        sock.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
        wait_until(lambda: metric(steady_server, "num_requests_running") == 4)
        other = openai_client(steady_server).completions.create(model=MODEL_NAME, prompt="abc", max_tokens=3)
        assert other.choices[0].text == "abc"
        wait_until(lambda: metric(steady_server, "num_requests_running") == 0)
        assert metric(steady_server, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize("body", [{"prompt": "abc", "max_tokens": 1000}, {"prompt": ["a", "b"], "max_tokens": 1000}])
def test_a_client_that_does_not_wait_for_its_whole_reply_is_aborted(
    steady_server: ServerProcess, body: dict[str, object]
) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{steady_server.url}/v1/completions", json=body, timeout=0.2)
    wait_until(lambda: metric(steady_server, "num_requests_running") == 0)
    assert metric(steady_server, "kv_cache_usage_perc") == 0
