"""The specification of sampling: each step worked out by hand, and the distribution of its draws."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.runner.sampling import (
    DRAW_CHUNK,
    SampleArrays,
    choose,
    clean,
    edited,
    inverse_cdf,
    log_softmax,
    philox4x32,
    sample,
    survivors,
    uniform,
)


def one_row(
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
    seed: int = 0,
    position: int = 0,
    num_logprobs: int = -1,
    counts: dict[int, int] | None = None,
    masked: tuple[int, ...] = (),
    bias: dict[int, float] | None = None,
    allowed: tuple[int, ...] | None = None,
) -> SampleArrays:
    f32, i32 = np.float32, np.int32
    counts, bias = counts or {}, bias or {}
    return SampleArrays(
        temperature=np.array([temperature], f32),
        top_k=np.array([top_k], i32),
        top_p=np.array([top_p], f32),
        min_p=np.array([min_p], f32),
        repetition_penalty=np.array([repetition], f32),
        presence_penalty=np.array([presence], f32),
        frequency_penalty=np.array([frequency], f32),
        seed=np.array([seed], np.uint64),
        position=np.array([position], np.uint32),
        sample_index=np.zeros(1, np.uint32),
        num_logprobs=np.array([num_logprobs], i32),
        bitmask_row=np.array([-1 if allowed is None else 0], i32),
        bitmasks=np.array([[sum(1 << i for i in allowed or ())]], np.uint32),
        mask_offsets=np.array([0, len(masked)], i32),
        mask_ids=np.array(masked, i32),
        bias_offsets=np.array([0, len(bias)], i32),
        bias_ids=np.array([*bias], i32),
        bias_values=np.array([*bias.values()], f32),
        penalty_offsets=np.array([0, len(counts)], i32),
        penalty_ids=np.array([*counts], i32),
        output_counts=np.array([*counts.values()], i32),
        token=np.full(1, -7, i32),
        logprob=np.zeros(1, f32),
        rank=np.zeros(1, i32),
        top_ids=np.full((1, 4), -7, i32),
        top_logprobs=np.zeros((1, 4), f32),
    )


def logits_of(*probabilities: float) -> np.ndarray:
    return np.log(np.array(probabilities, np.float32))


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_philox_gives_the_published_answers(counter: list[int], key: list[int], expected: list[int]) -> None:
    assert philox4x32(np.array(counter, np.uint32), np.array(key, np.uint32)).tolist() == expected


def test_every_part_of_seed_position_and_sample_index_changes_the_number() -> None:
    points = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (2**63, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)]
    numbers = {uniform(*point) for point in points}
    assert len(numbers) == len(points)
    assert all(0 <= u < 1 for u in numbers)


def test_penalties_come_in_order_and_only_to_ids_that_occurred() -> None:
    a = one_row(repetition=2.0, frequency=0.25, presence=1.0, counts={0: 0, 1: 3, 2: 1, 9: 1})
    x = edited(np.array([4, 4, -4, 4], np.float32), a, 0)
    assert x.tolist() == [2.0, 2.0 - 0.75 - 1, -8.0 - 0.25 - 1, 4.0]


def test_masked_ids_are_never_chosen_even_with_a_negative_penalty() -> None:
    a = one_row(temperature=0, presence=-2.0, counts={1: 5}, masked=(1, 77, -1))
    assert choose(np.array([0, 9, 1], np.float32), a, 0) == 2


def test_a_bias_is_added_after_masks_and_before_penalties() -> None:
    a = one_row(allowed=(0, 1, 2, 31), masked=(2,), bias={0: 3.0, 1: 100.0, 2: 50.0, 9: 1.0, -1: 1.0}, repetition=2.0)
    a = a._replace(penalty_offsets=np.array([0, 1], np.int32), penalty_ids=np.zeros(1, np.int32))
    a = a._replace(output_counts=np.zeros(1, np.int32))
    x = edited(clean(np.array([1, np.inf, 4, 4], np.float32)), a, 0)
    assert x.tolist() == [2.0, np.finfo(np.float32).max, -np.inf, -np.inf]


def test_only_ids_with_a_bit_are_chosen() -> None:
    logits = np.array([5, 9, 1, 7], np.float32)
    assert choose(logits, one_row(temperature=0, allowed=(0, 2, 3)), 0) == 3
    assert {choose(logits, one_row(temperature=2, allowed=(0, 2), position=i), 0) for i in range(60)} == {0, 2}


@pytest.mark.parametrize(("masked", "token"), [((), 2), ((2,), 3), ((2, 3), 2)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_without_a_usable_logit_stays_within_its_bitmask(
    temperature: float, masked: tuple[int, ...], token: int
) -> None:
    logits = np.array([5, 5, -np.inf, -np.inf], np.float32)
    assert choose(logits, one_row(temperature=temperature, allowed=(2, 3), masked=masked), 0) == token
    assert choose(logits, one_row(temperature=temperature, allowed=(), masked=masked), 0) == 0


@pytest.mark.parametrize("temperature", [0.0, 9e-6])
def test_greedy_breaks_ties_by_lower_id(temperature: float) -> None:
    assert choose(np.array([1, 3, 3, 2], np.float32), one_row(temperature=temperature), 0) == 1


def test_top_k_keeps_exactly_k_with_ties_by_lower_id() -> None:
    x = np.array([1, 5, 3, 3, 3], np.float32)
    assert survivors(x, one_row(top_k=3), 0).ids.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("p", "kept"), [(0.01, [2]), (0.39, [2]), (0.41, [2, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_shortest_run_that_reaches_p(p: float, kept: list[int]) -> None:
    x = logits_of(0.1, 0.2, 0.4, 0.3)
    assert survivors(x, one_row(top_p=p), 0).ids.tolist() == kept


def test_top_p_takes_its_share_of_what_top_k_left() -> None:
    x = logits_of(0.1, 0.2, 0.4, 0.3)
    assert survivors(x, one_row(top_k=2, top_p=0.56), 0).ids.tolist() == [2]  # 0.4 of 0.7
    assert survivors(x, one_row(top_k=2, top_p=0.58), 0).ids.tolist() == [2, 3]


def test_min_p_comes_after_temperature() -> None:
    x = logits_of(0.1, 0.2, 0.4, 0.3)
    assert survivors(x, one_row(min_p=0.45), 0).ids.tolist() == [1, 2, 3]
    assert survivors(x, one_row(min_p=0.45, temperature=2.0), 0).ids.tolist() == [0, 1, 2, 3]  # sqrt(1/4) = 0.5
    assert survivors(x, one_row(min_p=1.0), 0).ids.tolist() == [2]


def test_inverse_cdf_takes_the_first_weight_whose_running_sum_exceeds_u() -> None:
    weights = np.array([0, 1, 0, 2, 1, 0], np.float64)
    assert [inverse_cdf(weights, u) for u in (0, 0.2499, 0.25, 0.7499, 0.75, 1 - 2**-53)] == [1, 1, 3, 3, 4, 4]
    long = np.ones(2 * DRAW_CHUNK + 3)
    for index in (0, DRAW_CHUNK - 1, DRAW_CHUNK, 2 * DRAW_CHUNK + 2):
        assert inverse_cdf(long, (index + 0.5) / len(long)) == index


def test_logprobs_are_of_the_raw_logits_whatever_was_masked_or_penalised() -> None:
    logits = np.array([[1, 4, 2, 2]], np.float32)
    a = one_row(temperature=0, top_k=1, num_logprobs=3, masked=(1,), presence=2.0, counts={2: 1})
    sample(logits, 1, *a)
    expected = log_softmax(logits[0])
    assert a.token[0] == 3
    assert a.rank[0] == 2  # ids 2 and 3 share it: only larger logits count
    assert a.logprob[0] == pytest.approx(expected[3])
    assert a.top_ids[0].tolist() == [1, 2, 3, -7]
    np.testing.assert_allclose(a.top_logprobs[0, :3], expected[[1, 2, 3]], rtol=1e-6)
    assert np.exp(expected).sum() == pytest.approx(1)


def test_a_vocabulary_smaller_than_the_wish_ends_with_minus_one() -> None:
    a = one_row(num_logprobs=4)
    sample(np.zeros((1, 2), np.float32), 1, *a)
    assert a.top_ids[0].tolist() == [0, 1, -1, -1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_usable_logit_yield_the_lowest_id_that_is_not_masked(temperature: float) -> None:
    for value in (np.nan, -np.inf):
        logits = clean(np.full(4, value, np.float32))
        assert choose(logits, one_row(temperature=temperature, masked=(0, 1)), 0) == 2
        assert choose(logits, one_row(temperature=temperature, masked=(0, 1, 2, 3)), 0) == 0


def test_infinite_logits_share_the_mass() -> None:
    logits = clean(np.array([0, np.inf, np.nan, np.inf], np.float32))
    kept = survivors(logits, one_row(), 0)
    assert kept.ids[kept.weights > 0].tolist() == [1, 3]
    np.testing.assert_allclose(np.exp(log_softmax(logits)), [0, 0.5, 0, 0.5])


def test_draws_of_successive_positions_follow_the_softmax() -> None:
    probabilities = np.array([0.05, 0.5, 0.15, 0.3])
    logits = logits_of(*probabilities)
    draws = 4000
    counts = np.bincount([choose(logits, one_row(seed=5, position=i), 0) for i in range(draws)], minlength=4)
    chi_square = ((counts - draws * probabilities) ** 2 / (draws * probabilities)).sum()
    assert chi_square < 16.3  # 3 degrees of freedom, 1 in 1,000
