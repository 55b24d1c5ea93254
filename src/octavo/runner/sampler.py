"""The sampling state of each sequence, and the arrays that hand one step's rows to a backend's `sample`.

It does not know what the arrays mean (`sampling` specifies that), where the logits are, or which sequences exist.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from octavo.core.records import SamplingParams, TokenLogprobs
from octavo.runner.constraint import AllowedTokens, TokenConstraint, fill_mask, mask_words
from octavo.runner.sampling import Array, SampleArrays, ScoreArrays

_NOTHING: Array = np.empty(0, np.int32)


class NativeSample(Protocol):
    """Samples the first `rows` rows of logits that the callee holds, into the last five arrays.

    `arrays` are the fields of SampleArrays in order, C-contiguous; they may be longer than `rows`.
    """

    def __call__(self, rows: int, /, *arrays: Array) -> None: ...


class SamplerState:
    """What sampling must remember of one sequence: most often only a count.

    `sample_index` says which of a request's n samples this is. `params.seed` must not be None, and `params.bad_words`
    must have their tokens. `constraints`: what holds the output to a form, beside the parameters. is_plain: the logits
    are never edited.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        *,
        sample_index: int = 0,
        constraints: Sequence[TokenConstraint] = (),
    ) -> None:
        assert params.seed is not None, "the door resolves seeds"
        assert params.bad_words_token_ids or not params.bad_words, "the door tokenizes bad words"
        self.params = params
        self.seed = params.seed % 2**64
        self.sample_index = sample_index
        self.position = 0  # number of output tokens
        self.num_logprobs = -1 if params.logprobs is None else params.logprobs if params.logprobs >= 0 else vocab_size
        self.constraints = list(constraints)
        if params.allowed_token_ids is not None:
            self.constraints.insert(0, AllowedTokens(params.allowed_token_ids, vocab_size))
        self.bias_ids: Array = _NOTHING  # int32 [n], and float32 [n]
        self.bias_values: Array = np.empty(0, np.float32)
        if params.logit_bias:
            self.bias_ids = np.fromiter(params.logit_bias, np.int32)
            self.bias_values = np.fromiter(params.logit_bias.values(), np.float32)
        self._bad_words = _BadWords(params.bad_words_token_ids) if params.bad_words_token_ids else None
        self._stop_ids = _NOTHING
        if params.min_tokens > 0:
            self._stop_ids = np.array(sorted({*eos_token_ids, *params.stop_token_ids}), np.int32)
        # Ids that occurred, each with its slot in the arrays; their counts in the output.
        self.penalised = params.has_penalties
        self._slots: dict[int, int] = {}
        self._ids: Array = _NOTHING
        self._counts: Array = _NOTHING
        if params.repetition_penalty != 1:
            self._slots = {token: slot for slot, token in enumerate(dict.fromkeys(prompt_token_ids))}
            self._ids = np.fromiter(self._slots, np.int32, len(self._slots))
            self._counts = np.zeros(len(self._slots), np.int32)
        self.is_plain = not (self.constraints or self.penalised or self.masks or len(self.bias_ids))

    def append(self, token_id: int) -> None:
        """Tells of the next output token."""
        self.position += 1
        if self.is_plain:
            return
        for constraint in self.constraints:
            constraint.accept(token_id)
        if self._bad_words is not None:
            self._bad_words.append(token_id)
        if not self.penalised:
            return
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            grown = max(16, 2 * slot)
            self._ids = np.resize(self._ids, grown)
            self._counts = np.concatenate((self._counts, np.zeros(grown - slot, np.int32)))
        self._ids[slot] = token_id
        self._counts[slot] += 1

    @property
    def occurred(self) -> tuple[Array, Array]:
        """Ids to penalise and their counts in the output, int32 [n] each, in order of first occurrence."""
        return self._ids[: len(self._slots)], self._counts[: len(self._slots)]

    @property
    def masks(self) -> bool:
        """Whether `masked` may have something."""
        return self._bad_words is not None or self.position < self.params.min_tokens

    @property
    def masked(self) -> Array:
        """Ids that must not come next, int32 [n]: what would complete a bad word, or could stop a sequence shorter than
        min_tokens.
        """
        stop_ids = self._stop_ids if self.position < self.params.min_tokens else _NOTHING
        return stop_ids if self._bad_words is None else np.concatenate((stop_ids, self._bad_words.completing))


