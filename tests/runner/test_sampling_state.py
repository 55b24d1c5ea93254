"""Per-sequence state and the arrays of a step, with the specification standing in for a backend."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

from octavo.core.records import SamplingParams
from octavo.runner.sampler import Sampler, SamplerState
from octavo.runner.sampling import Array, SampleArrays, log_softmax, sample

EOS = (2,)
VOCAB_SIZE = 1000  # of the models, whose logits here are cut to what a test needs


def state(prompt: list[int] | None = None, sample_index: int = 0, **params: Any) -> SamplerState:
    return SamplerState(
        SamplingParams(**{"seed": 1, **params}), prompt or [0, 1], EOS, VOCAB_SIZE, sample_index=sample_index
    )


class Recorder:
    """Samples by the specification and keeps what it was given."""

    def __init__(self, logits: Array) -> None:
        self._logits = logits
        self.arrays: SampleArrays

    def __call__(self, rows: int, /, *arrays: Array) -> None:
        assert all(a.flags.c_contiguous for a in arrays)
        self.arrays = SampleArrays(*(a.copy() for a in arrays))
        sample(self._logits, rows, *arrays)


def generate(states: list[SamplerState], logits: Array, steps: int, sampler: Sampler) -> list[list[int]]:
    tokens: list[list[int]] = [[] for _ in states]
    for _ in range(steps):
        sampled = sampler.run(partial(sample, logits), len(states), states)
        for out, one, (token, _) in zip(tokens, states, sampled, strict=True):
            one.append(token)
            out.append(token)
    return tokens


def test_greedy_rows_take_the_best_and_have_no_logprobs() -> None:
    logits = np.array([[0, 5, 1], [7, 5, 1]], np.float32)
    assert Sampler(4, VOCAB_SIZE).run(partial(sample, logits), 2, [state(temperature=0.0)] * 2) == [
        (1, None),
        (0, None),
    ]


def test_logprobs_come_for_the_rows_that_asked() -> None:
    logits = np.array([[0, 5, 1], [7, 5, 1], [0, 1, 2]], np.float32)
    states = [state(temperature=0.0, logprobs=2), state(temperature=0.0), state(temperature=0.0, logprobs=0)]
    (_, first), (_, second), (_, third) = Sampler(3, VOCAB_SIZE).run(partial(sample, logits), 3, states)
    expected = log_softmax(logits[0])
    assert first is not None
    assert (first.rank, first.top_ids) == (1, [1, 2])
    assert first.logprob == pytest.approx(expected[1])
    assert first.top_logprobs == pytest.approx(expected[[1, 2]].tolist())
    assert second is None
    assert third is not None
    assert (third.top_ids, third.top_logprobs) == ([], [])


def test_a_wish_for_more_alternatives_than_ids_gets_all_ids() -> None:
    logits = np.array([[0, 5, 1]], np.float32)
    [(_, logprobs)] = Sampler(1, VOCAB_SIZE).run(partial(sample, logits), 1, [state(logprobs=20)])
    assert logprobs is not None
    assert logprobs.top_ids == [1, 2, 0]
    assert len(logprobs.top_logprobs) == 3


def test_what_could_stop_a_sequence_is_masked_until_min_tokens() -> None:
    logits = np.array([[3, 1, 9, 8]], np.float32)
    one = state(temperature=0.0, min_tokens=2, stop_token_ids=(3,))
    assert generate([one], logits, 4, Sampler(1, VOCAB_SIZE)) == [[0, 0, 2, 2]]


def test_output_tokens_are_counted_and_prompt_tokens_only_repeated() -> None:
    native = Recorder(np.zeros((2, 50), np.float32))
    states = [
        state([7, 8, 7], repetition_penalty=1.2, frequency_penalty=0.5),
        state([7, 8, 7], presence_penalty=0.5),
    ]
    for token in (9, 8, 9):
        for one in states:
            one.append(token)
    Sampler(2, VOCAB_SIZE).run(native, 2, states)
    a = native.arrays
    assert a.penalty_offsets.tolist() == [0, 3, 5]
    assert a.penalty_ids.tolist() == [7, 8, 9, 9, 8]
    assert a.output_counts.tolist() == [0, 1, 2, 2, 1]
    assert a.position[:2].tolist() == [3, 3]


def test_counts_stay_right_while_many_different_tokens_come() -> None:
    one = state([5, 6], repetition_penalty=1.5)
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 300, 1000).tolist()
    for token in tokens:
        one.append(token)
    ids, counts = one.occurred
    expected = np.bincount([*tokens, 5, 6], minlength=300)
    expected[[5, 6]] -= 1
    assert len(ids) == len(set(ids.tolist())) == len({5, 6, *tokens})
    assert counts.tolist() == expected[ids].tolist()


def test_a_frequency_penalty_moves_greedy_on() -> None:
    logits = np.array([[1.0, 0.8, 0.0]], np.float32)
    assert generate([state(temperature=0.0, frequency_penalty=0.3)], logits, 5, Sampler(1, VOCAB_SIZE)) == [
        [0, 1, 0, 1, 0]
    ]


def test_rows_without_penalties_or_masks_hand_over_empty_lists_again() -> None:
    native = Recorder(np.zeros((1, 5), np.float32))
    sampler = Sampler(1, VOCAB_SIZE)
    one = state(min_tokens=1, presence_penalty=1.0)
    one.append(3)
    sampler.run(native, 1, [one])
    sampler.run(native, 1, [state()])
    assert native.arrays.penalty_offsets[:2].tolist() == native.arrays.mask_offsets[:2].tolist() == [0, 0]


def test_tokens_do_not_depend_on_rows_nor_on_company() -> None:
    logits = np.random.default_rng(4).normal(size=40).astype(np.float32)
    kinds: list[dict[str, Any]] = [
        {"seed": 1},
        {"seed": 2, "top_k": 5, "presence_penalty": 1.0},
        {"seed": -3, "top_p": 0.7, "min_tokens": 5},
        {"seed": 4, "temperature": 0.0, "repetition_penalty": 1.3},
    ]
    alone = [generate([state(**kind)], logits[None], 12, Sampler(1, VOCAB_SIZE))[0] for kind in kinds]
    states = [state(**kind) for kind in kinds]
    sampler = Sampler(8, VOCAB_SIZE)
    together: list[list[int]] = [[] for _ in kinds]
    rng = np.random.default_rng(8)
    while any(len(tokens) < 12 for tokens in together):
        chosen = [int(i) for i in rng.permutation(4)[: rng.integers(1, 5)] if len(together[i]) < 12]
        rows = [states[i] for i in chosen]
        sampled = sampler.run(partial(sample, np.tile(logits, (len(rows), 1))), len(rows), rows)
        for i, (token, _) in zip(chosen, sampled, strict=True):
            states[i].append(token)
            together[i].append(token)
    assert together == alone


def test_allowed_ids_hold_a_row_and_only_that_one() -> None:
    logits = np.array([[5, 4, 3, 2]] * 3, np.float32)
    states = [state(temperature=0.0), state(temperature=0.0, allowed_token_ids=(3, 2)), state(temperature=0.0)]
    sampler = Sampler(3, VOCAB_SIZE)
    assert generate(states, logits, 2, sampler) == [[0, 0], [2, 2], [0, 0]]
    assert generate(states[:1] * 2, logits[:2], 1, sampler) == [[0], [0]], "the next in its row is free"


def test_a_bias_belongs_to_its_row() -> None:
    logits = np.array([[5, 4, 3, 2]] * 3, np.float32)
    states = [state(temperature=0.0, logit_bias={3: 99, 1: 300}), state(temperature=0.0)]
    states.append(state(temperature=0.0, logit_bias={0: -4}))
    assert generate(states, logits, 2, Sampler(3, VOCAB_SIZE)) == [[1, 1], [0, 0], [1, 1]]


def test_the_last_token_of_a_bad_word_is_masked_behind_the_others() -> None:
    logits = np.array([[9.0, 8.0, 7.0, 0.0]], np.float32)
    words = ((0, 0, 0), (0, 0, 1), (2,), (2, 3), (0, 1, 2, 3))
    one = state([0, 0, 0], temperature=0.0, bad_words=("x",), bad_words_token_ids=words)
    assert generate([one], logits, 9, Sampler(1, VOCAB_SIZE)) == [[0, 0, 3, 0, 0, 3, 0, 0, 3]]
    many = state(temperature=0.0, bad_words=("x",), bad_words_token_ids=((0, 1, 0),), frequency_penalty=0.9)
    assert generate([many], logits, 5, Sampler(1, VOCAB_SIZE)) == [[0, 0, 1, 1, 0]], "a second 0 would be next"


class Countdown:
    """Allows what is below a number that falls with each token; from 0 on, everything."""

    def __init__(self, start: int) -> None:
        self.left = start
        self.told: list[int] = []

    def fill(self, mask: Array) -> bool:
        assert (mask.dtype, mask.size) == (np.uint32, 32)
        mask[:] = 0
        mask[0] = (1 << self.left) - 1
        return self.left > 0

    def accept(self, token_id: int) -> None:
        self.told.append(token_id)
        self.left = max(0, self.left - 1)


def test_constraints_are_asked_before_each_token_and_told_it() -> None:
    logits = np.arange(6, dtype=np.float32)[None]
    constraint = Countdown(3)
    one = SamplerState(SamplingParams(seed=1, temperature=0), [0], EOS, VOCAB_SIZE, constraints=[constraint])
    assert generate([one], logits, 5, Sampler(1, VOCAB_SIZE)) == [[2, 1, 0, 5, 5]]
    assert constraint.told == [2, 1, 0, 5, 5]


def test_the_later_of_two_constraints_has_the_last_word() -> None:
    logits = np.arange(6, dtype=np.float32)[None]
    params = SamplingParams(seed=1, temperature=0, allowed_token_ids=(1, 5))
    one = SamplerState(params, [0], EOS, VOCAB_SIZE, constraints=[Countdown(3)])
    assert generate([one], logits, 5, Sampler(1, VOCAB_SIZE)) == [[1, 1, 0, 5, 5]]


def test_minus_one_is_the_whole_vocabulary() -> None:
    logits = np.random.default_rng(1).normal(size=(2, VOCAB_SIZE)).astype(np.float32)
    sampler = Sampler(2, VOCAB_SIZE)
    sampler.run(partial(sample, logits), 2, [state(logprobs=3), state()])
    (_, some), (_, all_of_them) = sampler.run(partial(sample, logits), 2, [state(logprobs=3), state(logprobs=-1)])
    assert some is not None
    assert all_of_them is not None
    assert len(some.top_ids) == 3
    assert sorted(all_of_them.top_ids) == list(range(VOCAB_SIZE))
    assert all_of_them.top_logprobs == sorted(all_of_them.top_logprobs, reverse=True)


def test_samples_of_one_request_draw_their_own_numbers() -> None:
    logits = np.zeros((2, 1000), np.float32)
    first, second = generate([state(sample_index=0), state(sample_index=1)], logits, 5, Sampler(2, VOCAB_SIZE))
    assert first != second
