"""One sequence's map from logical to physical blocks, and the copies that keep shared blocks from being overwritten.

It knows positions and blocks, never tokens.
"""

from __future__ import annotations

from collections.abc import Iterable

from octavo.kv_cache.block_pool import BlockPool


class BlockTable:
    """Position p of the sequence lives in block `blocks[p // block_size]` at offset p % block_size.

    The table holds one reference on each of its blocks. `blocks` may be read by others while the table grows: it is
    extended and overwritten in place, but never emptied in place.
    """

    __slots__ = ("_pool", "block_size", "blocks", "capacity")

    def __init__(self, pool: BlockPool, block_size: int) -> None:
        self._pool = pool
        self.block_size = block_size
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that the blocks can hold

    def share(self, cached_blocks: Iterable[int]) -> None:
        """Append cached blocks, taking a reference on each."""
        for block in cached_blocks:
            self._pool.touch(block)
            self._append(block)

    def grow(self, num_tokens: int) -> bool:
        """Cover `num_tokens` positions. All or nothing: False, and no change, if too few blocks are free."""
        missing = -(-(num_tokens - self.capacity) // self.block_size)
        if missing > self._pool.num_free:
            return False
        for _ in range(missing):
            self._append(self._pool.allocate())
        return True

    def fork(self) -> BlockTable:
        """A second table over the same blocks."""
        child = BlockTable(self._pool, self.block_size)
        for block in self.blocks:
            self._pool.fork(block)
            child._append(block)
        return child

    def copy_on_write(self, first: int, count: int) -> list[tuple[int, int]] | None:
        """Make positions [first, first + count), which the table covers, safe to write.

        Replaces each block there that is shared or cached by a fresh one and returns the (source, destination) pairs
        whose content must be copied, in this order, before the write. All or nothing: None if too few blocks are free.
        """
        assert first + count <= self.capacity
        logical = range(first // self.block_size, -(-(first + count) // self.block_size))
        shared = [i for i in logical if not self._pool.is_writable(self.blocks[i])]
        if len(shared) > self._pool.num_free:
            return None
        copies = []
        for i in shared:
            source, destination = self.blocks[i], self._pool.allocate()
            self._pool.free(source)
            self.blocks[i] = destination
            copies.append((source, destination))
        return copies

    def release(self) -> None:
        """Give all blocks back, the last first: a cached prefix must outlive what was built upon it."""
        for block in reversed(self.blocks):
            self._pool.free(block)
        self.blocks = []
        self.capacity = 0

    def _append(self, block: int) -> None:
        self.blocks.append(block)
        self.capacity += self.block_size
