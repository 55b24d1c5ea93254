from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from octavo.core.clock import VirtualClock
from octavo.core.config import EngineConfig
from octavo.core.errors import EngineUnavailableError
from octavo.core.records import FinishReason, Request, SamplingParams
from octavo.engine.process import EngineProcess, launch_engine
from octavo.engine.supervisor import HEALTHY_SECONDS, EngineSupervisor
from tests.server.fake_engine import CRASH, HANG
from tests.server.harness import ENVIRONMENT, children_of, fake_engine_command

LONG = 100_000  # tokens: never reached
FINE = fake_engine_command(0.001)
DEAD = ["/bin/false"]


@pytest.fixture(autouse=True)
def _children_find_the_fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", ENVIRONMENT["PYTHONPATH"])


def request(name: str, prompt: bytes = b"abc", max_tokens: int = LONG) -> Request:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    return Request(request_id=name, prompt_token_ids=list(prompt), params=params, arrival_time=0.0)


class World:
    """A supervisor over fake engines, in a time that passes only when it sleeps.

    launches: how each engine after the first is launched; the last of them again and again.
    """

    def __init__(
        self, launches: list[EngineConfig | list[str] | Exception] | None = None, max_restarts: int | None = None
    ) -> None:
        self.clock = VirtualClock()
        self.delays: list[float] = []
        self.num_given_up = 0
        self._launches = launches or [FINE]
        self.engine = EngineSupervisor(
            self._launch, self.clock, max_restarts=max_restarts, on_give_up=self._give_up, sleep=self._sleep
        )

    def run(self, scenario: Callable[[], Awaitable[None]]) -> None:
        async def whole() -> None:
            gc.collect()  # what earlier tests left open
            files, children = num_open_files(), children_of(os.getpid())
            await self.engine.start(launch_engine(EngineConfig("echo"), FINE))
            try:
                await asyncio.wait_for(scenario(), 20)
            finally:
                await self.engine.close()
            assert asyncio.all_tasks() == {asyncio.current_task()}
            assert children_of(os.getpid()) == children
            await asyncio.sleep(0)  # transports close their sockets in the next round
            assert num_open_files() <= files

        asyncio.run(whole())

    async def end_of(
        self, name: str, prompt: bytes = b"abc", max_tokens: int = LONG
    ) -> tuple[FinishReason | None, str]:
        """Submit a request and read it to its end, which comes exactly once."""
        outputs = [output async for output in self.engine.generate(request(name, prompt, max_tokens))]
        (reason,) = [output.finish_reason for output in outputs if output.finish_reason is not None]
        return reason, outputs[-1].error or ""

    async def until_back(self) -> None:
        while not self.engine.is_alive:
            await asyncio.sleep(0.005)

    async def kill(self) -> None:
        os.kill(self.engine.pid, signal.SIGKILL)
        while self.engine.is_alive:
            await asyncio.sleep(0.005)

    async def _sleep(self, seconds: float) -> None:
        self.delays.append(seconds)
        self.clock.advance(seconds)
        await asyncio.sleep(0)

    def _launch(self) -> EngineProcess:
        what = self._launches.pop(0) if len(self._launches) > 1 else self._launches[0]
        if isinstance(what, Exception):
            raise what
        if isinstance(what, EngineConfig):
            return launch_engine(what, FINE)
        return launch_engine(EngineConfig("echo"), what)

    def _give_up(self) -> None:
        self.num_given_up += 1


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_killed_engine_is_replaced_and_nothing_of_it_is_left(caplog: pytest.LogCaptureFixture) -> None:
    world = World()

    async def scenario() -> None:
        for number in range(3):
            before = world.engine.pid
            assert await world.end_of(f"short{number}", max_tokens=5) == (FinishReason.LENGTH, "")
            ends = [asyncio.create_task(world.end_of(f"{number}-{i}")) for i in range(16)]
            await asyncio.sleep(0.05)
            await world.kill()
            for end in ends:
                assert (await end)[0] is FinishReason.ERROR
            await world.until_back()
            assert world.engine.pid != before
            world.clock.advance(HEALTHY_SECONDS)
        await world.engine.check_health()

    world.run(scenario)
    assert world.delays == [0, 0, 0]
    assert world.engine.num_restarts == 3
    assert caplog.text.count("was killed by SIGKILL") == 3
    assert caplog.text.count("16 requests were running") == 3


def test_while_no_engine_is_there_requests_are_told_when_to_come_again() -> None:
    world = World()

    async def scenario() -> None:
        await world.kill()
        for ask in (world.engine.check_health, lambda: world.end_of("r")):
            with pytest.raises(EngineUnavailableError, match="ask again in 1 s") as caught:
                await ask()
            assert caught.value.retry_after == 1
        await world.until_back()
        assert await world.end_of("r", max_tokens=1) == (FinishReason.LENGTH, "")

    world.run(scenario)


