"""Paged attention against the reference, and its promise: the same bits for every way of cutting the work."""

from __future__ import annotations

import math

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.core.records import KVGroup
from octavo.graph.builder import GraphBuilder
from octavo.graph.reference import ReferenceBatch
from octavo.graph.schema import Add, Attention, Linear, RopeTable
from octavo.quantization.formats import WeightType
from tests.backends.harness import ISAS, MAX_TOKENS, Bench, Native, Pair, stored

pytestmark = pytest.mark.parametrize("isa", ISAS)
TOLERANCE = {"float32": 3e-6, "float16": 2e-3, "bfloat16": 1.5e-2}
VOCAB = 64


def attention_pair(
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    rope: bool = True,
    seed: int = 0,
    windows: tuple[int, int] = (0, 0),
    softcap: float = 0.0,
    groups: int = 1,
) -> Pair:
    """q, k and v are random rows chosen by token id; two layers write to the cache, their sum is the output.

    windows: of each layer. groups: 1, or 2 so that each layer has a KV group of its own.
    """
    rng = np.random.default_rng(seed)
    bench, g = Bench(), GraphBuilder()
    bench.g = g
    table = g(RopeTable(tuple(100.0 ** (-i / 8) for i in range(8)))) if rope else None
    outs = []
    for layer in range(2):
        q, k, v = (
            bench.rows(f"{name}{layer}", rng.normal(size=(VOCAB, n * head_dim)))
            for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        op = Attention(
            q, k, v, rope=table, rope_interleaved=bool(seed % 2), group=layer % groups, layer=layer // groups,
            num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim, scale=1 / math.sqrt(head_dim),
            window=windows[layer], softcap=softcap,
        )  # fmt: skip
        outs.append(g(op))
    kinds = [KVGroup(str(i), 2 // groups, kv_heads, head_dim) for i in range(groups)]
    return bench.build(g(Add(*outs)), tuple(kinds))


class Tables:
    """Block tables over a shuffled pool."""

    def __init__(self, sequences: int, tokens: int, block_size: int, seed: int = 0) -> None:
        width = -(-tokens // block_size)
        self.num_blocks = sequences * width
        ids = np.random.default_rng(seed).permutation(self.num_blocks).astype(np.int32)
        self.rows = np.ascontiguousarray(ids.reshape(sequences, width))


def run_chunks(native: Native, tables: Tables, tokens: np.ndarray, chunks: list[int]) -> np.ndarray:
    """One sequence computed in the given chunks."""
    out, at = [], 0
    for count in chunks:
        out.append(native.step(tokens[at : at + count], [count], [at], tables.rows))
        at += count
    assert at == len(tokens)
    return np.concatenate(out)


@pytest.mark.parametrize("kv_dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(4, 4, 32, 8), (9, 3, 64, 16), (2, 1, 40, 32), (6, 2, 80, 16), (5, 1, 96, 64), (8, 2, 128, 128), (1, 1, 256, 256)],
)
def test_ragged_steps_match_the_reference(
    isa: str, heads: int, kv_heads: int, head_dim: int, block_size: int, kv_dtype: str
) -> None:
    pair = attention_pair(heads, kv_heads, head_dim, seed=head_dim)
    rng = np.random.default_rng(head_dim)
    lengths = [1, 530, 90, 17, 256]
    tables = Tables(len(lengths), max(lengths), block_size)
    native = pair.native(isa, num_blocks=tables.num_blocks, block_size=block_size, kv_dtype=kv_dtype)
    compare(pair, native, tables, lengths, TOLERANCE[kv_dtype], rng)


def compare(
    pair: Pair, native: Native, tables: Tables, lengths: list[int], tolerance: float, rng: np.random.Generator
) -> None:
    """Random ragged steps until every sequence has its length."""
    reference, done = pair.reference(), [0] * len(lengths)
    while any(d < n for d, n in zip(done, lengths, strict=True)):
        chosen, counts, budget = [], [], MAX_TOKENS
        for s in rng.permutation(len(lengths)):
            count = min(int(rng.choice([1, 2, 7, 40])), lengths[s] - done[s], budget)
            if count:
                chosen.append(int(s))
                counts.append(count)
                budget -= count
        ids = rng.integers(0, VOCAB, sum(counts))
        got = native.step(ids, counts, [done[s] for s in chosen], tables.rows[chosen])
        batch = ReferenceBatch(ids, tuple((str(s), c) for s, c in zip(chosen, counts, strict=True)), ())
        want = reference.run(batch)[pair.graph.outputs["out"].id]
        assert np.abs(got - want).max() < tolerance * np.abs(want).max()
        for s, c in zip(chosen, counts, strict=True):
            done[s] += c


@pytest.mark.parametrize("head_dim", [32, 40])
def test_attention_feeds_an_int8_product_even_if_blocks_of_32_span_heads(isa: str, head_dim: int) -> None:
    bench, rng = Bench(), np.random.default_rng(head_dim)
    q, k, v = (bench.rows(name, rng.normal(size=(VOCAB, 4 * head_dim))) for name in "qkv")
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": head_dim, "scale": 0.2}
    x = bench.g(Attention(q, k, v, rope=None, rope_interleaved=False, group=0, layer=0, **heads))
    w = bench.weight("w", rng.normal(size=(48, 4 * head_dim)), WeightType.Q8_0)
    pair = bench.build(bench.g(Linear(x, (w,), (None,))), (KVGroup("full", 1, 4, head_dim),))
    native = pair.native(isa, float_activations=False, num_blocks=4)
    got = native.step(np.arange(40), [40], [0], np.arange(4, dtype=np.int32).reshape(1, 4))
    want = pair.expected(40)
    assert np.abs(got - want).max() < 0.01 * np.abs(want).max()


@pytest.mark.parametrize("kv_dtype", list(TOLERANCE))
def test_bits_do_not_depend_on_chunks_threads_blocks_or_company(isa: str, kv_dtype: str) -> None:
    pair = attention_pair(6, 2, 48, seed=1)
    length = 2 * _native.PARTITION + 70
    rng = np.random.default_rng(7)
    tokens = rng.integers(0, VOCAB, length)
    plain = Tables(1, length, 16)
    native = pair.native(isa, num_blocks=plain.num_blocks, kv_dtype=kv_dtype)
    want = run_chunks(native, plain, tokens, [MAX_TOKENS] * (length // MAX_TOKENS) + [length % MAX_TOKENS])
    for threads, block_size, seed in ((1, 8, 1), (3, 64, 2), (2, 256, 3)):
        tables = Tables(2, length, block_size, seed)
        native = pair.native(
            isa, threads=threads, num_blocks=tables.num_blocks, block_size=block_size, kv_dtype=kv_dtype
        )
        at, other = 0, 0
        while at < length:
            count = min(int(rng.choice([1, 1, 3, 31])), length - at)
            company = int(rng.integers(0, 32))
            ids = np.concatenate([rng.integers(0, VOCAB, company), tokens[at : at + count]])
            if company and other + company <= length:
                got = native.step(ids, [company, count], [other, at], tables.rows)[company:]
                other += company
            else:
                got = native.step(ids[company:], [count], [at], tables.rows[1:])
            assert np.array_equal(got, want[at : at + count]), f"position {at}"
            at += count


@pytest.mark.parametrize("kv_dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("windows", "softcap", "block_size"),
    [((1, 0), 0.0, 8), ((7, 100), 0.0, 16), ((255, 256), 2.0, 32), ((257, 300), 0.0, 64), ((0, 0), 3.0, 16)],
)
def test_windows_and_softcaps_match_the_reference(
    isa: str, windows: tuple[int, int], softcap: float, block_size: int, kv_dtype: str
) -> None:
    pair = attention_pair(4, 2, 40, windows=windows, softcap=softcap, seed=3)
    lengths = [1, 530, 90, 260]
    tables = Tables(len(lengths), max(lengths), block_size)
    native = pair.native(isa, num_blocks=tables.num_blocks, block_size=block_size, kv_dtype=kv_dtype)
    compare(pair, native, tables, lengths, TOLERANCE[kv_dtype], np.random.default_rng(block_size))


def forget(tables: np.ndarray, first: int, window: int, block_size: int) -> np.ndarray:
    """The table of a sequence whose blocks outside of the window are gone; what stands there is some block's id."""
    out = tables.copy()
    out[:, : max(0, first - window + 1) // block_size] = 0
    return out


@pytest.mark.parametrize("kv_dtype", list(TOLERANCE))
@pytest.mark.parametrize("window", [5, 100, 256, 391])
def test_a_window_costs_no_bits_and_reads_nothing_outside(isa: str, kv_dtype: str, window: int) -> None:
    """Block 0 is NaN for ever: it stands for all blocks that were given away. Any chunking, threads and block size."""
    pair = attention_pair(6, 2, 48, seed=1, windows=(window, window), softcap=4.0 if window == 100 else 0.0)
    length = 2 * _native.PARTITION + 170
    rng = np.random.default_rng(window)
    tokens = rng.integers(0, VOCAB, length)
    runs = []
    for threads, block_size, most in ((2, 16, MAX_TOKENS), (1, 8, 1), (3, 64, 31), (2, 256, 9)):
        tables = Tables(1, length, block_size, seed=most).rows + 1
        native = pair.native(isa, threads=threads, num_blocks=tables.size + 1, block_size=block_size, kv_dtype=kv_dtype)
        out, at = [], 0
        while at < length:
            count = min(most, length - at) if most in (1, MAX_TOKENS) else min(int(rng.integers(1, most)), length - at)
            out.append(native.step(tokens[at : at + count], [count], [at], forget(tables, at, window, block_size)))
            at += count
        runs.append(np.concatenate(out))
    assert np.isfinite(runs[0]).all()
    for run in runs[1:]:
        assert run.tobytes() == runs[0].tobytes()


def test_a_window_wider_than_the_context_changes_no_bit(isa: str) -> None:
    length = 300
    tokens = np.random.default_rng(0).integers(0, VOCAB, length)
    tables = Tables(1, length, 16)
    runs = [
        run_chunks(
            attention_pair(4, 2, 32, windows=(window, window)).native(isa, num_blocks=tables.num_blocks),
            tables, tokens, [64] * 4 + [1] * 44,
        )
        for window in (0, length, 10**6)
    ]  # fmt: skip
    assert runs[0].tobytes() == runs[1].tobytes() == runs[2].tobytes()


def test_groups_take_their_blocks_from_one_memory(isa: str) -> None:
    """Two groups of one layer each, with tables of their own over one pool, give the bits of one of two layers."""
    length = 90
    tokens = np.random.default_rng(0).integers(0, VOCAB, length)
    one, two = (attention_pair(4, 2, 32, windows=(0, 20), groups=n) for n in (1, 2))
    tables = Tables(2, length, 16)
    alone = Tables(1, length, 16)
    want = run_chunks(one.native(isa, num_blocks=alone.num_blocks), alone, tokens, [40, 1, 49])
    native = two.native(isa, num_blocks=tables.num_blocks)
    at, out = 0, []
    for count in (30, 1, 59):
        out.append(
            native.step(tokens[at : at + count], [count], [at], [tables.rows[:1].copy(), tables.rows[1:].copy()])
        )
        at += count
    assert np.concatenate(out).tobytes() == want.tobytes()
    assert 2 * two.native(isa).model.block_bytes(16, "float32") == one.native(isa).model.block_bytes(16, "float32")


def test_a_copied_block_holds_the_same_context(isa: str) -> None:
    pair = attention_pair(4, 2, 64)
    tokens = np.random.default_rng(3).integers(0, VOCAB, 41)
    tables = Tables(1, 48, 16)
    native = pair.native(isa, num_blocks=8)
    native.step(tokens[:40], [40], [0], tables.rows)
    want = native.step(tokens[40:], [1], [40], tables.rows)
    copy = np.array([[5, 6, 7]], np.int32)
    native.program.copy_blocks(tables.rows[0], copy[0])
    native.step(tokens[:1] * 0, [1], [30], tables.rows)  # overwrites the original's position 30
    assert np.array_equal(native.step(tokens[40:], [1], [40], copy), want)


def test_many_long_sequences_overflow_the_partial_slots_without_a_change_of_bits(isa: str) -> None:
    """With more partitions than workspace slots the rest is computed unsplit."""
    pair = attention_pair(2, 1, 32)
    length = 60 * _native.PARTITION + 1
    tables = Tables(1, length, 256)
    native = pair.native(isa, num_blocks=tables.num_blocks, block_size=256)
    tokens = np.random.default_rng(5).integers(0, VOCAB, length)
    for at in range(0, length - 1, MAX_TOKENS):
        native.step(tokens[at : at + MAX_TOKENS], [MAX_TOKENS], [at], tables.rows)
    many = 12  # 12 * 61 partitions > 512 slots; all share one table and write the same last token
    got = native.step(
        np.repeat(tokens[-1:], many), [1] * many, [length - 1] * many, np.repeat(tables.rows, many, axis=0)
    )
    assert (got == got[0]).all()


@pytest.mark.parametrize("kv_dtype", list(TOLERANCE))
@pytest.mark.parametrize("bad", [np.nan, -np.inf, 1e6])  # 1e6 is beyond float16
def test_a_row_never_feels_a_later_one_not_even_if_that_is_not_finite(isa: str, kv_dtype: str, bad: float) -> None:
    pair = attention_pair(4, 2, 32)
    for name, tensor in pair.tensors.items():
        values = tensor.values()
        values[VOCAB - 1] = bad
        pair.tensors[name] = stored(values)
    tokens = np.arange(40)
    tokens[21] = VOCAB - 1
    tables = Tables(1, 48, 16)
    runs = [
        run_chunks(pair.native(isa, num_blocks=3, kv_dtype=kv_dtype), tables, tokens, chunks)
        for chunks in ([40], [1] * 40, [13, 8, 19])
    ]
    assert np.isfinite(runs[0][:21]).all()
    assert runs[0].tobytes() == runs[1].tobytes() == runs[2].tobytes()


def test_a_copy_outside_the_pool_is_refused(isa: str) -> None:
    native = attention_pair(1, 1, 32).native(isa, num_blocks=4)
    one, nine = np.array([1], np.int32), np.array([9], np.int32)
    for source, destination in ((one, nine), (nine, one), (one, -one)):
        with pytest.raises(ValueError, match="out of the pool"):
            native.program.copy_blocks(source, destination)


@pytest.mark.parametrize(
    ("problem", "counts", "first", "table"),
    [
        ("first rows", [5, -1], [0, 0], [[0, 1], [2, 3]]),
        ("first rows", [4, 0], [0, 0], [[0, 1], [2, 3]]),
        ("first position", [4], [-1], [[0, 1]]),
        ("first position", [4], [2**31 - 1], [[0, 1]]),
        ("block table too short", [4], [30], [[0, 1]]),
        ("block outside the pool", [4], [13], [[0, 4]]),
        ("block outside the pool", [4], [13], [[-1, 1]]),
    ],
)
def test_a_batch_that_points_outside_of_memory_is_refused(
    isa: str, problem: str, counts: list[int], first: list[int], table: list[list[int]]
) -> None:
    native = attention_pair(1, 1, 32).native(isa, num_blocks=4)
    with pytest.raises(ValueError, match=problem):
        native.step(np.zeros(4), counts, first, np.array(table, np.int32))
    assert np.isfinite(native.step(np.zeros(4), [4], [0], np.array([[3]], np.int32))).all()


@pytest.mark.parametrize("windows", [(0, 4), (4, 0), (40, 4), (4, 40)])
def test_blocks_that_the_widest_window_of_a_group_sees_must_be_there(isa: str, windows: tuple[int, int]) -> None:
    table = np.array([[-1, 1, 2]], np.int32)
    native = attention_pair(1, 1, 32, windows=windows).native(isa, num_blocks=4)
    with pytest.raises(ValueError, match="block outside the pool"):
        native.step(np.zeros(2), [2], [45], table)
    native = attention_pair(1, 1, 32, windows=(4, 4)).native(isa, num_blocks=4)
    native.step(np.zeros(2), [2], [45], table)
