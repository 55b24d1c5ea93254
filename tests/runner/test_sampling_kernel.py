"""The native sampling kernel against its specification, for every instruction set that this machine can run.

The kernel is compiled from csrc/ by itself here, with the flags of CMakeLists.txt, so that these tests need no
installed build. Weights are float32 there and float64 here: where a token differs, the difference must be shown to come
from a sum within TOLERANCE of the bound it is compared with, and that must be rare.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.backends.cpu.backend import instruction_sets
from octavo.runner.sampling import (
    Array,
    SampleArrays,
    ScoreArrays,
    clean,
    edited,
    ranking,
    sample,
    score,
    survivors,
    uniform,
)

CSRC = Path(__file__).parents[2] / "csrc"
TOLERANCE = 3e-6  # relative; float32 exponentials and chunk sums
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = [*AVX2, *(f"-mavx512{part}" for part in ("f", "bw", "vl", "dq")), "-mprefer-vector-width=512"]
VOCABULARY_AND_FLAGS: dict[str, tuple[str, list[str]]] = {
    "portable": ("portable", []),
    "avx2": ("avx2", AVX2),
    "avx512": ("avx512", AVX512),
    "avx512_vnni": ("avx512", [*AVX512, "-mavx512vnni"]),
    "avx512_bf16": ("avx512", [*AVX512, "-mavx512vnni", "-mavx512bf16"]),
}
BASE_FLAGS = "-std=c++20 -O3 -ffp-contract=off -fno-math-errno -fno-trapping-math"
RUNNABLE = instruction_sets()

WRAPPER = """
#define OCTAVO_ISA {isa}
#include "simd_{vocabulary}.h"
#include "sampling.h"
#include "kernels/math.inl"
#include "kernels/sample.inl"
extern "C" {{
size_t scratch_bytes(int vocab) {{ return octavo::sample_scratch_bytes(vocab); }}
void philox(uint32_t *counter, uint32_t k0, uint32_t k1) {{ octavo::OCTAVO_ISA::philox4x32(counter, k0, k1); }}
double uniform_of(uint64_t seed, uint32_t position, uint32_t sample_index) {{
  return octavo::OCTAVO_ISA::uniform(seed, position, sample_index);
}}
void sample(const octavo::SampleArgs *args, void *scratch) {{
  for (int row = 0; row < args->rows; row++)
    octavo::OCTAVO_ISA::sample_row(*args, row, static_cast<octavo::SampleScratch *>(scratch));
}}
void score(const octavo::SampleArgs *args, void *scratch) {{
  for (int row = 0; row < args->rows; row++)
    octavo::OCTAVO_ISA::score_row(*args, row, static_cast<octavo::SampleScratch *>(scratch));
}}
}}
"""


class SampleArgs(ctypes.Structure):
    _fields_ = [
        ("logits", ctypes.c_void_p),
        ("stride", ctypes.c_int64),
        ("vocab", ctypes.c_int),
        ("rows", ctypes.c_int),
        ("max_logprobs", ctypes.c_int),
        ("bitmask_words", ctypes.c_int),
        *((name, ctypes.c_void_p) for name in SampleArrays._fields),
    ]


class Kernel:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.scratch_bytes.restype = ctypes.c_size_t
        library.uniform_of.restype = ctypes.c_double
        library.uniform_of.argtypes = [ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]

    def philox(self, counter: list[int], key: list[int]) -> list[int]:
        words = (ctypes.c_uint32 * 4)(*counter)
        self._library.philox(words, ctypes.c_uint32(key[0]), ctypes.c_uint32(key[1]))
        return list(words)

    def uniform(self, seed: int, position: int, sample_index: int) -> float:
        return float(self._library.uniform_of(seed, position, sample_index))

    def sample(self, logits: Array, rows: int, *arrays: Array) -> None:
        """As `sampling.sample`. The logits are copied; what lies past the end of a row, and in the scratch, is NaN."""
        self._run(self._library.sample, logits, rows, SampleArrays(*arrays))

    def score(self, logits: Array, rows: int, *arrays: Array) -> None:
        """As `sampling.score`."""
        self._run(self._library.score, logits, rows, ScoreArrays(*arrays))

    def _run(self, run: Callable[..., None], logits: Array, rows: int, a: SampleArrays | ScoreArrays) -> None:
        vocab = logits.shape[1]
        padded = np.full((len(logits), vocab + 5), np.nan, np.float32)
        padded[:, :vocab] = logits
        assert all(x.flags.c_contiguous for x in a)
        size = self._library.scratch_bytes(vocab)
        memory = np.full(size // 4 + 64, np.nan, np.float32)
        guard = memory.view(np.uint32)
        start = -memory.ctypes.data % 64 // 4
        end = start + (size + 3) // 4
        guard[end:] = 0xABCDEF
        words = a.bitmasks.shape[1] if isinstance(a, SampleArrays) else 0
        pointers = {name: x.ctypes.data for name, x in a._asdict().items()}
        args = SampleArgs(padded.ctypes.data, vocab + 5, vocab, rows, a.top_ids.shape[1], words, **pointers)
        run(ctypes.byref(args), ctypes.c_void_p(memory.ctypes.data + 4 * start))
        assert (guard[end:] == 0xABCDEF).all(), "wrote past its scratch"
        assert np.isnan(padded[:, vocab:]).all(), "wrote past its row"


@functools.cache
def build(isa: str, directory: Path) -> Kernel:
    source, library = directory / f"{isa}.cpp", directory / f"{isa}.so"
    vocabulary, isa_flags = VOCABULARY_AND_FLAGS[isa]
    source.write_text(WRAPPER.format(isa=isa, vocabulary=vocabulary))
    flags = [*BASE_FLAGS.split(), *isa_flags, "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([os.environ.get("CXX", "c++"), *flags, str(source), "-o", str(library)], check=True)
    symbols = subprocess.run(["nm", "-C", str(library)], check=True, capture_output=True, text=True).stdout
    assert " W std::" not in symbols, "a standard template, compiled for one instruction set, would leak to the others"
    return Kernel(ctypes.CDLL(str(library)))


@pytest.fixture(scope="session")
def kernel_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(params=RUNNABLE)
def kernel(request: pytest.FixtureRequest, kernel_directory: Path) -> Kernel:
    return build(request.param, kernel_directory)


def greedy_arrays(rows: int, max_logprobs: int = 20) -> SampleArrays:
    """Greedy, nothing penalised or masked, no logprobs; outputs hold what no row may yield."""
    f32, i32 = np.float32, np.int32
    return SampleArrays(
        temperature=np.zeros(rows, f32),
        top_k=np.zeros(rows, i32),
        top_p=np.ones(rows, f32),
        min_p=np.zeros(rows, f32),
        repetition_penalty=np.ones(rows, f32),
        presence_penalty=np.zeros(rows, f32),
        frequency_penalty=np.zeros(rows, f32),
        seed=np.arange(rows, dtype=np.uint64),
        position=np.zeros(rows, np.uint32),
        sample_index=np.zeros(rows, np.uint32),
        num_logprobs=np.full(rows, -1, i32),
        bitmask_row=np.full(rows, -1, i32),
        bitmasks=np.zeros((0, 0), np.uint32),
        mask_offsets=np.zeros(rows + 1, i32),
        mask_ids=np.zeros(0, i32),
        bias_offsets=np.zeros(rows + 1, i32),
        bias_ids=np.zeros(0, i32),
        bias_values=np.zeros(0, f32),
        penalty_offsets=np.zeros(rows + 1, i32),
        penalty_ids=np.zeros(0, i32),
        output_counts=np.zeros(0, i32),
        token=np.full(rows, -7, i32),
        logprob=np.full(rows, np.nan, f32),
        rank=np.full(rows, -7, i32),
        top_ids=np.full((rows, max_logprobs), -7, i32),
        top_logprobs=np.full((rows, max_logprobs), np.nan, f32),
    )


def copied(arrays: SampleArrays) -> SampleArrays:
    return SampleArrays(*(x.copy() for x in arrays))


def random_logits(rng: np.random.Generator, rows: int, vocab: int) -> Array:
    """Rows peaky to flat; some coarse (many ties), some with holes, infinities and NaN."""
    logits = rng.normal(size=(rows, vocab)) * np.exp(rng.uniform(-8, 2.5, size=(rows, 1)))
    coarse = rng.random(rows) < 0.2
    logits[coarse] = np.round(logits[coarse])
    broken = rng.random(rows) < 0.1
    for value in (np.nan, -np.inf, np.inf):
        hit = (rng.random((rows, vocab)) < rng.choice([0.001, 0.3])) & broken[:, None]
        logits[hit & (rng.random((rows, 1)) < 0.5)] = value
    return logits.astype(np.float32)


def random_arrays(rng: np.random.Generator, rows: int, vocab: int) -> SampleArrays:
    def some(chance: float, values: Array, off: float) -> Array:
        return np.where(rng.random(rows) < chance, values, off)

    def ragged(most: int) -> tuple[Array, Array]:
        lengths = np.where(rng.random(rows) < 0.3, rng.integers(0, most + 1, rows), 0)
        ids = [rng.choice(np.arange(-2, vocab + 3), min(n, vocab), replace=False) for n in lengths]
        offsets = np.cumsum([0, *map(len, ids)])
        return offsets.astype(np.int32), np.concatenate(ids).astype(np.int32)

    a = greedy_arrays(rows)
    a.temperature[:] = some(0.85, rng.choice([1e-5, 0.1, 0.7, 1.0, 1.3, 2.0], rows), 0.0)
    a.top_k[:] = some(0.5, rng.choice([1, 2, 20, 50, 300, vocab - 1, vocab, vocab + 9], rows), rng.choice([0, -1]))
    a.top_p[:] = some(0.5, rng.choice([1e-6, 0.1, 0.5, 0.9, 0.95, 0.999], rows), 1.0)
    a.min_p[:] = some(0.3, rng.choice([1e-4, 0.05, 0.5, 1.0], rows), 0.0)
    a.repetition_penalty[:] = some(0.5, rng.uniform(0.5, 2, rows), 1.0)
    a.presence_penalty[:] = some(0.5, rng.uniform(-2, 2, rows), 0.0)
    a.frequency_penalty[:] = some(0.5, rng.uniform(-2, 2, rows), 0.0)
    a.seed[:] = rng.integers(0, 2**64, rows, dtype=np.uint64)
    a.position[:] = rng.integers(0, 10_000, rows)
    a.sample_index[:] = rng.integers(0, 4, rows)
    a.num_logprobs[:] = some(0.4, rng.integers(0, 21, rows), -1)
    penalty_offsets, penalty_ids = ragged(30)
    mask_offsets, mask_ids = ragged(4)
    bias_offsets, bias_ids = ragged(9)
    bitmasks = rng.integers(0, 2**32, (5, (vocab + 31) // 32), dtype=np.uint32)
    bitmasks[1:4] |= np.where(rng.random(bitmasks[1:4].shape) < 0.7, 2**32 - 1, 0).astype(np.uint32)  # holes are rare
    bitmasks[2:4] &= np.where(rng.random(bitmasks[2:4].shape) < 0.1, 2**32 - 1, 0).astype(np.uint32)  # or nearly all
    bitmasks[4] = 0
    counts = rng.integers(0, 5, len(penalty_ids)).astype(np.int32)
    a.bitmask_row[:] = some(0.3, rng.integers(0, 5, rows), -1)
    return a._replace(
        bitmasks=bitmasks,
        mask_offsets=mask_offsets,
        mask_ids=mask_ids,
        bias_offsets=bias_offsets,
        bias_ids=bias_ids,
        bias_values=rng.uniform(-100, 100, len(bias_ids)).astype(np.float32),
        penalty_offsets=penalty_offsets,
        penalty_ids=penalty_ids,
        output_counts=counts,
    )


def rounding_explains(token: int, logits: Array, a: SampleArrays, row: int) -> bool:
    """Whether `token` is what the specification yields when sums within TOLERANCE of a bound fall on its other side."""
    x = edited(clean(logits[row]), a, row)
    if a.temperature[row] < np.float32(1e-5) or x.max() == -np.inf:
        return False
    u = uniform(int(a.seed[row]), int(a.position[row]), int(a.sample_index[row]))
    wide = copied(a)
    wide.top_p[row] = 1
    before_top_p = survivors(x, wide, row)
    order = ranking(x[before_top_p.ids])
    mass = np.cumsum(before_top_p.weights[order]) / before_top_p.weights.sum()
    p = a.top_p[row] if a.top_p[row] < 1 else 1.0
    shortest = int(np.searchsorted(mass, p - TOLERANCE)) + 1
    longest = min(int(np.searchsorted(mass, p + TOLERANCE)) + 1, mass.size)
    if a.top_p[row] == 1:
        shortest = longest = mass.size
    for n in sorted({shortest, longest, len(survivors(x, a, row).ids)}):
        kept = np.sort(order[:n])
        ends = np.cumsum(before_top_p.weights[kept])
        ends /= ends[-1]
        at = np.flatnonzero(before_top_p.ids[kept] == token)
        if at.size and (ends[at[0] - 1] if at[0] else 0.0) - TOLERANCE <= u <= ends[at[0]] + TOLERANCE:
            return True
    return False


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
def test_native_philox_gives_the_published_answers(
    kernel: Kernel, counter: list[int], key: list[int], expected: list[int]
) -> None:
    assert kernel.philox(counter, key) == expected


def test_native_random_numbers_are_the_specified_ones(kernel: Kernel) -> None:
    for seed, position, sample_index in [(0, 0, 0), (2**64 - 1, 5, 0), (2**40 + 3, 2**32 - 1, 7)]:
        assert kernel.uniform(seed, position, sample_index) == uniform(seed, position, sample_index)


@pytest.mark.parametrize(
    ("vocab", "rows"),
    [
        (1, 200),
        (7, 1000),
        (16, 500),
        (20, 1000),
        (100, 3000),
        (511, 1000),
        (513, 1000),
        (1000, 2000),
        (3000, 1500),
        (49152, 60),
    ],
)
def test_kernel_yields_what_the_specification_says(kernel: Kernel, vocab: int, rows: int) -> None:
    rng = np.random.default_rng(vocab)
    logits = random_logits(rng, rows, vocab)
    theirs = random_arrays(rng, rows, vocab)
    ours = copied(theirs)
    sample(logits, rows, *theirs)
    kernel.sample(logits, rows, *ours)

    differ = np.flatnonzero(ours.token != theirs.token)
    unexplained = [int(row) for row in differ if not rounding_explains(int(ours.token[row]), logits, ours, int(row))]
    assert unexplained == []
    assert len(differ) <= max(1, rows // 500)
    same = ours.token == theirs.token
    np.testing.assert_array_equal(ours.rank[same], theirs.rank[same])
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    np.testing.assert_allclose(ours.logprob[same], theirs.logprob[same], rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, rtol=2e-6, atol=2e-6)


def test_a_row_gives_the_same_bits_alone_and_in_any_batch(kernel: Kernel) -> None:
    rng = np.random.default_rng(5)
    rows, vocab = 40, 2000
    logits = random_logits(rng, rows, vocab)
    together = random_arrays(rng, rows, vocab)
    singles = copied(together)
    kernel.sample(logits, rows, *together)
    for row in rng.permutation(rows):
        one = slice(row, row + 1)
        fields = {name: getattr(singles, name) for name in SampleArrays._fields}
        shared = {"penalty_ids", "output_counts", "mask_ids", "bias_ids", "bias_values", "bitmasks"}
        alone = {
            name: x if name in shared else x[row : row + 2 if name.endswith("offsets") else row + 1].copy()
            for name, x in fields.items()
        }
        a = SampleArrays(**alone)
        kernel.sample(logits[one], 1, *a)
        for name in ("token", "logprob", "rank", "top_ids", "top_logprobs"):
            assert getattr(a, name).tobytes() == getattr(together, name)[one].tobytes(), name


def test_greedy_takes_the_lowest_id_of_the_best_wherever_they_lie(kernel: Kernel) -> None:
    vocab = 49152 - 3
    rng = np.random.default_rng(1)
    rows = 40
    logits = rng.normal(size=(rows, vocab)).astype(np.float32)
    first = rng.integers(0, vocab, rows)
    first[:4] = [0, vocab - 1, 511, 512]
    for row, lowest in enumerate(first):
        later = rng.integers(lowest, vocab, 3)
        logits[row, [lowest, *later]] = 50
    a = greedy_arrays(rows)
    kernel.sample(logits, rows, *a)
    assert a.token.tolist() == first.tolist()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_rows_yield_a_token_that_is_not_masked(kernel: Kernel, temperature: float) -> None:
    logits = np.full((5, 600), np.nan, np.float32)
    logits[1] = -np.inf
    logits[2, 599] = -1e30
    logits[3] = np.inf
    a = greedy_arrays(5)
    a.temperature[:] = temperature
    a.num_logprobs[:] = 2
    a = a._replace(mask_offsets=np.array([0, 3, 3, 3, 3, 3], np.int32), mask_ids=np.array([1, 0, 3], np.int32))
    kernel.sample(logits, 5, *a)
    assert a.token[:3].tolist() == [2, 0, 599]
    assert temperature > 0 or a.token[3] == 0
    assert a.top_ids.tolist()[4][:2] == [0, 1]
    assert a.logprob.tolist()[2:4] == [0.0, pytest.approx(-np.log(600))]
    assert (a.logprob[[0, 1, 4]] == -np.inf).all()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bitmask_is_left_only_if_it_is_empty(kernel: Kernel, temperature: float) -> None:
    vocab = 100
    logits = np.zeros((5, vocab), np.float32)
    logits[1:, 40:] = -np.inf
    a = greedy_arrays(5)
    a.temperature[:] = temperature
    a.bitmask_row[:] = [0, 0, 0, 1, -1]
    bitmasks = np.zeros((2, 4), np.uint32)
    bitmasks[0, 2] = 1 << 6 | 1 << 9  # ids 70 and 73
    a = a._replace(
        bitmasks=bitmasks,
        mask_offsets=np.array([0, 1, 2, 4, 4, 4], np.int32),
        mask_ids=np.array([70, 70, 70, 73], np.int32),
    )
    kernel.sample(logits, 5, *a)
    assert a.token[:4].tolist() == [73, 73, 70, 0]
    assert a.token[4] < 40


def test_logprobs_of_the_whole_vocabulary_come_in_order(kernel: Kernel) -> None:
    vocab = 3001
    logits = random_logits(np.random.default_rng(9), 4, vocab)
    ours, theirs = greedy_arrays(4, vocab), greedy_arrays(4, vocab)
    for a in (ours, theirs):
        a.num_logprobs[:] = vocab
    kernel.sample(logits, 4, *ours)
    sample(logits, 4, *theirs)
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("vocab", [1, 20, 513, 3000])
def test_scores_of_given_tokens_are_the_specified_ones(kernel: Kernel, vocab: int) -> None:
    rng = np.random.default_rng(vocab)
    rows = 300
    logits = random_logits(rng, rows, vocab)

    def arrays() -> ScoreArrays:
        f32, i32 = np.float32, np.int32
        return ScoreArrays(
            num_logprobs=wanted,
            token=tokens,
            logprob=np.full(rows, np.nan, f32),
            rank=np.full(rows, -7, i32),
            top_ids=np.full((rows, 30), -7, i32),
            top_logprobs=np.full((rows, 30), np.nan, f32),
        )

    wanted = rng.integers(0, 31, rows, dtype=np.int32)
    tokens = rng.integers(0, vocab, rows, dtype=np.int32)
    ours, theirs = arrays(), arrays()
    score(logits, rows, *theirs)
    kernel.score(logits, rows, *ours)
    np.testing.assert_array_equal(ours.rank, theirs.rank)
    np.testing.assert_array_equal(ours.top_ids, theirs.top_ids)
    np.testing.assert_allclose(ours.logprob, theirs.logprob, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(ours.top_logprobs, theirs.top_logprobs, rtol=2e-6, atol=2e-6)


CHI_SQUARE_CASES: dict[str, dict[str, float]] = {
    "plain": {},
    "warm": {"temperature": 1.7},
    "top_k": {"top_k": 9},
    "top_p": {"top_p": 0.8},
    "top_k_and_top_p": {"top_k": 20, "top_p": 0.7},
    "min_p": {"min_p": 0.1},
}


@pytest.mark.parametrize("case", CHI_SQUARE_CASES)
def test_draws_follow_the_specified_distribution(kernel: Kernel, case: str) -> None:
    draws, vocab = 20_000, 40
    logits = np.random.default_rng(3).normal(size=vocab).astype(np.float32) * 1.5
    a = greedy_arrays(draws)
    a.temperature[:] = 1
    for name, value in CHI_SQUARE_CASES[case].items():
        getattr(a, name).fill(value)
    a.seed[:] = 11
    a.position[:] = np.arange(draws)  # one request's successive tokens
    kernel.sample(np.tile(logits, (draws, 1)), draws, *a)
    expected = survivors(logits, a, 0)
    counts = np.bincount(a.token, minlength=vocab)
    assert counts.sum() == counts[expected.ids].sum()
    want = expected.weights / expected.weights.sum() * draws
    common = want >= 5
    chi_square = (((counts[expected.ids] - want) ** 2 / want)[common]).sum()
    freedom = common.sum() - 1
    assert chi_square < freedom + 4 * np.sqrt(2 * freedom) + 4


def test_top_k_and_top_p_keep_exactly_what_is_specified_when_all_logits_are_equal(kernel: Kernel) -> None:
    draws, vocab = 3000, 5000
    a = greedy_arrays(draws)
    a.temperature[:] = 1
    a.top_k[: draws // 2] = 13
    a.top_p[draws // 2 :] = 12.5 / vocab
    kernel.sample(np.ones((draws, vocab), np.float32), draws, *a)
    for half in (slice(0, draws // 2), slice(draws // 2, draws)):
        assert sorted(set(a.token[half].tolist())) == list(range(13))