class _BadWords:
    """Which ids would complete one of some sequences of tokens. Only the output counts, not the end of the prompt."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self._single = np.array(sorted({word[0] for word in words if len(word) == 1}), np.int32)
        self._by_last_but_one: dict[int, list[tuple[int, ...]]] = {}
        for word in words:
            if len(word) > 1:
                self._by_last_but_one.setdefault(word[-2], []).append(word)
        self._longest = max(map(len, words))
        self._output: list[int] = []  # its end

    def append(self, token_id: int) -> None:
        self._output.append(token_id)
        if len(self._output) > 2 * self._longest:
            del self._output[: -self._longest]

    @property
    def completing(self) -> Array:
        """int32 [n]"""
        words = self._by_last_but_one.get(self._output[-1], ()) if self._output else ()
        ends = [word[-1] for word in words if tuple(self._output[1 - len(word) :]) == word[:-1]]
        return np.concatenate((self._single, np.array(ends, np.int32))) if ends else self._single


class Sampler:
    """Reusable arrays for up to `max_rows` rows.

    A row keeps what it was told of a sequence, so a sequence that samples in the same row as in the step before costs
    one comparison and its position.
    """

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self.max_rows = max_rows
        self.vocab_size = vocab_size
        self._occupants: list[SamplerState | None] = [None] * max_rows
        f32, i32 = np.float32, np.int32
        self._arrays = SampleArrays(
            temperature=np.zeros(max_rows, f32),
            top_k=np.zeros(max_rows, i32),
            top_p=np.ones(max_rows, f32),
            min_p=np.zeros(max_rows, f32),
            repetition_penalty=np.ones(max_rows, f32),
            presence_penalty=np.zeros(max_rows, f32),
            frequency_penalty=np.zeros(max_rows, f32),
            seed=np.zeros(max_rows, np.uint64),
            position=np.zeros(max_rows, np.uint32),
            sample_index=np.zeros(max_rows, np.uint32),
            num_logprobs=np.full(max_rows, -1, i32),
            bitmask_row=np.full(max_rows, -1, i32),
            bitmasks=np.empty((0, 0), np.uint32),
            mask_offsets=np.zeros(max_rows + 1, i32),
            mask_ids=_NOTHING,
            bias_offsets=np.zeros(max_rows + 1, i32),
            bias_ids=_NOTHING,
            bias_values=np.empty(0, f32),
            penalty_offsets=np.zeros(max_rows + 1, i32),
            penalty_ids=_NOTHING,
            output_counts=_NOTHING,
            token=np.zeros(max_rows, i32),
            logprob=np.zeros(max_rows, f32),
            rank=np.zeros(max_rows, i32),
            top_ids=np.zeros((max_rows, 0), i32),
            top_logprobs=np.zeros((max_rows, 0), f32),
        )

    def run(
        self, native_sample: NativeSample, logits_rows: int, states: Sequence[SamplerState]
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """Samples one token for each of `states`, whose logits are rows 0.. of the backend's `logits_rows` rows.

        The caller tells the states of the tokens (`append`): a token may yet be discarded.
        """
        assert logits_rows == len(states) <= self.max_rows
        all_plain = True
        for row, state in enumerate(states):
            if self._occupants[row] is not state:
                self._seat(row, state)
            if not state.is_plain:
                all_plain = False
                if state.constraints:
                    self._constrain(row, state)
        a = self._arrays
        a.position[:logits_rows] = [state.position for state in states]
        if not all_plain:
            a = _with_edits(a, states)
        native_sample(logits_rows, *a)
        tokens = a.token[:logits_rows].tolist()
        return [
            (token, token_logprobs(a, row) if state.num_logprobs >= 0 else None)
            for row, (token, state) in enumerate(zip(tokens, states, strict=True))
        ]

    def forget(self, state: SamplerState) -> None:
        """It samples no more: its rows let go of it."""
        self._occupants = [None if occupant is state else occupant for occupant in self._occupants]

    def _seat(self, row: int, state: SamplerState) -> None:
        if state.num_logprobs > self._arrays.top_ids.shape[1]:
            shape = (self.max_rows, state.num_logprobs)
            self._arrays = self._arrays._replace(
                top_ids=np.zeros(shape, np.int32), top_logprobs=np.zeros(shape, np.float32)
            )
        a, params = self._arrays, state.params
        self._occupants[row] = state
        a.temperature[row] = 0.0 if params.greedy else params.temperature
        a.top_k[row] = params.top_k
        a.top_p[row] = params.top_p
        a.min_p[row] = params.min_p
        a.repetition_penalty[row] = params.repetition_penalty
        a.presence_penalty[row] = params.presence_penalty
        a.frequency_penalty[row] = params.frequency_penalty
        a.seed[row] = state.seed
        a.sample_index[row] = state.sample_index
        a.num_logprobs[row] = state.num_logprobs
        a.bitmask_row[row] = -1

    def _constrain(self, row: int, state: SamplerState) -> None:
        if not self._arrays.bitmasks.size:
            shape = (self.max_rows, mask_words(self.vocab_size))
            self._arrays = self._arrays._replace(bitmasks=np.zeros(shape, np.uint32))
        a = self._arrays
        a.bitmask_row[row] = row if fill_mask(state.constraints, a.bitmasks[row]) else -1


def token_logprobs(a: SampleArrays | ScoreArrays, row: int) -> TokenLogprobs:
    """What was written for a row that asked for it."""
    ids = a.top_ids[row, : a.num_logprobs[row]].tolist()
    count = len(ids) - ids.count(-1)
    return TokenLogprobs(float(a.logprob[row]), int(a.rank[row]), ids[:count], a.top_logprobs[row, :count].tolist())


def _with_edits(a: SampleArrays, states: Sequence[SamplerState]) -> SampleArrays:
    """With the lists of what is masked, biased and penalised in each row."""
    if any(state.penalised for state in states):
        occurred = [state.occurred for state in states]
        a = a._replace(
            penalty_offsets=_offsets([len(ids) for ids, _ in occurred]),
            penalty_ids=np.concatenate([ids for ids, _ in occurred]),
            output_counts=np.concatenate([counts for _, counts in occurred]),
        )
    if any(state.masks for state in states):
        masked = [state.masked for state in states]
        a = a._replace(mask_offsets=_offsets([len(ids) for ids in masked]), mask_ids=np.concatenate(masked))
    if any(len(state.bias_ids) for state in states):
        a = a._replace(
            bias_offsets=_offsets([len(state.bias_ids) for state in states]),
            bias_ids=np.concatenate([state.bias_ids for state in states]),
            bias_values=np.concatenate([state.bias_values for state in states]),
        )
    return a


def _offsets(lengths: list[int]) -> Array:
    return np.cumsum([0, *lengths], dtype=np.int32)
