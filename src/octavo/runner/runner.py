"""Turns a step's plan into arrays, runs them through a backend's program, and samples.

The token buffer of every sequence lives here, so a plan says counts only. It does not know why something is scheduled,
when a sequence ends, or what a token means.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.core import records
from octavo.core.records import SampledToken, ScheduledSequence, ScoredPrompt, StepPlan, StepResult
from octavo.runner.constraint import TokenConstraint
from octavo.runner.prompt_scorer import score_tokens
from octavo.runner.sampler import Sampler, SamplerState

Ints = NDArray[np.int32]


class Program(Protocol):
    """What the runner asks of a backend (backends.cpu.CpuProgram). Arrays are C-contiguous, int32 unless said."""

    def run(
        self, token_ids: Ints, first_row: Ints, first_position: Ints, block_tables: Sequence[Ints], selected_rows: Ints
    ) -> None: ...
    def sample(self, rows: int, /, *arrays: NDArray[Any]) -> None: ...
    def select(self, rows: Ints) -> None: ...
    def score(self, rows: int, /, *arrays: NDArray[Any]) -> None: ...
    def copy_blocks(self, source: Ints, destination: Ints) -> None: ...


@dataclass(slots=True)
class _Known:
    """What the runner remembers of one sequence. `row`: where its blocks were last written in the step's tables.

    prompt_logprobs: how many alternatives of each prompt token are wanted, or None. num_scored: prompt tokens behind
    which the next one has been scored; a sequence that is computed again is not scored again.
    """

    seq_id: int
    tokens: Ints  # [most tokens it can have]
    num_tokens: int
    blocks: Ints  # [KV groups, most blocks it can have], logical -> physical
    sampler: SamplerState
    num_prompt_tokens: int
    prompt_logprobs: int | None
    num_scored: int = 0
    row: int = -1


class Runner:
    """Executes plans, one at a time, in the order in which they were made.

    All arrays of a step are allocated once. A row of the block tables keeps what it was told of a sequence, so a
    sequence that is in the same place of the plan as in the step before costs its new blocks only.
    """

    def __init__(
        self,
        program: Program,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        block_size: int,
        num_kv_groups: int,
        vocab_size: int,
        eos_token_ids: Collection[int],
        constraints_of: Callable[[records.Sequence], Sequence[TokenConstraint]] = lambda seq: (),
    ) -> None:
        """constraints_of: what holds a sequence's output to a form, asked once, when it is first scheduled."""
        self._program = program
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._num_kv_groups = num_kv_groups
        self._eos_token_ids = sorted(eos_token_ids)
        self._constraints_of = constraints_of
        self._known: dict[int, _Known] = {}
        self._unscored: set[int] = set()  # seq_ids whose prompts are not scored to their end
        self._sampler = Sampler(max_num_seqs, vocab_size)
        self._token_ids = np.zeros(max_num_batched_tokens, np.int32)
        self._first_row = np.zeros(max_num_seqs + 1, np.int32)
        self._first_position = np.zeros(max_num_seqs, np.int32)
        self._selected_rows = np.zeros(max_num_seqs, np.int32)
        self._block_tables = np.zeros((num_kv_groups, max_num_seqs, self._num_blocks(max_model_len)), np.int32)
        self._occupants = [-1] * max_num_seqs  # the seq_id whose blocks a row of the tables holds

    def execute(self, plan: StepPlan) -> StepResult:
        """One step: forget, learn, copy blocks, compute, sample, score prompts."""
        for seq_id in plan.finished:
            self._sampler.forget(self._known.pop(seq_id).sampler)
            self._unscored.discard(seq_id)
        for seq in plan.new:
            self._learn(seq)
        if plan.block_copies:
            source, destination = np.array(plan.block_copies, np.int32).T.copy()
            self._program.copy_blocks(source, destination)
        if not plan.scheduled:
            return StepResult(plan.step)

        sampling = self._compute(plan.scheduled)
        return StepResult(plan.step, self._sample(sampling), self._score_prompts(plan.scheduled))

    def _sample(self, sampling: Sequence[_Known]) -> list[SampledToken]:
        if not sampling:
            return []
        sampled = self._sampler.run(self._program.sample, len(sampling), [known.sampler for known in sampling])
        result = []
        for known, (token_id, logprobs) in zip(sampling, sampled, strict=True):
            known.tokens[known.num_tokens] = token_id
            known.num_tokens += 1
            known.sampler.append(token_id)
            result.append(SampledToken(known.seq_id, token_id, logprobs))
        return result

    def _score_prompts(self, scheduled: Sequence[ScheduledSequence]) -> list[ScoredPrompt]:
        """Overwrites the logits of the step."""
        if not self._unscored:
            return []
        counts: list[tuple[int, int]] = []  # seq_id, tokens to be scored
        rows: list[int] = []
        tokens: list[int] = []
        num_logprobs: list[int] = []
        begin = 0
        for s in scheduled:
            known = self._known[s.seq_id]
            last = known.num_prompt_tokens - 1
            end = min(s.first + s.count, last)
            if known.prompt_logprobs is not None and known.num_scored < end:
                first, known.num_scored = known.num_scored, end
                assert first >= s.first, "whose prompt is scored computes all of it"
                if end == last:
                    self._unscored.remove(s.seq_id)
                counts.append((s.seq_id, end - first))
                rows.extend(range(begin + first - s.first, begin + end - s.first))
                tokens.extend(known.tokens[first + 1 : end + 1].tolist())
                num_logprobs.extend([known.prompt_logprobs] * (end - first))
            begin += s.count
        scored = iter(score_tokens(self._program, self._sampler.max_rows, rows, tokens, num_logprobs))
        return [ScoredPrompt(seq_id, list(islice(scored, count))) for seq_id, count in counts]

    def _learn(self, seq: records.Sequence) -> None:
        request = seq.request
        room = self._max_model_len - seq.num_prompt_tokens
        max_tokens = request.params.max_tokens
        tokens = np.empty(seq.num_prompt_tokens + (room if max_tokens is None else min(max_tokens, room)), np.int32)
        tokens[: seq.num_prompt_tokens] = request.prompt_token_ids
        blocks = np.zeros((self._num_kv_groups, self._num_blocks(len(tokens))), np.int32)
        sampler = SamplerState(
            request.params,
            request.prompt_token_ids,
            self._eos_token_ids,
            self._sampler.vocab_size,
            constraints=self._constraints_of(seq),
        )
        wanted = request.params.prompt_logprobs
        if wanted is not None and seq.num_prompt_tokens > 1:
            self._unscored.add(seq.seq_id)
        self._known[seq.seq_id] = _Known(
            seq.seq_id,
            tokens,
            seq.num_prompt_tokens,
            blocks,
            sampler,
            seq.num_prompt_tokens,
            self._sampler.vocab_size if wanted == -1 else wanted,
        )

    def _compute(self, scheduled: Sequence[ScheduledSequence]) -> list[_Known]:
        """Runs the program; returns the sequences whose logits it has now, in the order of their rows."""
        sampling: list[_Known] = []
        selected_rows: list[int] = []
        first_row = [0]
        end = 0
        for row, s in enumerate(scheduled):
            known = self._known[s.seq_id]
            begin, end = end, end + s.count
            self._token_ids[begin:end] = known.tokens[s.first : s.first + s.count]
            first_row.append(end)
            self._place_blocks(row, known, s)
            if s.samples:
                assert s.first + s.count == known.num_tokens, "a sample follows the last known token"
                sampling.append(known)
                selected_rows.append(end - 1)
        n, selected = len(scheduled), len(selected_rows)
        self._first_row[: n + 1] = first_row
        self._first_position[:n] = [s.first for s in scheduled]
        self._selected_rows[:selected] = selected_rows
        self._program.run(
            self._token_ids[:end],
            self._first_row[: n + 1],
            self._first_position[:n],
            list(self._block_tables[:, :n]),
            self._selected_rows[:selected],
        )
        return sampling

    def _place_blocks(self, row: int, known: _Known, s: ScheduledSequence) -> None:
        moved = known.row != row or self._occupants[row] != known.seq_id
        longest = 0
        for group, (table, first) in enumerate(zip(s.block_tables, s.num_known_blocks, strict=True)):
            num_blocks = len(table)
            longest = max(longest, num_blocks)
            if first < num_blocks:
                known.blocks[group, first:num_blocks] = table[first:]
                if not moved:
                    self._block_tables[group, row, first:num_blocks] = known.blocks[group, first:num_blocks]
        if moved:
            known.row, self._occupants[row] = row, known.seq_id
            self._block_tables[:, row, :longest] = known.blocks[:, :longest]

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)
