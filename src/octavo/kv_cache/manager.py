"""The cache as the scheduler sees it: admit a sequence, let it grow, note what it computed, free it.

Composes pool, tables and prefix index. It knows counts and token values, but nothing of steps, budgets or kernels.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from octavo.core.records import KVGroup, Sequence
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.block_table import BlockTable
from octavo.kv_cache.prefix_index import NodeState, PrefixIndex, PrefixMatch, PrefixNode


class Admission(enum.Enum):
    ADMITTED = "admitted"
    NO_BLOCKS = "no_blocks"  # too few free blocks for the sequence
    COMPUTING = "computing"  # a running sequence is computing a prefix of it, which it then can share


@dataclass(slots=True)
class _Holding:
    """What one admitted sequence holds."""

    table: BlockTable
    node: PrefixNode | None  # the last READY node of its path; None once a block of it is not in the index
    computing: list[PrefixNode]  # the nodes it owns and has not computed, the next one last
    num_committed_blocks: int  # leading blocks that are computed, and in the index if they can be


class KVCacheManager:
    """A sequence's path in the index and its table agree block for block, until the path ends.

    It ends where an equal node exists already that the sequence does not hold (somebody else computed the same at the
    same time, or it is the prompt's last block, which is never matched whole): that block stays private, and all later
    ones, so that whoever holds a node's block always holds those of its ancestors.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: tuple[KVGroup, ...] = (KVGroup("full", num_layers=1, num_kv_heads=1, head_dim=1),),
    ) -> None:
        assert len(groups) == 1, f"{len(groups)} KV groups, but one is supported"
        self.groups = groups
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.index = PrefixIndex(block_size)
        self.pool = BlockPool(num_blocks, on_evict=self.index.evict)
        self.num_prefix_queries = 0  # tokens of prompts looked up, each request counted once
        self.num_prefix_hits = 0  # of these, the tokens found
        self._holdings: dict[int, _Holding] = {}  # by seq_id
        self._waits_for: dict[int, PrefixNode] = {}  # by seq_id

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    @property
    def num_blocks_in_use(self) -> int:
        return self.pool.num_in_use

    @property
    def num_blocks_cached(self) -> int:
        """Free blocks that keep a cached prefix."""
        return self.pool.num_cached_idle

    def admit(self, seq: Sequence) -> Admission:
        """Give the sequence blocks for all its known tokens, those of a cached prefix first.

        Sets its num_computed_tokens and, at its first admission, num_cached_tokens. Its whole blocks that are not in
        the index are announced there as COMPUTING. Unless the answer is ADMITTED, nothing is held and nothing changed.
        """
        if self.pool.num_free == 0:
            return Admission.NO_BLOCKS  # the last token at least needs a block of its own
        waits_for = self._waits_for.get(seq.seq_id)
        if waits_for is not None and waits_for.state is NodeState.COMPUTING:
            return Admission.COMPUTING
        match = self._match(seq)
        if match.waits_for is not None:
            self._waits_for[seq.seq_id] = match.waits_for
            return Admission.COMPUTING
        num_idle = sum(self.pool.num_refs(block) == 0 for block in match.blocks)
        num_missing = -(-(seq.num_tokens - match.num_tokens) // self.block_size)
        if num_missing > self.pool.num_free - num_idle:
            return Admission.NO_BLOCKS

        self._waits_for.pop(seq.seq_id, None)
        table = BlockTable(self.pool, self.block_size)
        table.share(match.blocks)
        grown = table.grow(seq.num_tokens)
        assert grown
        self._holdings[seq.seq_id] = _Holding(table, match.node, self._announce(seq, match), len(match.blocks))
        seq.num_computed_tokens = match.num_tokens
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = match.num_tokens
            self.num_prefix_queries += seq.num_tokens if self.enable_prefix_caching else 0
            self.num_prefix_hits += match.num_tokens
        return Admission.ADMITTED

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Cover the sequence's first `num_tokens` tokens. All or nothing: False if too few blocks are free."""
        table = self._holdings[seq.seq_id].table
        return num_tokens <= table.capacity or table.grow(num_tokens)

    def commit(self, seq: Sequence) -> None:
        """Make the blocks known to others that num_computed_tokens (planned ones included) and token_ids fill."""
        holding = self._holdings[seq.seq_id]
        first = holding.num_committed_blocks
        num_blocks = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if num_blocks == first:
            return
        holding.num_committed_blocks = num_blocks
        if not self.enable_prefix_caching:
            return
        for i in range(first, num_blocks):
            if holding.node is None:
                return
            block = holding.table.blocks[i]
            if holding.computing:
                node: PrefixNode | None = holding.computing.pop()
                assert node is not None
                self.index.set_ready(node, block)
            else:
                node = self.index.insert(holding.node, self._block_tokens(seq, i), seq.request.cache_salt, block)
            if node is not None:
                self.pool.mark_cached(block)
            holding.node = node

    def free(self, seq: Sequence) -> None:
        """Give back whatever a sequence holds, if anything. What it has committed stays cached."""
        self._waits_for.pop(seq.seq_id, None)
        holding = self._holdings.pop(seq.seq_id, None)
        if holding is not None:
            if holding.computing:
                self.index.remove(holding.computing[-1])
            holding.table.release()

    def block_table(self, seq: Sequence) -> list[int]:
        """Physical block of each logical one: the live list of an admitted sequence, to be read only."""
        return self._holdings[seq.seq_id].table.blocks

    def check_invariants(self) -> None:
        """Assert that pool, tables and index agree. O(everything); for tests."""
        self.pool.check_invariants()
        refs = Counter(block for holding in self._holdings.values() for block in holding.table.blocks)
        assert all(self.pool.num_refs(block) == refs[block] for block in range(self.num_blocks))
        assert self.num_blocks_in_use == len(refs)

        place = {block: i for i, block in enumerate(self.pool.free_blocks())}
        announced = Counter(id(node) for holding in self._holdings.values() for node in holding.computing)
        ready_blocks = []
        for node in self.index.nodes():
            parent = node.parent
            assert parent is not None
            if node.block is None:
                assert node.state is NodeState.COMPUTING
                assert announced[id(node)] == 1, "nobody will compute this node"
                continue
            assert node.state is parent.state is NodeState.READY
            ready_blocks.append(node.block)
            if parent is not self.index.root and parent.block in place:
                assert node.block in place, "a child is in use and its parent is not"
                assert place[node.block] < place[parent.block], "a parent would be evicted before its child"
        assert sorted(ready_blocks) == [b for b in range(self.num_blocks) if self.pool.is_cached(b)]

        for holding in self._holdings.values():
            assert len(holding.table.blocks) * self.block_size == holding.table.capacity
            if holding.node is not None and self.enable_prefix_caching:
                node, path = holding.node, list[int | None]()
                while node.parent is not None:
                    path.append(node.block)
                    node = node.parent
                assert path[::-1] == holding.table.blocks[: holding.num_committed_blocks]

    def _match(self, seq: Sequence) -> PrefixMatch:
        if not self.enable_prefix_caching:
            return PrefixMatch([], 0, self.index.root, None)
        return self.index.match(seq.token_ids, seq.request.cache_salt)

    def _announce(self, seq: Sequence, match: PrefixMatch) -> list[PrefixNode]:
        """Insert COMPUTING nodes for the whole blocks behind the match; returns them, the first one last."""
        nodes: list[PrefixNode] = []
        if self.enable_prefix_caching:
            parent = match.node
            for i in range(len(match.blocks), seq.num_tokens // self.block_size):
                node = self.index.insert(parent, self._block_tokens(seq, i), seq.request.cache_salt)
                if node is None:
                    break
                nodes.append(node)
                parent = node
        return nodes[::-1]

    def _block_tokens(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
