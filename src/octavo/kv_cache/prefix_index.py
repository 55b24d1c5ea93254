"""The prefix index: which token prefixes have their keys and values in which blocks.

A radix tree with one block of tokens an edge. It holds no references and frees nothing: the manager does.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from octavo.kv_cache.groups import GroupKind


class NodeState(enum.Enum):
    COMPUTING = "computing"  # nobody has computed it, its owner is going to
    READY = "ready"  # what content it has is there for every step planned from now on
    GONE = "gone"  # no longer in the tree


class PrefixNode:
    """One block's worth of tokens behind the prefix that its ancestors spell."""

    __slots__ = ("blocks", "children", "key", "owner", "parent", "state")

    def __init__(self, parent: PrefixNode | None, key: Hashable, owner: int | None, num_kinds: int) -> None:
        self.parent = parent
        self.key = key
        # For each kind of KV group the physical block of each of its groups, or None: not computed, or evicted.
        self.blocks: list[tuple[int, ...] | None] = [None] * num_kinds
        self.children: dict[Hashable, PrefixNode] = {}
        self.state = NodeState.COMPUTING
        # The running sequence that is going to compute it (perhaps again, for what it lacks), so that others wait for
        # that rather than repeat it.
        self.owner = owner


@dataclass(slots=True, frozen=True)
class PrefixMatch:
    """What the cache has of a prompt: whole blocks, and of the next block perhaps the beginning."""

    nodes: list[PrefixNode]  # of the blocks that can be used, from the root on
    num_tokens: int  # in these
    node: PrefixNode  # the last of them or the root: where the sequence's own blocks continue
    waits_for: PrefixNode | None  # a node further on that somebody is computing
    partial: tuple[int, int] | None = None  # (block, tokens of it that match); only whole blocks are matched so far


