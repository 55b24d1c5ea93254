"""Decides, step by step, which sequences compute how many tokens.

Continuous batching without phases: a step lets each sequence's computed tokens catch up with its known ones, under one
budget. It handles counts, never token values, and knows nothing of models, kernels or text.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from operator import attrgetter

from octavo.core.records import (
    FinishReason,
    Request,
    ScheduledSequence,
    Sequence,
    SequenceStatus,
    StepPlan,
    StepResult,
)
from octavo.kv_cache.manager import Admission, KVCacheManager

_arrival = attrgetter("seq_id")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int  # running at once
    max_num_batched_tokens: int  # a step's budget
    max_model_len: int  # tokens of a sequence, prompt and output
    long_prefill_token_threshold: int = 0  # most tokens of one sequence in a step, so that others can pass; 0: no limit

    @property
    def max_chunk(self) -> int:
        """Most tokens of one sequence that a step computes."""
        return min(self.max_num_batched_tokens, self.long_prefill_token_threshold or self.max_num_batched_tokens)


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int  # tokens left
    new: list[Sequence] = field(default_factory=list)
    scheduled: list[ScheduledSequence] = field(default_factory=list)


class Scheduler:
    """First come, first served; preemption by recomputation, latest arrival first.

    A sequence's num_computed_tokens advances when a step is planned, not when its result arrives, and so do the blocks
    that others may share: steps run in the order they were planned, and within a step all keys and values of a layer
    are written before anything attends to them. While anything is unfinished and every result has been handed in, a
    plan is never empty.
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager) -> None:
        assert min(config.max_num_seqs, config.max_num_batched_tokens, config.max_model_len) >= 1
        needed = cache.blocks_of_sequence(config.max_model_len, config.max_chunk)
        assert cache.num_blocks >= needed, "one sequence alone must always fit"
        self.config = config
        self.num_preemptions = 0
        self._cache = cache
        self._waiting: list[Sequence] = []  # by arrival, like _running
        self._running: list[Sequence] = []
        self._by_seq_id: dict[int, Sequence] = {}
        self._by_request_id: dict[str, Sequence] = {}
        # For the seq_ids that the runner knows: how much of their tables, for each KV group.
        self._known_blocks: dict[int, tuple[int, ...]] = {}
        self._no_blocks = (0,) * len(cache.groups)
        self._max_chunk = config.max_chunk
        self._finished: list[int] = []  # seq_ids that the next plan tells the runner to forget
        self._num_added = 0
        self._num_steps = 0

    @property
    def has_unfinished(self) -> bool:
        return bool(self._by_seq_id)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, request: Request) -> Sequence:
        """Queue a request that the engine has validated. Its id is unique among the unfinished ones."""
        assert request.request_id not in self._by_request_id, f"request id {request.request_id} is in use"
        assert 1 <= len(request.prompt_token_ids) <= self.config.max_model_len
        seq = Sequence(self._num_added, request, list(request.prompt_token_ids))
        self._num_added += 1
        self._by_seq_id[seq.seq_id] = self._by_request_id[request.request_id] = seq
        self._waiting.append(seq)
        return seq

    def abort(self, request_id: str) -> Sequence | None:
        """End a request now, in whatever state it is. None if there is no such unfinished request."""
        seq = self._by_request_id.get(request_id)
        if seq is not None:
            self._finish(seq, FinishReason.ABORT)
        return seq

    def schedule(self) -> StepPlan:
        """Plan the next step: first who runs already, then who can be admitted."""
        step = _Step(self.config.max_num_batched_tokens)
        num_preemptions = self.num_preemptions
        self._schedule_running(step)
        if self.num_preemptions == num_preemptions:
            self._schedule_waiting(step)
        finished, self._finished = self._finished, []
        plan = StepPlan(self._num_steps, tuple(finished), tuple(step.new), (), tuple(step.scheduled))
        self._num_steps += 1
        return plan

    def update(self, result: StepResult) -> list[Sequence]:
        """Take in the sampled tokens and the ends that the engine's stop check found; returns what finished.

        Tokens of sequences that were aborted while the step ran are dropped.
        """
        ended = []
        for sampled in result.sampled:
            seq = self._by_seq_id.get(sampled.seq_id)
            if seq is None:
                continue
            seq.token_ids.append(sampled.token_id)
            if sampled.finish_reason is not None:
                self._finish(seq, sampled.finish_reason)
                ended.append(seq)
            else:
                assert len(seq.token_ids) < self.config.max_model_len, "a full sequence ends with LENGTH"
        return ended

    def _schedule_running(self, step: _Step) -> None:
        """Schedule running sequences in order of arrival, preempting from the back where blocks run out.

        Those that lack only one token have their place in the budget before prompts get the rest. A victim comes after
        the sequence that needs its blocks, or is that sequence, so nothing that is in the plan is taken out again.
        """
        num_decoding = sum(_num_lacking(seq) == 1 for seq in self._running)
        i = 0
        while i < len(self._running):
            seq = self._running[i]
            i += 1
            if _num_lacking(seq) == 1:
                num_decoding -= 1
                count = min(1, step.budget)
            else:
                count = self._chunk(seq, step.budget - num_decoding)
            while count and not self._cache.grow(seq, seq.num_computed_tokens + count):
                victim = self._running.pop()
                self._preempt(victim)
                if victim is seq:
                    count = 0
            if count:
                self._plan(step, seq, count)

    def _schedule_waiting(self, step: _Step) -> None:
        """Admit in order of arrival, passing only those that wait for a prefix which is being computed."""
        i = 0
        while i < len(self._waiting) and len(self._running) < self.config.max_num_seqs and step.budget:
            seq = self._waiting[i]
            admission = self._cache.admit(seq, self._max_chunk)
            if admission is Admission.NO_BLOCKS:
                break
            if admission is Admission.COMPUTING:
                i += 1
                continue
            del self._waiting[i]
            seq.status = SequenceStatus.RUNNING
            insort(self._running, seq, key=_arrival)
            count = self._chunk(seq, step.budget)
            grown = self._cache.grow(seq, seq.num_computed_tokens + count)
            assert grown, "who is admitted has room for its next chunk"
            self._plan(step, seq, count)

    def _chunk(self, seq: Sequence, budget: int) -> int:
        return max(0, min(_num_lacking(seq), self._max_chunk, budget))

    def _plan(self, step: _Step, seq: Sequence, count: int) -> None:
        first = seq.num_computed_tokens
        seq.num_computed_tokens = end = first + count
        self._cache.commit(seq)
        num_known_blocks = self._known_blocks.get(seq.seq_id)
        if num_known_blocks is None:
            num_known_blocks = self._no_blocks
            step.new.append(seq)
        tables, self._known_blocks[seq.seq_id] = self._cache.block_tables(seq)
        samples = end == len(seq.token_ids)
        step.scheduled.append(ScheduledSequence(seq.seq_id, first, count, tables, num_known_blocks, samples))
        step.budget -= count

    def _preempt(self, seq: Sequence) -> None:
        self._cache.free(seq)
        self._known_blocks[seq.seq_id] = self._no_blocks
        self.num_preemptions += 1
        seq.num_preemptions += 1
        seq.num_computed_tokens = 0
        seq.status = SequenceStatus.WAITING
        insort(self._waiting, seq, key=_arrival)

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        queue = self._running if seq.status is SequenceStatus.RUNNING else self._waiting
        del queue[bisect_left(queue, seq.seq_id, key=_arrival)]
        self._cache.free(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self._by_seq_id[seq.seq_id], self._by_request_id[seq.request.request_id]
        if self._known_blocks.pop(seq.seq_id, None) is not None:
            self._finished.append(seq.seq_id)


def _num_lacking(seq: Sequence) -> int:
    """Known tokens that are neither computed nor planned."""
    return len(seq.token_ids) - seq.num_computed_tokens
