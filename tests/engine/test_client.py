from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing

import pytest

from octavo.core.config import EngineConfig
from octavo.core.errors import EngineDeadError, InvalidRequestError, ModelFileError
from octavo.core.records import FinishReason, Request, RequestOutput, SamplingParams
from octavo.engine.client import Death, EngineClient, OutputStream
from tests.server.fake_engine import CRASH, FAIL, HANG, LABOUR, REFUSE
from tests.server.harness import ENVIRONMENT, fake_engine_command

LONG = 100_000  # tokens: never reached


@pytest.fixture(autouse=True)
def _children_find_the_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])


def request(name: str, prompt: bytes = b"abc", max_tokens: int = 5) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(request_id=name, prompt_token_ids=list(prompt), params=params, arrival_time=0.0)


def run(
    scenario: Callable[[EngineClient], Awaitable[None]], step_seconds: float = 0.001, engine_timeout: float = 0.0
) -> None:
    async def whole() -> None:
        client = await EngineClient.start(EngineConfig("echo"), fake_engine_command(step_seconds), engine_timeout)
        try:
            await asyncio.wait_for(scenario(client), 20)
        finally:
            await client.close()

    asyncio.run(whole())


async def collect(stream: OutputStream) -> list[RequestOutput]:
    return [output async for output in stream]


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.005)


def test_outputs_come_in_order_and_end_with_a_reason() -> None:
    async def scenario(client: EngineClient) -> None:
        many = await asyncio.gather(*(collect(client.generate(request(f"r{i}", b"%03d" % i))) for i in range(50)))
        for i, outputs in enumerate(many):
            digits = b"%03d" % i
            assert b"".join(o.text for o in outputs) == digits + digits[:2]
            assert [o.finish_reason for o in outputs] == [None] * 4 + [FinishReason.LENGTH]
        assert client.stats.num_steps >= 5
        assert client.stats.num_blocks_in_use == 0

    run(scenario)


def test_closing_the_iterator_aborts_the_request_and_returns_its_blocks() -> None:
    async def scenario(client: EngineClient) -> None:
        async with aclosing(client.generate(request("r", max_tokens=LONG))) as stream:
            await anext(stream)
            assert client.stats.num_blocks_in_use > 0
        await until(lambda: client.stats.num_blocks_in_use == 0)
        assert client.stats.num_requests_running == 0

    run(scenario)


def test_cancelling_the_waiting_task_aborts_the_request() -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client.generate(request("r", max_tokens=LONG))))
        await until(lambda: client.stats.num_requests_running == 1)
        task.cancel()
        await until(lambda: client.stats.num_requests_running == 0)

    run(scenario)


def test_an_aborted_stream_ends_once_with_the_reason_abort() -> None:
    async def scenario(client: EngineClient) -> None:
        stream = client.generate(request("r", max_tokens=LONG))
        await anext(stream)
        stream.abort()
        stream.abort()
        rest = await collect(stream)
        assert rest[-1].finish_reason is FinishReason.ABORT
        assert all(o.finish_reason is None for o in rest[:-1])

    run(scenario)


def test_a_request_that_the_engine_refuses_fails_alone() -> None:
    async def scenario(client: EngineClient) -> None:
        fine = client.generate(request("fine", max_tokens=50))
        with pytest.raises(InvalidRequestError, match="refuses") as caught:
            await collect(client.generate(request("bad", REFUSE)))
        assert (caught.value.param, caught.value.code) == ("prompt", "refused")
        assert (await collect(fine))[-1].finish_reason is FinishReason.LENGTH

    run(scenario)


def test_a_request_that_fails_alone_ends_with_an_error() -> None:
    async def scenario(client: EngineClient) -> None:
        last = (await collect(client.generate(request("r", FAIL))))[-1]
        assert last.finish_reason is FinishReason.ERROR
        assert last.error == "this request failed on purpose"
        assert client.is_alive

    run(scenario)


def test_an_exception_in_a_step_ends_every_live_request_with_an_error_and_then_the_process(
    capfd: pytest.CaptureFixture[str],
) -> None:
    async def scenario(client: EngineClient) -> None:
        other = asyncio.create_task(collect(client.generate(request("other", max_tokens=LONG))))
        await until(lambda: client.stats.num_requests_running == 1)
        crashed = await collect(client.generate(request("crash", CRASH)))
        for outputs in (crashed, await other):
            assert [o.finish_reason for o in outputs[-2:] if o.finish_reason] == [FinishReason.ERROR]
            assert "RuntimeError" in (outputs[-1].error or "")
        assert not client.is_alive
        death = await asyncio.wait_for(client.death, 5)
        assert death == Death("ended with exit code 1", "RuntimeError: crashed on purpose", 2)

    run(scenario)
    log = capfd.readouterr().err
    assert "crashed on purpose" in log
    assert "Traceback" in log


