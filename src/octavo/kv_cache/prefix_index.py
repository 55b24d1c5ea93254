"""The prefix index: which token prefixes have their keys and values in which blocks.

A radix tree with one block of tokens an edge. It holds no references and frees nothing: the manager does.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass


class NodeState(enum.Enum):
    COMPUTING = "computing"  # a running sequence is going to compute it; others wait for that rather than repeat it
    READY = "ready"  # its content is there for every step planned from now on
    GONE = "gone"  # no longer in the tree


class PrefixNode:
    """One block's worth of tokens behind the prefix that its ancestors spell."""

    __slots__ = ("block", "children", "key", "parent", "state")

    def __init__(self, parent: PrefixNode | None, key: Hashable, block: int | None) -> None:
        self.parent = parent
        self.key = key
        self.block = block  # None while COMPUTING
        self.children: dict[Hashable, PrefixNode] = {}
        self.state = NodeState.COMPUTING if block is None else NodeState.READY


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """What the cache has of a prompt: whole blocks, and of the next block perhaps the beginning."""

    blocks: list[int]
    num_tokens: int  # in `blocks`
    node: PrefixNode  # the last node matched, where the sequence's own blocks continue
    waits_for: PrefixNode | None  # the node of the next block, if somebody is computing it
    partial: tuple[int, int] | None = None  # (block, tokens of it that match); only whole blocks are matched so far

    @property
    def computing(self) -> bool:
        """The next block exists, but is not computed yet."""
        return self.waits_for is not None


class PrefixIndex:
    """Keys are the exact tokens of each block, below an extra key (a cache salt) that separates whole trees.

    A sequence holds the blocks of a path from the root and gives them back tail first. So wherever a node's block is
    free, all blocks below it are free as well and were freed before it: evicting the least recently freed block always
    takes a leaf.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.root = PrefixNode(None, None, -1)
        self._node_of_block: dict[int, PrefixNode] = {}

    def match(self, tokens: Sequence[int], extra_key: Hashable) -> PrefixMatch:
        """The longest prefix of READY blocks, leaving at least the last token to be computed (it gives the logits)."""
        node, blocks = self.root, []
        waits_for = None
        size = self.block_size
        for first in range(0, (len(tokens) - 1) // size * size, size):
            child = node.children.get(self._key(node, tokens[first : first + size], extra_key))
            if child is None:
                break
            if child.block is None:
                waits_for = child
                break
            node = child
            blocks.append(child.block)
        return PrefixMatch(blocks, len(blocks) * size, node, waits_for)

    def insert(
        self, parent: PrefixNode, block_tokens: Sequence[int], extra_key: Hashable, block: int | None = None
    ) -> PrefixNode | None:
        """Add a node below `parent`: READY with its block, COMPUTING without. None if an equal node exists already."""
        assert len(block_tokens) == self.block_size
        assert parent.state is not NodeState.GONE
        assert block is None or parent.state is NodeState.READY, "a ready node's prefix is ready"
        key = self._key(parent, block_tokens, extra_key)
        if key in parent.children:
            return None
        node = parent.children[key] = PrefixNode(parent, key, block)
        if block is not None:
            self._node_of_block[block] = node
        return node

    def set_ready(self, node: PrefixNode, block: int) -> None:
        """The step that computes the node into `block` has been planned."""
        assert node.state is NodeState.COMPUTING
        assert node.parent is not None
        assert node.parent.state is NodeState.READY
        node.state = NodeState.READY
        node.block = block
        self._node_of_block[block] = node

    def remove(self, node: PrefixNode) -> None:
        """Take away a COMPUTING node and all below it: whoever was going to compute them no longer will."""
        self._detach(node)
        removed = [node]
        for below in removed:
            # Only a node's own sequence builds upon it before it is READY, so all of these are that sequence's.
            assert below.block is None
            below.state = NodeState.GONE
            removed.extend(below.children.values())

    def evict(self, block: int) -> None:
        """The block is being handed out for something else: drop its node."""
        node = self._node_of_block.pop(block)
        assert not node.children, f"block {block} is evicted before what was built upon it"
        self._detach(node)
        node.state = NodeState.GONE

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes but the root, parents before children. O(nodes)."""
        pending = list(self.root.children.values())
        for node in pending:
            yield node
            pending.extend(node.children.values())

    def _key(self, parent: PrefixNode, block_tokens: Sequence[int], extra_key: Hashable) -> Hashable:
        tokens = tuple(block_tokens)
        # The extra key is part of the first level's keys only, so that no tree of its own has to be looked after.
        return (extra_key, tokens) if parent is self.root else tokens

    @staticmethod
    def _detach(node: PrefixNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
