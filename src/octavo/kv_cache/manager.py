"""The cache as the scheduler sees it: admit a sequence, let it grow, note what it computed, free it.

Composes pool, tables and prefix index. It knows counts and token values, but nothing of steps, budgets or kernels.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass

from octavo.core.records import BlockTimes, KVGroup, Sequence
from octavo.kv_cache.block_pool import BlockPool
from octavo.kv_cache.block_table import BlockTable
from octavo.kv_cache.block_watch import BlockWatch, WatchedBlockPool
from octavo.kv_cache.groups import blocks_of_sequence, kinds_of
from octavo.kv_cache.prefix_index import NodeState, PrefixIndex, PrefixMatch, PrefixNode


class Admission(enum.Enum):
    ADMITTED = "admitted"
    NO_BLOCKS = "no_blocks"  # too few free blocks for the sequence
    COMPUTING = "computing"  # a running sequence is computing a prefix of it, which it then can share


@dataclass(slots=True)
class _Holding:
    """What one admitted sequence holds."""

    tables: list[BlockTable]  # one for each kind of group
    block_tables: tuple[list[int], ...]  # their columns, in the order of the groups
    num_blocks: tuple[int, ...]  # of each of these
    capacity: int  # tokens that all tables cover
    node: PrefixNode | None  # the node of its last committed block; None once it has left the index
    owned: list[PrefixNode]  # the nodes behind it that it has announced to compute, the next one last
    num_committed_blocks: int  # leading blocks that are computed, and in the index if they can be


class KVCacheManager:
    """A sequence follows a path in the index, and each block that it computes is offered to that block's node.

    A node takes the blocks if it has none of that kind, or if nobody uses those it has. So a block may also stay
    private, though its node is on the path: somebody else computed the same at the same time, or a node is matched no
    longer because it lacks blocks of a sliding group, and its other blocks are in use. The path ends, and all later
    blocks stay private, where the node has gone or somebody else has announced to compute the next one.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        groups: tuple[KVGroup, ...] = (KVGroup("full", num_layers=1, num_kv_heads=1, head_dim=1),),
        watch: BlockWatch | None = None,
    ) -> None:
        self.groups = groups
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self._kinds = kinds_of(groups)
        # For each group the place of its column: kind, group within the kind.
        places = {group: (k, c) for k, kind in enumerate(self._kinds) for c, group in enumerate(kind.groups)}
        self._columns = [places[group] for group in range(len(groups))]
        self.index = PrefixIndex(block_size, self._kinds)
        self._watch = watch
        self.pool = (
            BlockPool(num_blocks, self._evict) if watch is None else WatchedBlockPool(num_blocks, self._evict, watch)
        )
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

    def blocks_of_sequence(self, num_tokens: int, max_chunk: int) -> int:
        """Most blocks that one sequence of so many tokens holds, of which a step computes up to `max_chunk`."""
        return blocks_of_sequence(self._kinds, num_tokens, max_chunk, self.block_size)

    def admit(self, seq: Sequence, max_chunk: int) -> Admission:
        """Give the sequence blocks for all its known tokens, those of a cached prefix first.

        In sliding groups it gets what is cached only; `grow` brings the rest, step by step, for up to `max_chunk`
        tokens each time. Sets its num_computed_tokens and, at its first admission, num_cached_tokens. Its whole blocks
        that are not in the index are announced there. Unless the answer is ADMITTED, nothing is held and nothing
        changed.
        """
        if self.pool.num_free == 0:
            return Admission.NO_BLOCKS  # the last token at least needs a block of its own
        if self._is_computed_before(seq, self._waits_for.get(seq.seq_id)):
            return Admission.COMPUTING
        match = self._match(seq)
        if match.waits_for is not None and self._is_computed_before(seq, match.waits_for):
            self._waits_for[seq.seq_id] = match.waits_for
            return Admission.COMPUTING
        cached = self._cached_blocks(match)
        # All of a step's blocks in sliding groups must be free now, though they are taken later.
        num_needed = self.blocks_of_sequence(seq.num_tokens, max_chunk)
        num_in_use = sum(len(blocks) for column in cached for blocks in column if self.pool.num_refs(blocks[0]) > 0)
        if num_needed - num_in_use > self.pool.num_free:
            return Admission.NO_BLOCKS

        self._waits_for.pop(seq.seq_id, None)
        self._holdings[seq.seq_id] = self._hold(seq, match, cached)
        seq.num_computed_tokens = match.num_tokens
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = match.num_tokens
            self.num_prefix_queries += seq.num_tokens if self._may_match(seq) else 0
            self.num_prefix_hits += match.num_tokens
        return Admission.ADMITTED

    def grow(self, seq: Sequence, num_tokens: int) -> bool:
        """Before a step that computes tokens from num_computed_tokens to `num_tokens`: cover them in all groups.

        Gives back what has left the windows of sliding groups. All or nothing but for that: False if too few blocks
        are free.
        """
        holding = self._holdings[seq.seq_id]
        return num_tokens <= holding.capacity or self._grow(holding, seq.num_computed_tokens, num_tokens)

    def commit(self, seq: Sequence) -> None:
        """Make the blocks known to others that num_computed_tokens (planned ones included) and token_ids fill."""
        holding = self._holdings[seq.seq_id]
        first = holding.num_committed_blocks
        num_blocks = min(seq.num_computed_tokens, len(seq.token_ids)) // self.block_size
        if num_blocks == first:
            return
        holding.num_committed_blocks = num_blocks
        if self.enable_prefix_caching:
            for i in range(first, num_blocks):
                holding.node = self._next_node(seq, holding, i)
                if holding.node is None:
                    return
                self._offer(holding, i)

    def free(self, seq: Sequence) -> None:
        """Give back whatever a sequence holds, if anything. What it has committed stays cached."""
        self._waits_for.pop(seq.seq_id, None)
        holding = self._holdings.pop(seq.seq_id, None)
        if holding is not None:
            if holding.owned:
                self.index.disown(holding.owned[::-1])
            for table in holding.tables:  # full groups first, for without their blocks those of others are of no use
                table.release()

    def block_tables(self, seq: Sequence) -> tuple[tuple[list[int], ...], tuple[int, ...]]:
        """For each group the physical block of each logical one, and the lengths of these lists.

        They are an admitted sequence's live lists, to be read only.
        """
        holding = self._holdings[seq.seq_id]
        return holding.block_tables, holding.num_blocks

    def take_block_times(self) -> BlockTimes | None:
        """What was seen of the watched blocks since the last call; None if nothing was."""
        return None if self._watch is None else self._watch.take()

    def check_invariants(self) -> None:
        """Assert that pool, tables and index agree. O(num_blocks + nodes)."""
        self.pool.check_invariants()
        refs = Counter[int]()
        for holding in self._holdings.values():
            self._check_holding(holding)
            for table in holding.tables:
                refs.update(block for column in table.columns for block in column[table.num_dropped :])
        assert all(self.pool.num_refs(block) == refs[block] for block in range(self.num_blocks))
        assert self.num_blocks_in_use == len(refs)
        self._check_index()

    def _check_holding(self, holding: _Holding) -> None:
        lengths = []
        for group, (kind, c) in enumerate(self._columns):
            assert holding.block_tables[group] is holding.tables[kind].columns[c]
            lengths.append(len(holding.block_tables[group]))
        assert holding.num_blocks == tuple(lengths)
        assert holding.capacity == min(table.capacity for table in holding.tables)
        for table in holding.tables:
            assert all(len(column) == table.num_blocks for column in table.columns)
            assert table.num_blocks * self.block_size == table.capacity
            assert table.num_dropped <= table.num_blocks
        assert all(table.num_dropped == 0 for table, k in zip(holding.tables, self._kinds, strict=True) if not k.window)

    def _check_index(self) -> None:
        announced = Counter(id(node) for holding in self._holdings.values() for node in holding.owned)
        placed: list[int] = []
        for node in self.index.nodes():
            assert node.parent is not None
            if node.owner is not None:
                assert announced[id(node)] == 1, "nobody will compute this node"
                assert node in self._holdings[node.owner].owned
            if node.state is NodeState.COMPUTING:
                assert node.owner is not None
                assert not any(node.blocks)
                continue
            assert node.state is node.parent.state is NodeState.READY
            assert node.children or node.owner is not None or any(node.blocks), "a node that says nothing"
            for kind, blocks in zip(self._kinds, node.blocks, strict=True):
                assert blocks or kind.window is not None, "a node without its blocks in full groups"
                assert len(blocks or kind.groups) == len(kind.groups)
                placed += blocks or ()
        assert sorted(placed) == [b for b in range(self.num_blocks) if self.pool.is_cached(b)]

    def _is_computed_before(self, seq: Sequence, node: PrefixNode | None) -> bool:
        """Whether someone is going to compute the node for whom the sequence waits.

        That is an earlier arrival only. So the first one waits for nobody, and no ring of sequences waits for itself.
        """
        return node is not None and node.owner is not None and node.owner < seq.seq_id

    def _may_match(self, seq: Sequence) -> bool:
        """Whose prompt is to be scored needs the logits of all its tokens, which are not cached."""
        return self.enable_prefix_caching and seq.request.params.prompt_logprobs is None

    def _match(self, seq: Sequence) -> PrefixMatch:
        if not self._may_match(seq):
            return PrefixMatch([], 0, self.index.root, None)
        return self.index.match(seq.token_ids, seq.request.cache_salt)

    def _cached_blocks(self, match: PrefixMatch) -> list[list[tuple[int, ...]]]:
        """For each kind the matched blocks that a sequence needs: the last ones, where a window slides."""
        cached = []
        for k, kind in enumerate(self._kinds):
            nodes = match.nodes
            if kind.window is not None:
                nodes = nodes[max(0, len(nodes) - kind.num_window_blocks(self.block_size)) :]
            column = [node.blocks[k] for node in nodes]
            cached.append([blocks for blocks in column if blocks is not None])
            assert len(cached[-1]) == len(nodes)
        return cached

    def _hold(self, seq: Sequence, match: PrefixMatch, cached: list[list[tuple[int, ...]]]) -> _Holding:
        tables = [BlockTable(self.pool, self.block_size, len(kind.groups)) for kind in self._kinds]
        for table, blocks in zip(tables, cached, strict=True):
            table.share(blocks, num_absent=len(match.nodes) - len(blocks))
        for table, kind in zip(tables, self._kinds, strict=True):
            if kind.window is None:
                grown = table.grow(seq.num_tokens)
                assert grown
        block_tables = tuple([tables[kind].columns[c] for kind, c in self._columns])
        return _Holding(
            tables,
            block_tables,
            num_blocks=tuple(map(len, block_tables)),
            capacity=min([table.capacity for table in tables]),
            node=match.node,
            owned=self._announce(seq, match),
            num_committed_blocks=len(match.nodes),
        )

    def _announce(self, seq: Sequence, match: PrefixMatch) -> list[PrefixNode]:
        """Become the owner of the nodes of the whole blocks behind the match; returns them, the first one last."""
        nodes: list[PrefixNode] = []
        # Taking blocks may have evicted what was matched, if the sequence needs none of it (a window of one token).
        # Who matched nothing on purpose would announce what others have computed.
        if self._may_match(seq) and match.node.state is NodeState.READY:
            parent, salt = match.node, seq.request.cache_salt
            for i in range(len(match.nodes), seq.num_tokens // self.block_size):
                tokens = self._block_tokens(seq, i)
                node = self.index.find(parent, tokens, salt)
                if node is None:
                    node = self.index.insert(parent, tokens, salt, seq.seq_id)
                elif node.owner is None:
                    node.owner = seq.seq_id
                else:
                    break
                nodes.append(node)
                parent = node
        return nodes[::-1]

    def _grow(self, holding: _Holding, first: int, num_tokens: int) -> bool:
        num_missing = 0
        for table, kind in zip(holding.tables, self._kinds, strict=True):
            if kind.window is not None:
                # What a planned step fills cannot be committed, and so must be kept, until its tokens are known.
                num_committed_tokens = holding.num_committed_blocks * self.block_size
                table.drop_before(max(0, min(first - kind.window + 1, num_committed_tokens)))
            num_missing += table.num_missing(num_tokens)
        if num_missing > self.pool.num_free:
            return False
        for table in holding.tables:
            table.grow(num_tokens)
        holding.num_blocks = tuple(map(len, holding.block_tables))
        holding.capacity = min([table.capacity for table in holding.tables])
        return True

    def _next_node(self, seq: Sequence, holding: _Holding, i: int) -> PrefixNode | None:
        """The node of the sequence's logical block i, which has just been computed; None if its path ends before."""
        parent = holding.node
        if parent is None:
            return None
        if holding.owned:
            node = holding.owned.pop()
            if node.state is NodeState.GONE:
                holding.owned.clear()
                return None
            node.owner = None
            return node
        if parent.state is NodeState.GONE:
            return None
        tokens, salt = self._block_tokens(seq, i), seq.request.cache_salt
        found = self.index.find(parent, tokens, salt)
        if found is None:
            return self.index.insert(parent, tokens, salt, None)
        return found if found.state is NodeState.READY else None

    def _offer(self, holding: _Holding, i: int) -> None:
        """Place the sequence's logical block i in the node it has reached."""
        node = holding.node
        assert node is not None
        for k, table in enumerate(holding.tables):
            theirs = node.blocks[k]
            if theirs is not None and self.pool.num_refs(theirs[0]) > 0:
                continue
            ours = table.blocks_at(i)
            for block in self.index.place(node, k, ours):
                self.pool.forget(block)
            for block in ours:
                self.pool.mark_cached(block)
        self.index.set_ready(node)

    def _evict(self, block: int) -> None:
        for lost in self.index.evict(block):
            self.pool.forget(lost)

    def _block_tokens(self, seq: Sequence, i: int) -> list[int]:
        return seq.token_ids[i * self.block_size : (i + 1) * self.block_size]
