from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest

from octavo.core.records import EngineStats
from octavo.server.logs import request_id
from octavo.server.stats_log import StatsLog


class TickingClock:
    """Two seconds later each time."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 2
        return self._now


class Parts:
    """What the log reads, as it is while a test says so."""

    def __init__(self) -> None:
        self.clock = TickingClock()
        self.metrics: Any = SimpleNamespace(prompt_tokens=0, generation_tokens=0)
        self.client: Any = SimpleNamespace(totals=EngineStats(), num_requests=0, info=SimpleNamespace(num_blocks=200))
        self.log = StatsLog(self.client, self.metrics, self.clock, seconds=0.01)

    @property
    def sleeps(self) -> bool:
        return self.log._task is None or self.log._task.done()


async def until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came true")


def test_while_there_is_work_there_are_lines_and_then_nothing_wakes_up(caplog: pytest.LogCaptureFixture) -> None:
    ids: list[str | None] = []

    def see(record: logging.LogRecord) -> bool:
        ids.append(request_id.get())
        return True

    async def scenario() -> None:
        request_id.set("of the first request")
        parts = Parts()
        assert parts.sleeps
        parts.log.work_begins()
        parts.log.work_begins()
        parts.metrics.prompt_tokens, parts.metrics.generation_tokens = 100, 50
        parts.client.num_requests = 3
        parts.client.totals = EngineStats(
            num_requests_running=2,
            num_requests_waiting=1,
            num_blocks_in_use=5,
            prefix_cache_queries=100,
            prefix_cache_hits=25,
        )
        await until(lambda: caplog.records)
        assert caplog.messages[0] == (
            "Avg prompt throughput: 50.0 tokens/s, Avg generation throughput: 25.0 tokens/s, Running: 2 reqs, "
            "Waiting: 1 reqs, KV cache usage: 2.5%, Prefix cache hit rate: 25.0%"
        )
        assert caplog.records[0].fields["generation_throughput"] == 25.0  # type: ignore[attr-defined]
        assert not parts.sleeps
        parts.client.num_requests = 0
        await until(lambda: parts.sleeps)
        lines = len(caplog.records)
        parts.log.work_begins()
        parts.metrics.generation_tokens = 51
        await until(lambda: len(caplog.records) > lines)
        await until(lambda: parts.sleeps)
        assert set(ids) == {None}

    logging.getLogger("octavo.stats").addFilter(see)
    try:
        with caplog.at_level(logging.INFO, logger="octavo.stats"):
            asyncio.run(scenario())
    finally:
        logging.getLogger("octavo.stats").removeFilter(see)


def test_a_request_that_stalls_keeps_its_line(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario() -> None:
        parts = Parts()
        parts.client.num_requests = 1
        parts.log.work_begins()
        await until(lambda: len(caplog.records) == 1)
        assert "Avg generation throughput: 0.0" in caplog.messages[0]

    with caplog.at_level(logging.INFO, logger="octavo.stats"):
        asyncio.run(scenario())
