from __future__ import annotations

from dataclasses import replace

import pytest

from octavo.core.records import KVGroup
from octavo.kv_cache.groups import kinds_of
from octavo.kv_cache.prefix_index import NodeState, PrefixIndex, PrefixMatch, PrefixNode

SIZE = 8
FULL = KVGroup("full", num_layers=1, num_kv_heads=1, head_dim=1)
SLIDING = KVGroup("sliding", num_layers=1, num_kv_heads=1, head_dim=1, kind="sliding", window=12)  # two blocks behind


def new_index(*groups: KVGroup) -> PrefixIndex:
    return PrefixIndex(SIZE, kinds_of(groups or (FULL,)))


def tokens(*values: int) -> list[int]:
    """One block of each value."""
    return [value for value in values for _ in range(SIZE)]


def insert_path(index: PrefixIndex, values: list[int], blocks: list[int], salt: str | None = None) -> list[PrefixNode]:
    """Nodes below the root; with several kinds of groups those of later kinds have 100, 200 … added to their blocks."""
    nodes = [index.root]
    for value, block in zip(values, blocks, strict=True):
        node = index.insert(nodes[-1], tokens(value), salt, None)
        for kind in range(len(node.blocks)):
            assert index.place(node, kind, (100 * kind + block,)) == ()
        index.set_ready(node)
        nodes.append(node)
    return nodes[1:]


def blocks(match: PrefixMatch) -> list[int]:
    """Of the first kind."""
    return [block for node in match.nodes for block in node.blocks[0] or ()]


def test_whole_ready_blocks_match() -> None:
    index = new_index()
    insert_path(index, [1, 2, 3], [10, 11, 12])
    match = index.match([*tokens(1, 2), 3, 3], None)
    assert (blocks(match), match.num_tokens, match.partial, match.waits_for) == ([10, 11], 2 * SIZE, None, None)


def test_the_last_token_of_a_prompt_is_never_matched() -> None:
    index = new_index()
    insert_path(index, [1, 2], [10, 11])
    assert blocks(index.match(tokens(1, 2), None)) == [10]
    assert blocks(index.match([*tokens(1, 2), 0], None)) == [10, 11]
    assert blocks(index.match([1], None)) == []


def test_one_different_token_ends_the_match() -> None:
    index = new_index()
    insert_path(index, [1, 2], [10, 11])
    prompt = [*tokens(1, 2), 0]
    prompt[SIZE + 3] = 9
    assert blocks(index.match(prompt, None)) == [10]


def test_another_extra_key_is_another_tree() -> None:
    index = new_index()
    insert_path(index, [1], [10])
    insert_path(index, [1], [20], salt="tenant")
    prompt = [*tokens(1), 0]
    assert blocks(index.match(prompt, None)) == [10]
    assert blocks(index.match(prompt, "tenant")) == [20]
    assert blocks(index.match(prompt, "other")) == []


def test_a_computing_block_ends_the_match_and_says_so() -> None:
    index = new_index()
    (first,) = insert_path(index, [1], [10])
    node = index.insert(first, tokens(2), None, owner=7)
    match = index.match([*tokens(1, 2), 0], None)
    assert (blocks(match), match.waits_for) == ([10], node)
    assert index.match(tokens(1, 2), None).waits_for is None, "the block it would wait for holds its last token"
    index.place(node, 0, (11,))
    index.set_ready(node)
    assert blocks(index.match([*tokens(1, 2), 0], None)) == [10, 11]


def test_an_owner_that_gives_up_takes_its_computing_nodes_along() -> None:
    index = new_index()
    (first,) = insert_path(index, [1], [10])
    second = index.insert(first, tokens(2), None, owner=7)
    third = index.insert(second, tokens(3), None, owner=7)
    index.disown([second, third])
    assert second.state is third.state is NodeState.GONE
    assert second.owner is third.owner is None
    assert list(index.nodes()) == [first]
    assert index.match([*tokens(1, 2), 0], None).waits_for is None


