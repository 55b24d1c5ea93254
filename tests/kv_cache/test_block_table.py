from __future__ import annotations

import random

from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.block_table import BlockTable


def blocks(table: BlockTable) -> list[int]:
    (column,) = table.columns
    return column


def test_a_table_grows_by_whole_blocks_and_only_when_it_must() -> None:
    pool = BlockPool(4)
    table = BlockTable(pool, block_size=8)
    assert table.grow(1)
    assert table.capacity == 8
    assert table.grow(8)
    assert pool.num_in_use == 1
    assert table.grow(9)
    assert pool.num_in_use == len(blocks(table)) == 2


def test_growing_is_all_or_nothing() -> None:
    pool = BlockPool(2)
    table = BlockTable(pool, block_size=8)
    assert not table.grow(17)
    assert (blocks(table), pool.num_free) == ([], 2)


def test_a_reader_of_a_released_table_keeps_what_it_saw() -> None:
    table = BlockTable(BlockPool(2), block_size=8)
    table.grow(16)
    seen = blocks(table)
    before = list(seen)
    table.release()
    assert seen == before
    assert (blocks(table), table.capacity) == ([], 0)


def test_a_fork_shares_all_blocks_until_one_side_writes() -> None:
    pool = BlockPool(4)
    parent = BlockTable(pool, block_size=8)
    parent.grow(12)
    child = parent.fork()
    assert blocks(child) == blocks(parent)
    assert pool.num_in_use == 2
    copies = child.copy_on_write(first=12, count=1)
    assert copies == [(blocks(parent)[1], blocks(child)[1])]
    assert blocks(child)[0] == blocks(parent)[0]
    assert parent.copy_on_write(first=12, count=1) == [], "the parent is alone with its block now"


def test_a_cached_block_is_copied_before_a_write() -> None:
    pool = BlockPool(2)
    table = BlockTable(pool, block_size=8)
    table.grow(8)
    (cached,) = blocks(table)
    pool.mark_cached(cached)
    assert table.copy_on_write(0, 1) == [(cached, blocks(table)[0])]
    assert blocks(table) != [cached]
    assert pool.num_cached_idle == 1


def test_copy_on_write_is_all_or_nothing() -> None:
    pool = BlockPool(3)
    parent = BlockTable(pool, block_size=8)
    parent.grow(16)
    child = parent.fork()
    assert child.copy_on_write(0, 16) is None
    assert blocks(child) == blocks(parent)
    assert pool.num_free == 1


def test_groups_of_one_kind_grow_and_give_back_together() -> None:
    pool = BlockPool(7)
    table = BlockTable(pool, block_size=8, num_groups=3)
    assert table.num_missing(16) == 6
    assert table.grow(16)
    assert not table.grow(17), "one block is free, but three are needed"
    assert sorted(block for column in table.columns for block in column) == sorted(
        set(range(7)) - {*pool.free_blocks()}
    )
    table.release()
    assert pool.num_in_use == 0


def test_only_blocks_wholly_before_a_position_are_dropped_and_never_given_back_again() -> None:
    pool = BlockPool(8)
    table = BlockTable(pool, block_size=8, num_groups=2)
    table.grow(32)
    for position, num_in_use in ((7, 8), (8, 6), (8, 6), (3, 6), (23, 4)):
        table.drop_before(position)
        assert pool.num_in_use == num_in_use
    assert table.num_missing(32) == 0
    child = table.fork()
    table.release()
    assert pool.num_in_use == 4
    child.release()
    assert pool.num_in_use == 0


def test_forked_tables_never_see_each_others_writes() -> None:
    """Random forks, writes and releases on a memory that remembers who should read what."""
    num_copies = num_refused = 0
    for seed in range(50):
        rng = random.Random(seed)
        size = rng.choice([8, 16])
        pool = BlockPool(rng.randint(4, 24))
        memory = [[0] * size for _ in range(pool.num_blocks)]
        tables: list[tuple[BlockTable, list[int]]] = []  # and what each should read
        for value in range(1, 200):
            action = rng.random()
            if not tables or action < 0.1:
                tables.append((BlockTable(pool, size), []))
            elif action < 0.25:
                table, content = rng.choice(tables)
                tables.append((table.fork(), list(content)))
            elif action < 0.4:
                table, _ = tables.pop(rng.randrange(len(tables)))
                table.release()
            else:
                table, content = rng.choice(tables)
                first = rng.randint(max(0, len(content) - size), len(content))  # also over the end, as a rollback would
                count = rng.randint(1, size + 3)
                copies = table.copy_on_write(first, count) if table.grow(first + count) else None
                if copies is None:
                    num_refused += 1
                    continue
                num_copies += len(copies)
                for source, destination in copies:
                    memory[destination] = list(memory[source])
                content[first:] = [value] * count
                for position in range(first, first + count):
                    memory[blocks(table)[position // size]][position % size] = value
            for table, content in tables:
                assert [token for block in blocks(table) for token in memory[block]][: len(content)] == content
            refs = [block for table, _ in tables for block in blocks(table)]
            assert all(pool.num_refs(block) == refs.count(block) for block in range(pool.num_blocks))
            pool.check_invariants()
        for table, _ in tables:
            table.release()
        assert pool.num_in_use == 0
    assert num_copies > 100
    assert num_refused > 100
