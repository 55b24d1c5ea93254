"""A log line every ten seconds about throughput, queue and cache, in vLLM's words, while there is work.

It sleeps with the work: a server without requests has no timer. Knows counts, and nothing of requests or HTTP.
"""

from __future__ import annotations

import asyncio
import logging
from contextvars import Context
from typing import NamedTuple

from octavo.core.clock import Clock
from octavo.engine.supervisor import EngineSupervisor
from octavo.server.metrics import Metrics

logger = logging.getLogger("octavo.stats")

SECONDS = 10.0


class _Totals(NamedTuple):
    time: float
    prompt_tokens: int
    generation_tokens: int
    queries: int
    hits: int


class StatsLog:
    def __init__(self, client: EngineSupervisor, metrics: Metrics, clock: Clock, seconds: float = SECONDS) -> None:
        self._client = client
        self._metrics = metrics
        self._clock = clock
        self._seconds = seconds
        self._task: asyncio.Task[None] | None = None

    def work_begins(self) -> None:
        """To be called with each request."""
        if self._task is None or self._task.done():
            # A context of its own: the line is not about the request that happens to be the first.
            self._task = asyncio.create_task(self._run(self._totals()), context=Context())

    async def _run(self, before: _Totals) -> None:
        while True:
            await asyncio.sleep(self._seconds)
            now = self._totals()
            if now[1:] == before[1:] and not self._client.num_requests:
                return
            self._log(before, now)
            before = now

    def _totals(self) -> _Totals:
        metrics, stats = self._metrics, self._client.totals
        return _Totals(
            self._clock.now(),
            metrics.prompt_tokens,
            metrics.generation_tokens,
            stats.prefix_cache_queries,
            stats.prefix_cache_hits,
        )

    def _log(self, before: _Totals, now: _Totals) -> None:
        stats, num_blocks = self._client.totals, self._client.info.num_blocks
        seconds, prompt_tokens, generation_tokens, queries, hits = (b - a for a, b in zip(before, now, strict=True))
        fields = {
            "prompt_throughput": round(prompt_tokens / seconds, 1),
            "generation_throughput": round(generation_tokens / seconds, 1),
            "running": stats.num_requests_running,
            "waiting": stats.num_requests_waiting,
            "kv_cache_usage": round(stats.num_blocks_in_use / num_blocks, 4),
            "prefix_cache_hit_rate": round(hits / queries, 4) if queries else 0.0,
        }
        logger.info(
            "Avg prompt throughput: %.1f tokens/s, Avg generation throughput: %.1f tokens/s, Running: %d reqs, "
            "Waiting: %d reqs, KV cache usage: %.1f%%, Prefix cache hit rate: %.1f%%",
            *list(fields.values())[:4],
            fields["kv_cache_usage"] * 100,
            fields["prefix_cache_hit_rate"] * 100,
            extra={"fields": fields},
        )
