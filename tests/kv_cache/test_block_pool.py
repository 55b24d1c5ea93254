from __future__ import annotations

import pytest

from octavo.kv_cache.block_pool import BlockPool


def test_blocks_are_handed_out_once_until_none_is_left() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(4)]
    assert sorted(blocks) == [0, 1, 2, 3]
    assert (pool.num_free, pool.num_in_use) == (0, 4)
    with pytest.raises(AssertionError, match="no free block"):
        pool.allocate()


def test_uncached_blocks_are_reused_before_cached_ones() -> None:
    pool = BlockPool(4)
    cached, plain, *_ = [pool.allocate() for _ in range(4)]
    pool.mark_cached(cached)
    pool.free(cached)
    pool.free(plain)
    pool.check_invariants()
    assert (pool.num_free, pool.num_cached_idle) == (2, 1)
    assert [pool.allocate(), pool.allocate()] == [plain, cached]


def test_cached_blocks_are_evicted_by_least_recent_use() -> None:
    evicted: list[int] = []
    pool = BlockPool(3, on_evict=evicted.append)
    a, b, c = (pool.allocate() for _ in range(3))
    for block in (a, b, c):
        pool.mark_cached(block)
        pool.free(block)
    pool.touch(a)
    pool.free(a)
    assert [pool.allocate() for _ in range(3)] == evicted == [b, c, a]
    assert not any(pool.is_cached(block) for block in (a, b, c))
    pool.check_invariants()


def test_touching_a_cached_block_saves_it_from_eviction() -> None:
    pool = BlockPool(2)
    block = pool.allocate()
    pool.mark_cached(block)
    pool.free(block)
    pool.touch(block)
    assert (pool.num_in_use, pool.num_cached_idle) == (1, 0)
    assert pool.allocate() != block
    assert pool.num_free == 0
    pool.check_invariants()


def test_a_shared_block_is_free_only_after_its_last_owner_let_go() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.fork(block)
    assert not pool.is_writable(block)
    pool.free(block)
    assert pool.is_writable(block)
    assert pool.num_free == 0
    pool.free(block)
    assert pool.num_free == 1
    with pytest.raises(AssertionError, match="freed more often"):
        pool.free(block)


def test_a_cached_block_is_not_writable() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.mark_cached(block)
    assert not pool.is_writable(block)
