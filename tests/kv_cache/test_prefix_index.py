from __future__ import annotations

import pytest

from octavo.kv_cache.prefix_index import NodeState, PrefixIndex, PrefixNode

SIZE = 8


def tokens(*values: int) -> list[int]:
    """One block of each value."""
    return [value for value in values for _ in range(SIZE)]


def insert_path(index: PrefixIndex, values: list[int], blocks: list[int], salt: str | None = None) -> list[PrefixNode]:
    nodes = [index.root]
    for value, block in zip(values, blocks, strict=True):
        node = index.insert(nodes[-1], tokens(value), salt, block)
        assert node is not None
        nodes.append(node)
    return nodes[1:]


def test_whole_ready_blocks_match() -> None:
    index = PrefixIndex(SIZE)
    insert_path(index, [1, 2, 3], [10, 11, 12])
    match = index.match([*tokens(1, 2), 3, 3], None)
    assert (match.blocks, match.num_tokens, match.partial, match.computing) == ([10, 11], 2 * SIZE, None, False)


def test_the_last_token_of_a_prompt_is_never_matched() -> None:
    index = PrefixIndex(SIZE)
    insert_path(index, [1, 2], [10, 11])
    assert index.match(tokens(1, 2), None).blocks == [10]
    assert index.match([*tokens(1, 2), 0], None).blocks == [10, 11]
    assert index.match([1], None).blocks == []


def test_one_different_token_ends_the_match() -> None:
    index = PrefixIndex(SIZE)
    insert_path(index, [1, 2], [10, 11])
    prompt = [*tokens(1, 2), 0]
    prompt[SIZE + 3] = 9
    assert index.match(prompt, None).blocks == [10]


def test_another_extra_key_is_another_tree() -> None:
    index = PrefixIndex(SIZE)
    insert_path(index, [1], [10])
    insert_path(index, [1], [20], salt="tenant")
    prompt = [*tokens(1), 0]
    assert index.match(prompt, None).blocks == [10]
    assert index.match(prompt, "tenant").blocks == [20]
    assert index.match(prompt, "other").blocks == []


def test_a_computing_block_ends_the_match_and_says_so() -> None:
    index = PrefixIndex(SIZE)
    (first,) = insert_path(index, [1], [10])
    node = index.insert(first, tokens(2), None)
    assert node is not None
    match = index.match([*tokens(1, 2), 0], None)
    assert (match.blocks, match.computing, match.waits_for) == ([10], True, node)
    assert not index.match(tokens(1, 2), None).computing, "the block it would wait for holds its last token"
    index.set_ready(node, 11)
    assert index.match([*tokens(1, 2), 0], None).blocks == [10, 11]


def test_an_equal_node_is_not_inserted_twice() -> None:
    index = PrefixIndex(SIZE)
    insert_path(index, [1], [10])
    assert index.insert(index.root, tokens(1), None, 11) is None
    assert len(list(index.nodes())) == 1


def test_removing_a_computing_node_takes_what_is_below_it() -> None:
    index = PrefixIndex(SIZE)
    (first,) = insert_path(index, [1], [10])
    second = index.insert(first, tokens(2), None)
    assert second is not None
    third = index.insert(second, tokens(3), None)
    assert third is not None
    index.remove(second)
    assert second.state is third.state is NodeState.GONE
    assert list(index.nodes()) == [first]
    assert not index.match([*tokens(1, 2), 0], None).computing


def test_an_evicted_block_no_longer_matches() -> None:
    index = PrefixIndex(SIZE)
    insert_path(index, [1, 2], [10, 11])
    index.evict(11)
    assert index.match([*tokens(1, 2), 0], None).blocks == [10]
    index.evict(10)
    assert list(index.nodes()) == []


def test_a_block_is_never_evicted_before_what_was_built_upon_it() -> None:
    index = PrefixIndex(SIZE)
    insert_path(index, [1, 2], [10, 11])
    with pytest.raises(AssertionError, match="before what was built upon it"):
        index.evict(10)
