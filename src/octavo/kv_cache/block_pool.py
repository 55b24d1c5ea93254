"""The pool of physical cache blocks: reference counts and the order in which free blocks are handed out.

It knows block numbers only: not what a block holds, nor whose it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator


class BlockPool:
    """Blocks 0..num_blocks-1 as flat arrays; every operation is O(1).

    Free blocks form one doubly linked list. Its front is handed out next: first the blocks without cached content, then
    the cached ones, least recently freed first. A cached block keeps its content while it is free; when it is handed
    out after all, `on_evict(block)` is called before anything else happens to it.
    """

    def __init__(self, num_blocks: int, on_evict: Callable[[int], None] = lambda block: None) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_free = num_blocks  # includes the cached ones
        self.num_cached_idle = 0
        self._on_evict = on_evict
        self._refs = [0] * num_blocks
        self._cached = bytearray(num_blocks)
        # The extra last element is the list's sentinel: its next is the front, its previous the back.
        self._next: list[int] = [*range(1, num_blocks + 1), 0]
        self._prev: list[int] = [num_blocks, *range(num_blocks)]

    @property
    def num_in_use(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self) -> int:
        """Hand out a free block with one reference. The caller has looked at `num_free`."""
        block = self._next[self.num_blocks]
        assert block != self.num_blocks, "no free block"
        self._unlink(block)
        if self._cached[block]:
            self._cached[block] = 0
            self.num_cached_idle -= 1
            self._on_evict(block)
        self._refs[block] = 1
        return block

    def free(self, block: int) -> None:
        """Drop one reference; with the last one the block becomes free."""
        refs = self._refs[block] - 1
        assert refs >= 0, f"block {block} is freed more often than it was taken"
        self._refs[block] = refs
        if refs == 0:
            # Uncached blocks go to the front and cached ones to the back, so one list holds both orders.
            if self._cached[block]:
                self._link(self._prev[self.num_blocks], block)
                self.num_cached_idle += 1
            else:
                self._link(self.num_blocks, block)

    def fork(self, block: int) -> None:
        """Take one more reference on a block that is in use."""
        assert self._refs[block] > 0, f"block {block} is not in use"
        self._refs[block] += 1

    def touch(self, block: int) -> None:
        """Take a reference on a cached block, be it free or in use."""
        assert self._cached[block], f"block {block} has no cached content"
        if self._refs[block] == 0:
            self._unlink(block)
            self.num_cached_idle -= 1
        self._refs[block] += 1

    def mark_cached(self, block: int) -> None:
        """From now on the block, which is in use, keeps its content until it is evicted."""
        assert self._refs[block] > 0, f"block {block} is not in use"
        self._cached[block] = 1

    def forget(self, block: int) -> None:
        """The cached content is of no use any more; a free block goes to those that are handed out first."""
        assert self._cached[block], f"block {block} has no cached content"
        self._cached[block] = 0
        if self._refs[block] == 0:
            self._unlink(block)
            self.num_cached_idle -= 1
            self._link(self.num_blocks, block)

    def num_refs(self, block: int) -> int:
        return self._refs[block]

    def is_cached(self, block: int) -> bool:
        return bool(self._cached[block])

    def is_writable(self, block: int) -> bool:
        """Whether its one owner may change the content: nobody shares it and no cached prefix relies on it."""
        return self._refs[block] == 1 and not self._cached[block]

    def free_blocks(self) -> Iterator[int]:
        """The free blocks in the order in which they will be handed out. O(num_free)."""
        block = self._next[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._next[block]

    def check_invariants(self) -> None:
        """Assert that counts, references and the free list agree. O(num_blocks)."""
        order = list(self.free_blocks())
        assert len(order) == len(set(order)) == self.num_free
        assert sorted(order) == [b for b in range(self.num_blocks) if self._refs[b] == 0]
        cached = [self.is_cached(b) for b in order]
        assert cached == sorted(cached), "an uncached free block stands behind a cached one"
        assert sum(cached) == self.num_cached_idle
        assert list(reversed(order)) == list(self._reversed_free_blocks())

    def _reversed_free_blocks(self) -> Iterator[int]:
        block = self._prev[self.num_blocks]
        while block != self.num_blocks:
            yield block
            block = self._prev[block]

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before], self._prev[after] = after, before
        self.num_free -= 1

    def _link(self, before: int, block: int) -> None:
        after = self._next[before]
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