def test_an_evicted_block_no_longer_matches() -> None:
    index = new_index()
    insert_path(index, [1, 2], [10, 11])
    assert index.evict(11) == []
    assert blocks(index.match([*tokens(1, 2), 0], None)) == [10]
    assert index.evict(10) == []
    assert list(index.nodes()) == []


def test_what_was_built_upon_an_evicted_block_is_lost_with_it() -> None:
    index = new_index(FULL, SLIDING)
    nodes = insert_path(index, [1, 2, 3], [10, 11, 12])
    computing = index.insert(nodes[-1], tokens(4), None, owner=7)
    assert sorted(index.evict(11)) == [12, 111, 112]
    assert list(index.nodes()) == [nodes[0]]
    assert computing.state is NodeState.GONE


def test_a_prefix_needs_sliding_blocks_in_the_window_before_its_end_only() -> None:
    index = new_index(FULL, SLIDING)
    insert_path(index, [1, 2, 3, 4, 5], [10, 11, 12, 13, 14])
    prompt = [*tokens(1, 2, 3, 4, 5), 0]
    assert index.evict(110) == []
    assert blocks(index.match(prompt, None)) == [10, 11, 12, 13, 14]
    index.evict(114)
    assert blocks(index.match(prompt, None)) == [10, 11, 12, 13]
    index.evict(112)
    assert blocks(index.match(prompt, None)) == [], "11 has no window before it, 13 lacks a part"


def test_a_prefix_shorter_than_the_window_needs_all_its_sliding_blocks() -> None:
    index = new_index(SLIDING, FULL)
    insert_path(index, [1, 2], [10, 11])
    assert blocks(index.match([*tokens(1), 0], None)) == [10]
    index.evict(110)
    assert blocks(index.match([*tokens(1, 2), 0], None)) == []


def test_lost_sliding_blocks_that_somebody_computes_again_are_waited_for() -> None:
    index = new_index(FULL, SLIDING)
    _, second, _ = insert_path(index, [1, 2, 3], [10, 11, 12])
    index.evict(111)
    prompt = [*tokens(1, 2, 3), 0]
    assert index.match(prompt, None).waits_for is None
    second.owner = 7
    match = index.match(prompt, None)
    assert (blocks(match), match.waits_for) == ([10], second)
    assert index.match([*tokens(1), 0], None).waits_for is None
    index.disown([second])
    assert second.state is NodeState.READY, "its blocks in full groups are still there"
    assert index.match(prompt, None).waits_for is None


def test_with_sliding_groups_only_a_node_stays_while_it_has_a_block_a_child_or_an_owner() -> None:
    index = new_index(SLIDING)
    first, second, third = insert_path(index, [1, 2, 3], [10, 11, 12])
    index.evict(10)
    index.evict(11)
    assert list(index.nodes()) == [first, second, third]
    second.owner = 7
    index.evict(12)
    assert list(index.nodes()) == [first, second]
    index.disown([second])
    assert list(index.nodes()) == []


def test_a_node_that_was_kept_for_a_child_alone_goes_with_it() -> None:
    index = new_index(SLIDING)
    (first,) = insert_path(index, [1], [10])
    second = index.insert(first, tokens(2), None, owner=7)
    index.evict(10)
    assert list(index.nodes()) == [first, second]
    index.disown([second])
    assert list(index.nodes()) == []
    assert first.state is NodeState.GONE


@pytest.mark.parametrize(("window", "num_blocks"), [(1, 0), (2, 1), (SIZE + 1, 1), (SIZE + 2, 2)])
def test_a_window_reaches_back_over_one_token_less_than_its_length(window: int, num_blocks: int) -> None:
    index = new_index(FULL, replace(SLIDING, window=window))
    insert_path(index, [1, 2, 3], [10, 11, 12])
    prompt = [*tokens(1, 2, 3), 0]
    for i in range(3 - num_blocks):
        index.evict(110 + i)
    assert index.match(prompt, None).num_tokens == 3 * SIZE
    if num_blocks:
        index.evict(113 - num_blocks)
        assert index.match(prompt, None).num_tokens == 0