def test_totals_go_on_over_the_death_of_an_engine() -> None:
    world = World()

    async def scenario() -> None:
        await world.end_of("r", max_tokens=5)
        num_steps = world.engine.totals.num_steps
        assert num_steps >= 5
        await world.kill()
        assert world.engine.totals.num_steps == num_steps
        await world.until_back()
        assert world.engine.totals.num_steps == num_steps
        await world.end_of("s", max_tokens=5)
        assert world.engine.totals.num_steps >= num_steps + 5

    world.run(scenario)


def test_engines_that_do_not_start_are_tried_later_and_later(caplog: pytest.LogCaptureFixture) -> None:
    world = World([*[DEAD] * 8, FINE])

    async def scenario() -> None:
        await world.kill()
        await world.until_back()
        assert world.delays == [0, 0.5, 1, 2, 4, 8, 16, 30, 30]
        world.clock.advance(HEALTHY_SECONDS - 1)  # not long enough to be taken for healthy
        await world.kill()
        await world.until_back()
        assert world.delays[9:] == [30]
        world.clock.advance(HEALTHY_SECONDS)
        await world.kill()
        await world.until_back()
        assert world.delays[10:] == [0]

    world.run(scenario)
    assert (
        caplog.text.count("could not be started again: the engine process ended with exit code 1 while it loaded") == 8
    )


def test_whatever_goes_wrong_at_a_start_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    world = World([OSError("no more processes"), RuntimeError("nobody thought of this"), FINE])

    async def scenario() -> None:
        await world.kill()
        await world.until_back()

    world.run(scenario)
    assert world.delays == [0, 0.5, 1]
    assert "could not be started again: no more processes" in caplog.text
    assert caplog.text.count("Traceback") == 1


def test_an_engine_that_crashes_again_and_again_is_waited_for_longer_each_time() -> None:
    world = World()

    async def scenario() -> None:
        for number in range(4):
            assert (await world.end_of(f"r{number}", CRASH))[1].startswith("the engine failed (RuntimeError)")
            await world.until_back()

    world.run(scenario)
    assert world.delays == [0, 0.5, 1, 2]


@pytest.mark.parametrize("most", [0, 2])
def test_after_so_many_restarts_in_a_row_it_gives_up(most: int) -> None:
    world = World([DEAD], max_restarts=most)

    async def scenario() -> None:
        await world.kill()
        while not world.num_given_up:
            await asyncio.sleep(0.005)
        with pytest.raises(EngineUnavailableError):
            await world.engine.check_health()

    world.run(scenario)
    assert world.engine.gave_up
    assert world.num_given_up == 1
    assert len(world.delays) == most


def test_a_model_that_has_changed_meanwhile_is_not_served(caplog: pytest.LogCaptureFixture) -> None:
    world = World([EngineConfig("echo", max_model_len=99), FINE])

    async def scenario() -> None:
        await world.kill()
        await world.until_back()
        assert world.engine.info.max_model_len == 1024

    world.run(scenario)
    assert world.delays == [0, 0.5]
    assert "its max_model_len is now 99, and the server began with 1024" in caplog.text


def test_once_it_shall_end_it_takes_nothing_and_starts_no_engine() -> None:
    world = World()

    async def scenario() -> None:
        running = asyncio.create_task(world.end_of("running"))
        await asyncio.sleep(0.05)
        world.engine.refuse_new()
        for ask in (world.engine.check_health, lambda: world.end_of("r")):
            with pytest.raises(EngineUnavailableError, match="stopping") as caught:
                await ask()
            assert caught.value.retry_after is None
        assert not running.done()
        await world.kill()
        assert (await running)[0] is FinishReason.ERROR
        await asyncio.sleep(0.1)
        assert world.delays == []

    world.run(scenario)


def test_it_can_be_closed_while_an_engine_starts() -> None:
    world = World([["/bin/sleep", "60"]])

    async def scenario() -> None:
        before = set(children_of(os.getpid()))
        await world.kill()
        while not set(children_of(os.getpid())) - before:
            await asyncio.sleep(0.005)

    world.run(scenario)


def test_it_can_be_closed_while_its_engine_hangs() -> None:
    world = World()

    async def scenario() -> None:
        hanging = asyncio.create_task(world.end_of("r", HANG))
        await asyncio.sleep(0.05)
        await world.engine.close()
        assert (await hanging)[0] is FinishReason.ABORT

    world.run(scenario)