class PrefixIndex:
    """Keys are the exact tokens of each block, below an extra key (a cache salt) that separates whole trees.

    A READY node has its blocks in all full groups; it goes, with all below it, when one of these is evicted. Blocks of
    sliding groups come and go one kind at a time. Without full groups a node stays while it has a block, a child or
    an owner.
    """

    def __init__(self, block_size: int, kinds: tuple[GroupKind, ...]) -> None:
        self.block_size = block_size
        self._kinds = kinds
        self._sliding = [
            (i, kind.num_window_blocks(block_size)) for i, kind in enumerate(kinds) if kind.window is not None
        ]
        self.root = PrefixNode(None, None, None, len(kinds))
        self.root.state = NodeState.READY
        self._place: dict[int, tuple[PrefixNode, int]] = {}  # block -> where `PrefixNode.blocks` has it: node, kind

    def match(self, tokens: Sequence[int], extra_key: Hashable) -> PrefixMatch:
        """The longest usable prefix, leaving at least the last token to be computed (it gives the logits).

        A prefix can be used if a token behind it finds all that it attends to: all blocks of full groups, and of
        sliding ones those in the window before the prefix's end.
        """
        node, path = self.root, list[PrefixNode]()
        size = self.block_size
        num_usable = 0
        runs = [0] * len(self._sliding)  # of each sliding kind, how many of the path's last nodes have its blocks
        for first in range(0, (len(tokens) - 1) // size * size, size):
            child = node.children.get(self._key(node, tokens[first : first + size], extra_key))
            if child is None:
                break
            path.append(child)
            if child.state is NodeState.COMPUTING:
                break
            node = child
            usable = True
            for j, (kind, num_window_blocks) in enumerate(self._sliding):
                runs[j] = 0 if child.blocks[kind] is None else runs[j] + 1
                usable &= runs[j] >= min(num_window_blocks, len(path))
            if usable:
                num_usable = len(path)
        waits_for = next((n for n in path[num_usable:] if n.owner is not None), None)
        nodes = path[:num_usable]
        return PrefixMatch(nodes, num_usable * size, nodes[-1] if nodes else self.root, waits_for)

    def find(self, parent: PrefixNode, block_tokens: Sequence[int], extra_key: Hashable) -> PrefixNode | None:
        return parent.children.get(self._key(parent, block_tokens, extra_key))

    def insert(
        self, parent: PrefixNode, block_tokens: Sequence[int], extra_key: Hashable, owner: int | None
    ) -> PrefixNode:
        """Add a COMPUTING node below `parent`, where `find` finds none."""
        assert len(block_tokens) == self.block_size
        assert parent.state is not NodeState.GONE
        key = self._key(parent, block_tokens, extra_key)
        assert key not in parent.children
        node = parent.children[key] = PrefixNode(parent, key, owner, len(self._kinds))
        return node

    def place(self, node: PrefixNode, kind: int, blocks: tuple[int, ...]) -> tuple[int, ...]:
        """The node's content in the groups of this kind is in `blocks`; returns those where it was before."""
        before = node.blocks[kind] or ()
        node.blocks[kind] = blocks
        for block in before:
            del self._place[block]
        for block in blocks:
            self._place[block] = node, kind
        return before

    def set_ready(self, node: PrefixNode) -> None:
        """The step that computes the node has been planned, and its blocks are placed."""
        assert node.parent is not None
        assert node.parent.state is NodeState.READY, "a ready node's prefix is ready"
        assert all(blocks or kind.window is not None for kind, blocks in zip(self._kinds, node.blocks, strict=True))
        node.state = NodeState.READY

    def disown(self, nodes: Sequence[PrefixNode]) -> None:
        """The owner of these nodes, a piece of one path from above to below, will not compute them."""
        ready = []
        for node in nodes:
            node.owner = None
            if node.state is not NodeState.READY:
                if node.state is NodeState.COMPUTING:
                    dropped = self._drop(node)
                    # Only its owner builds upon a node before it is READY, so there is nothing but that one's nodes.
                    assert not dropped
                break
            ready.append(node)
        self._prune(ready[-1] if ready else nodes[0].parent)

    def evict(self, block: int) -> list[int]:
        """The block is being handed out for something else; returns the other blocks that nobody can find now."""
        node, kind = self._place[block]
        if self._kinds[kind].window is None:
            lost = self._drop(node)
        else:
            lost = list(node.blocks[kind] or ())
            node.blocks[kind] = None
            for other in lost:
                del self._place[other]
            self._prune(node)
        lost.remove(block)
        return lost

    def nodes(self) -> Iterator[PrefixNode]:
        """All nodes but the root, parents before children. O(nodes)."""
        pending = list(self.root.children.values())
        for node in pending:
            yield node
            pending.extend(node.children.values())

    def _drop(self, top: PrefixNode) -> list[int]:
        """Take a node and all below it out of the tree; returns their blocks."""
        self._detach(top)
        dropped, lost = [top], list[int]()
        for node in dropped:
            node.state = NodeState.GONE
            node.owner = None
            for blocks in node.blocks:
                lost.extend(blocks or ())
            dropped.extend(node.children.values())
        for block in lost:
            del self._place[block]
        return lost

    def _prune(self, node: PrefixNode | None) -> None:
        """Take the node out of the tree, and then its ancestors, as far as they say nothing any more."""
        while node is not None and node.parent is not None and node.state is NodeState.READY:
            if node.children or node.owner is not None or any(node.blocks):
                return
            self._detach(node)
            node.state = NodeState.GONE
            node = node.parent

    def _key(self, parent: PrefixNode, block_tokens: Sequence[int], extra_key: Hashable) -> Hashable:
        tokens = tuple(block_tokens)
        # The extra key is part of the first level's keys only, so that no tree of its own has to be looked after.
        return (extra_key, tokens) if parent is self.root else tokens

    @staticmethod
    def _detach(node: PrefixNode) -> None:
        assert node.parent is not None
        del node.parent.children[node.key]