def test_a_killed_engine_fails_all_waiting_clients_at_once() -> None:
    async def scenario(client: EngineClient) -> None:
        tasks = [asyncio.create_task(collect(client.generate(request(f"r{i}", max_tokens=LONG)))) for i in range(10)]
        await until(lambda: client.stats.num_requests_running == 10)
        os.kill(client.pid, signal.SIGKILL)
        killed_at = time.monotonic()
        for task in tasks:
            outputs = await task
            assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.ERROR]
            assert "engine process ended" in (outputs[-1].error or "")
        assert time.monotonic() - killed_at < 1
        assert not client.is_alive
        death = await asyncio.wait_for(client.death, 5)
        assert (death.how, death.num_requests) == ("was killed by SIGKILL", 10)

    run(scenario)


def test_a_model_that_cannot_be_loaded_raises_the_engines_own_error() -> None:
    with pytest.raises(ModelFileError, match="NOPE"):
        asyncio.run(EngineClient.start(EngineConfig("x.broken"), fake_engine_command()))


def test_an_engine_that_dies_while_loading_is_reported() -> None:
    with pytest.raises(EngineDeadError, match="while it loaded"):
        asyncio.run(EngineClient.start(EngineConfig("x"), ["/bin/false"]))


@pytest.mark.parametrize(
    ("number", "why"), [(signal.SIGBUS, "a model file was changed"), (signal.SIGKILL, "lack of memory")]
)
def test_a_signal_that_ends_a_loading_engine_is_named(number: signal.Signals, why: str) -> None:
    with pytest.raises(EngineDeadError, match=f"killed by {number.name} while it loaded the model: .*{why}"):
        asyncio.run(EngineClient.start(EngineConfig("x"), ["/bin/sh", "-c", f"kill -{number.value} $$"]))


def test_closing_the_client_ends_the_process_and_the_streams() -> None:
    async def scenario() -> None:
        client = await EngineClient.start(EngineConfig("echo"), fake_engine_command(0.001))
        stream = client.generate(request("r", max_tokens=LONG))
        await anext(stream)
        await client.close()
        assert (await collect(stream))[-1].finish_reason is FinishReason.ABORT
        with pytest.raises(ProcessLookupError):
            os.kill(client.pid, 0)

    asyncio.run(scenario())


async def death_of(client: EngineClient, name: str, prompt: bytes) -> tuple[RequestOutput, Death]:
    """The last output of a request that ends with its engine, and how that ended."""
    last = (await collect(client.generate(request(name, prompt, LONG))))[-1]
    return last, await asyncio.wait_for(client.death, 5)


def test_an_engine_that_gets_nothing_done_is_killed_and_tells_where_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    async def scenario(client: EngineClient) -> None:
        last, death = await death_of(client, "r", HANG)
        assert last.finish_reason is FinishReason.ERROR
        assert "got nothing done for 0.5 s" in (last.error or "")
        assert (death.how, death.num_requests) == ("got nothing done for 0.5 s and was killed", 1)

    run(scenario, engine_timeout=0.5)
    assert "in _advance" in capfd.readouterr().err


def test_a_long_step_in_which_kernels_get_on_is_healthy_and_no_hang() -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client.generate(request("r", LABOUR, max_tokens=1))))
        await asyncio.sleep(0.2)
        assert await client.is_responsive()
        assert (await task)[-1].finish_reason is FinishReason.LENGTH

    run(scenario, engine_timeout=1)


def test_a_hung_engine_does_not_answer_but_has_its_time_before_it_is_killed() -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client.generate(request("r", HANG))))
        await asyncio.sleep(0.2)
        assert not any(await asyncio.gather(*(client.is_responsive() for _ in range(20))))
        assert client.is_alive
        os.kill(client.pid, signal.SIGKILL)
        await task

    run(scenario, engine_timeout=60)


def test_a_stopped_engine_that_has_work_is_noticed_and_killed() -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(death_of(client, "r", b"abc"))
        await until(lambda: client.stats.num_requests_running == 1)
        os.kill(client.pid, signal.SIGSTOP)
        last, death = await asyncio.wait_for(task, 3)
        assert last.finish_reason is FinishReason.ERROR
        assert death.how == "was stopped by a signal and was killed"

    run(scenario)


def test_a_stopped_idle_engine_is_noticed_when_somebody_asks() -> None:
    async def scenario(client: EngineClient) -> None:
        assert await client.is_responsive()
        os.kill(client.pid, signal.SIGSTOP)
        await asyncio.sleep(0.05)
        asked_at = time.monotonic()
        assert not await client.is_responsive()
        assert time.monotonic() - asked_at < 0.5
        assert "stopped" in (await asyncio.wait_for(client.death, 5)).how

    run(scenario)


def test_an_engine_that_is_continued_in_time_goes_on() -> None:
    async def scenario(client: EngineClient) -> None:
        task = asyncio.create_task(collect(client.generate(request("r", max_tokens=400))))
        await until(lambda: client.stats.num_requests_running == 1)
        os.kill(client.pid, signal.SIGSTOP)
        os.kill(client.pid, signal.SIGCONT)
        assert (await task)[-1].finish_reason is FinishReason.LENGTH

    run(scenario)
