"""The scheduler in a world of its own: random workloads, and a runner that only remembers.

Instead of keys and values, the fake runner stores in every cache slot which exact prefix the slot belongs to. So it can
tell for each computed token whether the contexts that its block tables show are the right ones.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from octavo.core.records import (
    FinishReason,
    KVGroup,
    Request,
    SampledToken,
    SamplingParams,
    Sequence,
    StepPlan,
    StepResult,
)
from octavo.kv_cache.groups import blocks_of_sequence, kinds_of
from octavo.kv_cache.manager import KVCacheManager
from octavo.kv_cache.prefix_index import NodeState, PrefixNode
from octavo.scheduler.scheduler import Scheduler, SchedulerConfig


class Prefixes:
    """Numbers for exact prefixes (salt and tokens): equal numbers mean equal prefixes."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def root(self, salt: str | None) -> int:
        return self._number(("root", salt))

    def extend(self, prefix: int, token: int) -> int:
        return self._number((prefix, token))

    def _number(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


@dataclass
class _Known:
    """What the runner remembers of a sequence."""

    seq: Sequence
    prefixes: list[int]  # [num_tokens], the prefix that ends with each token
    tables: list[list[int]]  # of each KV group
    num_computed: int = 0


class RememberingRunner:
    """Executes plans on a memory of prefix numbers; asserts all that a real runner relies on.

    All KV groups share the memory. A slot says for which group it was written, and where: (group, prefix).
    """

    def __init__(self, num_blocks: int, block_size: int, groups: tuple[KVGroup, ...], prefixes: Prefixes) -> None:
        self.block_size = block_size
        self.groups = groups
        self.memory: list[list[tuple[int, int]]] = [[(-1, -1)] * block_size for _ in range(num_blocks)]
        self.known: dict[int, _Known] = {}
        self.written: dict[int, int] = {}  # in the last step: block -> the sequence that wrote it
        self._prefixes = prefixes

    def execute(self, plan: StepPlan) -> list[int]:
        """Returns the seq_ids for which the plan asks for a sample."""
        for seq_id in plan.finished:
            del self.known[seq_id]
        for seq in plan.new:
            assert seq.seq_id not in self.known
            known = self.known[seq.seq_id] = _Known(seq, [], [[] for _ in self.groups])
            for token in seq.request.prompt_token_ids:
                self.append(known, token)
        for source, destination in plan.block_copies:
            self.memory[destination] = list(self.memory[source])

        assert len({s.seq_id for s in plan.scheduled}) == len(plan.scheduled)
        self.written = {}
        slots = set()
        for s in plan.scheduled:
            known = self.known[s.seq_id]
            assert s.count >= 1
            # A fresh table may begin with shared blocks; otherwise each token is computed exactly once.
            assert s.first == known.num_computed or not any(s.num_known_blocks)
            known.num_computed = s.first + s.count
            assert s.samples == (known.num_computed == len(known.prefixes))
            for group, (table, n) in enumerate(zip(s.block_tables, s.num_known_blocks, strict=True)):
                known.tables[group][n:] = table[n:]
                assert known.tables[group] == list(table), "an entry has changed that the runner was not told of"
                assert all(0 <= block < len(self.memory) for block in table)
                for position in range(s.first, known.num_computed):
                    block, offset = table[position // self.block_size], position % self.block_size
                    assert (block, offset) not in slots, "two tokens of a step are written to one place"
                    slots.add((block, offset))
                    self.memory[block][offset] = (group, known.prefixes[position])
                    self.written[block] = s.seq_id
        for s in plan.scheduled:
            known = self.known[s.seq_id]
            for group, (shape, table) in enumerate(zip(self.groups, known.tables, strict=True)):
                begin = max(0, s.first - shape.window + 1) if shape.window else 0
                for position in range(begin, known.num_computed):
                    slot = self.memory[table[position // self.block_size]][position % self.block_size]
                    assert slot == (group, known.prefixes[position]), "a wrong context is read"
        return [s.seq_id for s in plan.scheduled if s.samples]

    def append(self, known: _Known, token: int) -> None:
        before = known.prefixes[-1] if known.prefixes else self._prefixes.root(known.seq.request.cache_salt)
        known.prefixes.append(self._prefixes.extend(before, token))


@dataclass(frozen=True)
class Planned:
    """A request of the workload. Those of one family answer with the same tokens."""

    request: Request
    family: int
    arrival_step: int
    finish_reason: FinishReason
    abort_step: int | None
    abort_in_flight: bool  # between a step's planning and its result, rather than between steps


def _draw_groups(rng: random.Random, max_model_len: int) -> tuple[KVGroup, ...]:
    """Full attention, windows that slide, or both."""

    def group(window: int) -> KVGroup:
        return KVGroup("g", 1, 1, 1, kind="sliding" if window else "full", window=window)

    windows = [rng.choice([1, 2, rng.randint(1, max_model_len // 2), rng.randint(1, 2 * max_model_len)]) for _ in "ab"]
    kinds = rng.choice([[0], [windows[0]], [0, windows[0]], [0, *windows], windows])
    groups = [group(window) for window in kinds for _ in range(rng.choice([1, 1, 3]))]
    rng.shuffle(groups)
    return tuple(groups)


class Simulation:
    """One seeded workload, run to its end with everything checked after every step."""

    def __init__(self, seed: int) -> None:
        self.events: Counter[str] = Counter()
        self._seed = seed
        rng = random.Random(seed)
        block_size = rng.choice([8, 8, 16, 32])
        max_model_len = block_size * rng.randint(2, 6) - rng.randint(0, block_size - 1)
        budget = rng.choice([1, 2, 7, block_size, 40, 512])
        self.config = SchedulerConfig(
            max_num_seqs=rng.choice([1, 2, 4, 16]),
            max_num_batched_tokens=budget,
            max_model_len=max_model_len,
            long_prefill_token_threshold=rng.choice([0, 0, 0, 1, 5, block_size]),
        )
        groups = _draw_groups(rng, max_model_len)
        kinds = kinds_of(groups)
        blocks_of_one = blocks_of_sequence(kinds, max_model_len, self.config.max_chunk, block_size)
        num_blocks = blocks_of_one + rng.choice([0, 0, 1, 3, 2 * blocks_of_one, 8 * blocks_of_one])
        self.cache = KVCacheManager(num_blocks, block_size, rng.random() < 0.9, groups)
        self.slides = kinds[-1].window is not None
        self.scheduler = Scheduler(self.config, self.cache)
        self.prefixes = Prefixes()
        self.runner = RememberingRunner(num_blocks, block_size, groups, self.prefixes)
        self.workload = self._make_workload(rng, num_requests=min(24, 4 + 2 * budget))
        self.by_seq_id: dict[int, Planned] = {}
        self.ends: Counter[str] = Counter()
        self._admitted_tokens: dict[int, int] = {}  # by seq_id of the running: how many tokens it was admitted with
        self._count_evictions()

    def run(self) -> None:
        step = 0
        while len(self.ends) < len(self.workload) or self.scheduler.has_unfinished:
            self._arrive_and_abort(step)
            had_unfinished = self.scheduler.has_unfinished
            plan = self._schedule()
            assert bool(plan.scheduled) == had_unfinished, "the scheduler is stuck, or works for nobody"
            sampling = self.runner.execute(plan)
            self._check_in_step_sharing(plan)
            self._abort(step, in_flight=True)
            self._update(plan, sampling)
            self.cache.check_invariants()
            self._check_cached_content(thorough=step % 16 == 0)
            step += 1
            assert step < 20_000, "requests wait for ever"
        last = self._schedule()
        self.runner.execute(last)
        assert not last.scheduled
        assert not self.runner.known, "the runner was not told to forget"
        assert self.cache.num_blocks_in_use == 0
        assert self.scheduler.num_running == self.scheduler.num_waiting == 0
        assert all(self.ends[p.request.request_id] == 1 for p in self.workload)
        self._check_cached_content(thorough=True)
        self.events["preemption"] += self.scheduler.num_preemptions
        self.events["prefix hit"] += self.cache.num_prefix_hits
        self.events["sliding prefix hit"] += self.slides and self.cache.num_prefix_hits
        assert self.cache.num_prefix_hits <= self.cache.num_prefix_queries

    def _make_workload(self, rng: random.Random, num_requests: int) -> list[Planned]:
        longest = self.config.max_model_len
        shared = [[rng.randrange(3) for _ in range(longest)] for _ in range(rng.randint(1, 3))]
        workload = []
        for i in range(num_requests):
            beginning = rng.choice(shared)[: rng.randint(0, longest - 1)]
            end = [rng.randrange(3) for _ in range(rng.choice([0, 0, 1, rng.randrange(longest)]))]
            prompt = (beginning + end)[: longest - 1] or [0]
            max_tokens = rng.randint(1, longest - len(prompt))
            finish_reason = FinishReason.LENGTH if len(prompt) + max_tokens == longest else FinishReason.STOP
            request = Request(
                request_id=f"request-{i}",
                prompt_token_ids=prompt,
                params=SamplingParams(max_tokens=max_tokens, seed=0),
                arrival_time=0.0,
                cache_salt=rng.choice([None, None, None, "salt"]),
            )
            arrival = rng.choice([0, 0, rng.randrange(60)])
            abort_step = arrival + rng.randrange(40) if rng.random() < 0.15 else None
            workload.append(Planned(request, rng.randrange(3), arrival, finish_reason, abort_step, rng.random() < 0.5))
        return workload

    def _arrive_and_abort(self, step: int) -> None:
        for planned in self.workload:
            if planned.arrival_step == step:
                seq = self.scheduler.add(planned.request)
                self.by_seq_id[seq.seq_id] = planned
        self._abort(step, in_flight=False)

    def _abort(self, step: int, in_flight: bool) -> None:
        for planned in self.workload:
            if planned.abort_step == step and planned.abort_in_flight == in_flight:
                request_id = planned.request.request_id
                seq = self.scheduler.abort(request_id)
                assert (seq is None) == (self.ends[request_id] == 1)
                if seq is not None:
                    self._end(seq)
                    self.events["abort in flight" if in_flight else "abort"] += 1
                    assert self.scheduler.abort(request_id) is None

    def _schedule(self) -> StepPlan:
        waiting = self._sequences(self.scheduler._waiting)
        running = self._sequences(self.scheduler._running)
        decoding = [i for i, seq in running.items() if seq.num_tokens - seq.num_computed_tokens == 1]
        plan = self.scheduler.schedule()
        now_waiting = self._sequences(self.scheduler._waiting)
        now_running = self._sequences(self.scheduler._running)

        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert len(now_running) <= self.config.max_num_seqs
        scheduled = {s.seq_id for s in plan.scheduled}
        assert scheduled <= now_running.keys()
        preempted = running.keys() & now_waiting.keys()
        admitted = waiting.keys() & now_running.keys()
        if preempted:
            assert not admitted
            assert max(now_running) < min(preempted), "an earlier arrival was preempted for a later one"
            assert len(plan.scheduled) > 0
        elif len(decoding) <= self.config.max_num_batched_tokens:
            assert scheduled.issuperset(decoding), "a prompt displaced a token that somebody waits for"
        for seq_id in preempted:
            assert now_waiting[seq_id].num_computed_tokens == 0
        assert list(now_waiting) == sorted(now_waiting)
        for seq_id in admitted:
            self._admitted_tokens[seq_id] = now_running[seq_id].num_tokens
        self._check_waiting(now_waiting, admitted)
        self._check_sharing(now_running)
        self._check_windows()
        return plan

    @staticmethod
    def _sequences(sequences: list[Sequence]) -> dict[int, Sequence]:
        return {seq.seq_id: seq for seq in sequences}

    def _check_waiting(self, waiting: dict[int, Sequence], admitted: set[int]) -> None:
        """First come first served, but for those who wait for a prefix that is being computed."""
        for seq_id in waiting:
            passed = bool(admitted) and seq_id < max(admitted)
            node = self.cache._waits_for.get(seq_id)
            computing = node is not None and node.owner is not None and node.owner < seq_id
            self.events["waiting for a computing prefix"] += computing
            self.events["passed while waiting for a prefix"] += computing and passed
            # Whoever passed may have evicted what was waited for.
            lost = node is not None and node.state is NodeState.GONE and self.slides
            assert computing or lost or not passed

    def _check_sharing(self, running: dict[int, Sequence]) -> None:
        """Nobody computes a block for itself that another one has ready or in work.

        Where blocks of sliding groups were evicted, somebody may have to, even if the others are still there.
        """
        if not self.cache.enable_prefix_caching or (self.slides and self.events["eviction"]):
            return
        for seq_id, seq in running.items():
            tokens = seq.token_ids[: self._admitted_tokens[seq_id]]
            nodes = self.cache.index.match(tokens, seq.request.cache_salt).nodes
            for k, table in enumerate(self.cache._holdings[seq_id].tables):
                for i in range(table.num_dropped, len(nodes)):
                    assert nodes[i].blocks[k] == table.blocks_at(i)

    def _check_windows(self) -> None:
        """What has left a window is given back."""
        for holding in self.cache._holdings.values():
            for kind, table in zip(self.cache._kinds, holding.tables, strict=True):
                most = kind.max_blocks(self.config.max_model_len, self.config.max_chunk, self.cache.block_size)
                assert table.num_blocks - table.num_dropped <= most
                self.events["block dropped behind a window"] += table.num_dropped > 0

    def _count_evictions(self) -> None:
        evict = self.cache.pool._on_evict

        def counted(block: int) -> None:
            self.events["eviction"] += 1
            evict(block)

        self.cache.pool._on_evict = counted

    def _check_in_step_sharing(self, plan: StepPlan) -> None:
        for s in plan.scheduled:
            for shape, table in zip(self.cache.groups, s.block_tables, strict=True):
                begin = max(0, s.first - shape.window + 1) if shape.window else 0
                before = table[begin // self.cache.block_size : s.first // self.cache.block_size]
                shares = any(self.runner.written.get(b, s.seq_id) != s.seq_id for b in before)
                self.events["sharing within a step"] += shares
                self.events["sliding sharing within a step"] += shares and shape.window > 0

    def _update(self, plan: StepPlan, sampling: list[int]) -> None:
        result = StepResult(plan.step)
        for seq_id in sampling:
            known, planned = self.runner.known[seq_id], self.by_seq_id[seq_id]
            position = len(known.prefixes)
            token = random.Random(f"{self._seed} {planned.family} {position}").randrange(3)
            self.runner.append(known, token)
            num_outputs = position + 1 - len(planned.request.prompt_token_ids)
            finished = num_outputs == planned.request.params.max_tokens
            result.sampled.append(SampledToken(seq_id, token, None, planned.finish_reason if finished else None))
        for seq in self.scheduler.update(result):
            planned = self.by_seq_id[seq.seq_id]
            assert seq.finish_reason is planned.finish_reason
            assert seq.num_output_tokens == planned.request.params.max_tokens
            self._end(seq)

    def _end(self, seq: Sequence) -> None:
        self.ends[seq.request.request_id] += 1
        self._admitted_tokens.pop(seq.seq_id, None)

    def _check_cached_content(self, thorough: bool) -> None:
        """Every block in the index holds exactly the prefix that its path in the index spells."""
        if not thorough:
            return
        root = self.cache.index.root
        ends: dict[PrefixNode, int] = {}
        for node in self.cache.index.nodes():
            assert node.parent is not None
            key: object = node.key
            assert isinstance(key, tuple)
            if node.parent is root:
                salt, tokens = key
                prefix = self.prefixes.root(salt)
            else:
                tokens, prefix = key, ends[node.parent]
            expected = []
            for token in tokens:
                prefix = self.prefixes.extend(prefix, token)
                expected.append(prefix)
            ends[node] = prefix
            for kind, blocks in zip(self.cache._kinds, node.blocks, strict=True):
                for group, block in zip(kind.groups, blocks or (), strict=blocks is not None):
                    assert self.runner.memory[block] == [(group, prefix) for prefix in expected]
            self.events["sliding blocks evicted from a node"] += node.state is NodeState.READY and not all(node.blocks)
            self.events["evicted sliding blocks computed again"] += (
                node.owner is not None and node.state is NodeState.READY and not all(node.blocks)
            )
