"""What a sample of the cache's blocks goes through: how long they live, lie idle, and until they are used again.

Only for who asks to know (kv_cache_metrics): a pool that nobody watches is a plain `BlockPool`. Knows block numbers and
a clock, neither sequences nor tokens.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from octavo.core.clock import Clock
from octavo.core.records import BlockTimes
from octavo.kv_cache.block_pool import BlockPool

MAX_PENDING = 4096  # times that wait to be taken; an engine whose statistics nobody reads keeps no more


class BlockWatch:
    """A block is watched from its allocation until it is allocated again, in the share `sample` (0 to 1) of cases.

    The blocks are drawn by a generator of its own with a fixed seed, so that two runs watch the same ones.
    """

    def __init__(self, num_blocks: int, clock: Clock, sample: float) -> None:
        self._clock = clock
        self._sample = sample
        self._random = random.Random(0)
        self._allocated: list[float | None] = [None] * num_blocks  # when; None: the block is not watched
        self._used = [0.0] * num_blocks  # when last
        self._times = BlockTimes([], [], [])

    def handed_out(self, block: int, *, evicted: bool) -> None:
        """The block begins a new life; `evicted`: it kept cached content until now."""
        began = self._allocated[block]
        drawn = self._random.random() < self._sample
        if began is None and not drawn:
            return
        now = self._clock.now()
        if began is not None and evicted:
            _note(self._times.lifetimes, now - began)
            _note(self._times.idle_times, now - self._used[block])
        self._allocated[block] = now if drawn else None
        self._used[block] = now

    def touched(self, block: int) -> None:
        """A cached block is used again."""
        if self._allocated[block] is not None:
            now = self._clock.now()
            _note(self._times.reuse_gaps, now - self._used[block])
            self._used[block] = now

    def take(self) -> BlockTimes | None:
        """What was seen since the last call; None if nothing was."""
        times = self._times
        if not (times.lifetimes or times.reuse_gaps):
            return None
        self._times = BlockTimes([], [], [])
        return times


class WatchedBlockPool(BlockPool):
    """A pool that tells a watch what it does."""

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None], watch: BlockWatch) -> None:
        super().__init__(num_blocks, on_evict)
        self._watch = watch

    def allocate(self) -> int:
        evicted = self.is_cached(self._next[self.num_blocks])
        block = super().allocate()
        self._watch.handed_out(block, evicted=evicted)
        return block

    def touch(self, block: int) -> None:
        super().touch(block)
        self._watch.touched(block)


def _note(times: list[float], seconds: float) -> None:
    if len(times) < MAX_PENDING:
        times.append(seconds)
