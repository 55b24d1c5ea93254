"""One sequence's map from logical to physical blocks, and the copies that keep shared blocks from being overwritten.

It knows positions and blocks, never tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv_cache.block_pool import BlockPool


class BlockTable:
    """The table of each of `num_groups` KV groups that keep the same tokens.

    Position p of the sequence lives in block `columns[g][p // block_size]` of group g, at offset p % block_size. The
    logical blocks before `num_dropped` are not held, and their entries are any block's number; on each of the others
    the table has one reference. Columns may be read by others while the table grows: they are extended and overwritten
    in place, but never emptied in place.
    """

    __slots__ = ("_pool", "block_size", "capacity", "columns", "num_blocks", "num_dropped")

    def __init__(self, pool: BlockPool, block_size: int, num_groups: int = 1) -> None:
        self._pool = pool
        self.block_size = block_size
        self.columns: list[list[int]] = [[] for _ in range(num_groups)]
        self.num_blocks = 0  # logical ones, dropped ones included
        self.num_dropped = 0
        self.capacity = 0  # tokens that the logical blocks can hold

    def share(self, cached: Iterable[tuple[int, ...]], num_absent: int = 0) -> None:
        """Begin with `num_absent` logical blocks that are not held and cached ones, taking a reference on each."""
        assert self.num_blocks == 0
        for column in self.columns:
            column.extend([0] * num_absent)
        self.num_blocks = self.num_dropped = num_absent
        self.capacity = num_absent * self.block_size
        for blocks in cached:
            for block in blocks:
                self._pool.touch(block)
            self._append(blocks)

    def num_missing(self, num_tokens: int) -> int:
        """Physical blocks without which `num_tokens` positions are not covered."""
        return max(0, -(-(num_tokens - self.capacity) // self.block_size)) * len(self.columns)

    def grow(self, num_tokens: int) -> bool:
        """Cover `num_tokens` positions. All or nothing: False, and no change, if too few blocks are free."""
        if self.num_missing(num_tokens) > self._pool.num_free:
            return False
        while self.capacity < num_tokens:
            for column in self.columns:
                column.append(self._pool.allocate())
            self.num_blocks += 1
            self.capacity += self.block_size
        return True

    def drop_before(self, position: int) -> None:
        """Give back the blocks that hold only positions before this one, the first ones first."""
        for i in range(self.num_dropped, position // self.block_size):
            for column in self.columns:
                self._pool.free(column[i])
            self.num_dropped = i + 1

    def blocks_at(self, i: int) -> tuple[int, ...]:
        """The physical blocks of logical block i, one for each group."""
        assert i >= self.num_dropped
        return tuple([column[i] for column in self.columns])

    def fork(self) -> BlockTable:
        """A second table over the same blocks."""
        child = BlockTable(self._pool, self.block_size, len(self.columns))
        child.columns = [list(column) for column in self.columns]
        child.num_blocks, child.num_dropped, child.capacity = self.num_blocks, self.num_dropped, self.capacity
        for column in child.columns:
            for block in column[self.num_dropped :]:
                self._pool.fork(block)
        return child

    def copy_on_write(self, first: int, count: int) -> list[tuple[int, int]] | None:
        """Make positions [first, first + count), whose blocks the table holds, safe to write.

        Replaces each block there that is shared or cached by a fresh one and returns the (source, destination) pairs
        whose content must be copied, in this order, before the write. All or nothing: None if too few blocks are free.
        """
        assert first + count <= self.capacity
        logical = range(first // self.block_size, -(-(first + count) // self.block_size))
        assert logical.start >= self.num_dropped
        shared = [(column, i) for i in logical for column in self.columns if not self._pool.is_writable(column[i])]
        if len(shared) > self._pool.num_free:
            return None
        copies = []
        for column, i in shared:
            source, destination = column[i], self._pool.allocate()
            self._pool.free(source)
            column[i] = destination
            copies.append((source, destination))
        return copies

    def release(self) -> None:
        """Give all blocks back, the last first: a cached prefix must outlive what was built upon it."""
        for i in reversed(range(self.num_dropped, self.num_blocks)):
            for column in self.columns:
                self._pool.free(column[i])
        self.columns = [[] for _ in self.columns]
        self.num_blocks = self.num_dropped = self.capacity = 0

    def _append(self, blocks: tuple[int, ...]) -> None:
        for column, block in zip(self.columns, blocks, strict=True):
            column.append(block)
        self.num_blocks += 1
        self.capacity += self.block_size
