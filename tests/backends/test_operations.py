"""Each operation against the float64 reference: every instruction set, odd widths, masked tails, NaN in old memory."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import numpy as np
import pytest

from octavo.backends.cpu import _native
from octavo.backends.cpu.backend import create_executor
from octavo.backends.cpu.lowering import NATURAL_STORAGE, Storage
from octavo.core.errors import ConfigError
from octavo.graph.reference import activate
from octavo.graph.schema import (
    Activate,
    Activation,
    Add,
    AddRmsNorm,
    Cast,
    Embed,
    GatedActivation,
    GatedLinear,
    GateRows,
    LayerNorm,
    Linear,
    Op,
    PositionEmbed,
    RmsNorm,
    Rope,
    RopeTable,
    Scale,
    SelectRows,
    Softcap,
    Tensor,
)
from octavo.quantization.formats import FORMATS, WeightType, row_bytes
from tests.backends.harness import ALL_TYPES, ISAS, QUANTIZED, Bench, Pair, relative_error, stored

pytestmark = pytest.mark.parametrize("isa", ISAS)
WIDTHS = (1, 7, 16, 33, 64, 95, 160)
ROWS = (1, 2, 3, 4, 5, 6, 7, 13, 31)
ROUNDING_TYPES = [kind for kind in ALL_TYPES if NATURAL_STORAGE[kind] != Storage.FLOAT32]


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def widths_of(kind: WeightType) -> tuple[int, ...]:
    block = FORMATS[kind].block_length
    return WIDTHS if block == 1 else (block, 5 * block, 352 // block * block) if block == 32 else (block, 3 * block)


def check(pair: Pair, isa: str, rows: int, tolerance: float = 2e-6, selected: tuple[int, ...] = ()) -> None:
    assert relative_error(pair.native(isa).rows(rows, selected), pair.expected(rows, selected)) < tolerance


def test_the_forced_instruction_set_is_the_one_that_ran(isa: str) -> None:
    """Fused multiply-add sets the portable path apart, bfloat16 dot products the best one; the others round alike."""
    assert create_executor(isa, 1).isa == isa
    bits = dict.fromkeys(ISAS, b"")
    for kind in (WeightType.F32, WeightType.BF16):
        bench = Bench()
        x = bench.rows("x", normal(8, 160))
        pair = bench.build(bench.g(Linear(x, (bench.weight("w", normal(48, 160), kind),), (None,))))
        for name in ISAS:
            bits[name] += pair.native(name, float_activations=False).rows(8).tobytes()
    rounding = {name: "fused" if name in ("avx2", "avx512", "avx512_vnni") else name for name in ISAS}
    ways = {(rounding[name], bits[name]) for name in ISAS}
    assert len(ways) == len(set(rounding.values())) == len(set(bits.values()))


def test_an_unknown_instruction_set_is_refused_with_those_there_are(isa: str) -> None:
    with pytest.raises(ConfigError, match=f"'avx9' is not available here; available: .*{isa}"):
        create_executor("avx9", 1)


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_embed_reads_rows_of_every_weight_type(isa: str, kind: WeightType) -> None:
    bench = Bench()
    table = bench.weight("table", normal(37, widths_of(kind)[-1]), kind)
    pair = bench.build(bench.g(Embed(table)))
    got = pair.native(isa).rows(37)
    assert np.array_equal(got, bench.tensors["table"].values().astype(np.float32))


@pytest.mark.parametrize("width", WIDTHS)
def test_rms_norm(isa: str, width: int) -> None:
    bench = Bench()
    x = bench.rows("x", normal(9, width) * 3)
    check(bench.build(bench.g(RmsNorm(x, bench.weight("w", normal(width)), 1e-5))), isa, 9)


@pytest.mark.parametrize("own_weights", [False, True])
@pytest.mark.parametrize(("groups", "width"), [(1, 40), (3, 33), (4, 64), (5, 80), (7, 7)])
def test_norms_of_heads_with_one_weight_or_one_each(isa: str, groups: int, width: int, own_weights: bool) -> None:
    n = width if own_weights else width // groups
    for bias in (None, normal(n, seed=2)):
        bench = Bench()
        x, w = bench.rows("x", normal(9, width) * 3), bench.weight("w", normal(n))
        check(bench.build(bench.g(RmsNorm(x, w, 1e-5, groups))), isa, 9)
        b = None if bias is None else bench.weight("b", bias)
        check(bench.build(bench.g(LayerNorm(x, w, b, 1e-5, groups))), isa, 9)


@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm_of_rows_far_from_zero(isa: str, width: int) -> None:
    bench = Bench()
    x = bench.rows("x", normal(9, width) * 0.5 + 20)
    op = LayerNorm(x, bench.weight("w", normal(width)), bench.weight("b", normal(width, seed=1)), 1e-5)
    check(bench.build(bench.g(op)), isa, 9, tolerance=2e-5 if width > 1 else 1)


@pytest.mark.parametrize("width", WIDTHS)
def test_scale_softcap_and_gated_rows(isa: str, width: int) -> None:
    for make in (
        lambda x, gate: Scale(x, -0.37),
        lambda x, gate: Scale(x, 3),
        lambda x, gate: Softcap(x, 30.0),
        lambda x, gate: GateRows(x, gate),
    ):
        bench = Bench()
        x, gate = bench.rows("x", normal(9, width) * 40), bench.rows("gate", normal(9, 1, seed=1) * 5)
        check(bench.build(bench.g(make(x, gate))), isa, 9)


def test_softcap_keeps_small_values_exact_and_large_ones_within_the_cap(isa: str) -> None:
    x = np.concatenate([np.geomspace(1e-12, 1e6, 3000), [np.inf]])
    x = np.concatenate([-x, x])[None]
    bench = Bench()
    got = bench.build(bench.g(Softcap(bench.rows("x", x), 30.0))).native(isa).rows(1)
    want = 30 * np.tanh(x.astype(np.float32).astype(np.float64) / 30)
    assert (np.abs(got / want - 1)).max() < 4e-7
    assert np.abs(got).max() == 30


@pytest.mark.parametrize("activation", list(Activation))
def test_activations_are_good_to_a_millionth_everywhere(isa: str, activation: Activation) -> None:
    x = np.concatenate([np.linspace(-15, 15, 30_001), normal(2000) * 1e-4, [-1e4, 1e4, -88.0, 88.0, 0]])[None]
    bench = Bench()
    tensor = bench.rows("x", x)
    want = activate(activation, x.astype(np.float32).astype(np.float64).clip(-700))
    for op in (Activate(tensor, activation), GatedActivation(tensor, bench.rows("one", np.ones(x.shape)), activation)):
        got = bench.build(bench.g(op)).native(isa).rows(1)
        assert (np.abs(got - want) / np.maximum(np.abs(x), 1)).max() < 3e-7
        assert np.abs(got - want)[np.abs(x) < 4].max() < 1e-6


def test_logits_wider_than_scratch_memory_are_scaled_and_capped(isa: str) -> None:
    """A vocabulary of 150,000; and the product before them keeps its 16-bit activations."""
    width, rng = 150_000, np.random.default_rng(0)
    bench = Bench()
    x = bench.g(SelectRows(bench.rows("x", normal(6, 32))))
    w = bench.weight("w", rng.integers(-127, 128, size=(width, 32)) / 127, WeightType.Q8_0)
    pair = bench.build(bench.g(Softcap(bench.g(Scale(bench.g(Linear(x, (w,), (None,))), 0.5)), 5.0)))
    native = pair.native(isa, threads=3, float_activations=False)
    got, want = native.rows(6, (0, 2, 5)), pair.expected(6, (0, 2, 5))
    assert got.shape == (3, width)
    assert relative_error(got, want) < 1e-4
    assert np.array_equal(native.rows(6, (5,))[0], got[2])


@pytest.mark.parametrize("kind", [WeightType.F32, WeightType.F16, WeightType.Q8_0])
def test_position_embeddings_are_those_of_each_sequence(isa: str, kind: WeightType) -> None:
    bench = Bench()
    bench.rows("vocabulary", normal(4, 32))
    native = bench.build(bench.g(PositionEmbed(bench.weight("p", normal(50, 32), kind)))).native(isa)
    got = native.step(np.zeros(9), [1, 5, 3], [49, 0, 17], np.zeros((3, 4), np.int32))
    table = bench.tensors["p"].values()
    assert np.array_equal(got, table[[49, 0, 1, 2, 3, 4, 17, 18, 19]])
    with pytest.raises(ValueError, match="position beyond the learned embeddings"):
        native.step(np.zeros(2), [2], [49], np.zeros((1, 4), np.int32))


@pytest.mark.parametrize("kind", [WeightType.Q4_0, WeightType.BF16])
def test_every_row_operation_can_feed_a_product(isa: str, kind: WeightType) -> None:
    """It writes the storage that the product wants, the bits of a Cast from float32."""

    def operations(bench: Bench, x: Tensor) -> list[Op]:
        gate, w = bench.rows("gate", normal(13, 1)), bench.weight("n", normal(64))
        return [
            RmsNorm(x, w, 1e-5), RmsNorm(x, bench.weight("h", normal(16)), 1e-5, 4), LayerNorm(x, w, w, 1e-5),
            Scale(x, 2.5), Softcap(x, 2.0), Activate(x, Activation.GELU), GateRows(x, gate), Add(x, x),
            GatedActivation(x, x, Activation.GELU_TANH), SelectRows(x),
            PositionEmbed(bench.weight("p", normal(64, 64))),
        ]  # fmt: skip

    for i in range(11):
        results = []
        for cast in (False, True):
            bench = Bench()
            y = bench.g(operations(bench, bench.rows("x", normal(13, 64)))[i])
            out = bench.g(Linear(y, (bench.weight("w", normal(48, 64, seed=5), kind),), (None,)))
            if cast:
                zeros = bench.g(Linear(y, (bench.weight("z", np.zeros((48, 64))),), (None,)))  # wants float32
                out = bench.g(Add(out, zeros))
            else:
                out = bench.g(Scale(out, 1.0))
            out = bench.g(Activate(out, Activation.RELU))  # no graph output itself: 8 bits
            native = bench.build(out).native(isa, float_activations=False)
            assert any(isinstance(node.op, Cast) for node in native.model.lowered.graph.nodes) == cast
            results.append(native.rows(13, tuple(range(13))))
        assert np.array_equal(*results)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_rms_norm_gives_the_sum_and_its_norm(isa: str, width: int) -> None:
    for which in (0, 1):
        bench = Bench()
        x, y = bench.rows("x", normal(9, width)), bench.rows("y", normal(9, width, seed=1))
        outputs = bench.g.outputs_of(AddRmsNorm(x, y, bench.weight("w", normal(width)), 1e-6))
        check(bench.build(outputs[which]), isa, 9)


@pytest.mark.parametrize("width", WIDTHS)
def test_add_and_gated_activation(isa: str, width: int) -> None:
    for make in (Add, lambda a, b: GatedActivation(a, b, Activation.SILU)):
        bench = Bench()
        x, y = bench.rows("x", normal(9, width) * 10), bench.rows("y", normal(9, width, seed=1))
        check(bench.build(bench.g(make(x, y))), isa, 9)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("head_dim", "pairs"), [(32, 16), (64, 16), (80, 20), (10, 3)])
def test_rope_rotates_whole_and_partial_heads(isa: str, interleaved: bool, head_dim: int, pairs: int) -> None:
    bench = Bench()
    x = bench.rows("x", normal(40, 3 * head_dim))
    table = bench.g(RopeTable(tuple(10000.0 ** (-i / pairs) for i in range(pairs)), magnitude=1.25))
    check(bench.build(bench.g(Rope(x, table, head_dim, interleaved))), isa, 40)


def test_rope_table_is_exact_far_out(isa: str) -> None:
    bench = Bench()
    bench.rows("x", normal(8, 16))
    native = bench.build(bench.g(RopeTable((1.0, 0.37)))).native(isa)
    got = native.step(np.zeros(3), [3], [100_000], np.zeros((1, 6251), np.int32))
    angles = (100_000 + np.arange(3))[:, None] * np.array([1.0, 0.37])
    assert relative_error(got, np.concatenate([np.cos(angles), np.sin(angles)], axis=1)) < 1e-7


def test_select_rows_takes_the_named_rows_in_order(isa: str) -> None:
    bench = Bench()
    pair = bench.build(bench.g(SelectRows(bench.rows("x", normal(20, 33)))))
    check(pair, isa, 20, selected=(3, 19, 4))


@pytest.mark.parametrize("kind", [WeightType.F32, WeightType.Q8_0])
def test_rows_that_are_selected_later_give_the_same_bits(isa: str, kind: WeightType) -> None:
    bench = Bench()
    x = bench.rows("x", normal(20, 64))
    for i in range(3):  # intermediates that want the place of what rows are selected from
        weight = bench.weight(f"w{i}", normal(64, 64) / 8, kind)
        x = bench.g(Add(x, bench.g(Linear(x, (weight,), (None,)))))
    x = bench.g(RmsNorm(bench.g(SelectRows(x)), bench.weight("n", normal(64)), 1e-5))
    pair = bench.build(bench.g(Linear(x, (bench.weight("head", normal(500, 64), kind),), (None,))))
    native = pair.native(isa, float_activations=False)
    want = native.rows(20, selected=tuple(range(20)))
    native.rows(20, selected=(4,))
    for rows in ((19, 0, 7, 7), (3,), tuple(range(20)), ()):
        native.program.native.select(np.array(rows, np.int32))
        np.testing.assert_array_equal(native.program.read("out"), want[list(rows)])
    for wrong in ((20,), (-1,), (0,) * 65):
        with pytest.raises(ValueError, match="selected row"):
            native.program.native.select(np.array(wrong, np.int32))


@pytest.mark.parametrize("kind", ALL_TYPES)
@pytest.mark.parametrize("out_features", [1, 16, 50, 96])
def test_linear_with_float_activations(isa: str, kind: WeightType, out_features: int) -> None:
    for width in widths_of(kind):
        bench = Bench()
        values = normal(31, width)
        x = bench.rows("x", values)
        w, bias = bench.weight("w", normal(out_features, width), kind), bench.weight("b", normal(out_features))
        pair = bench.build(bench.g(Linear(x, (w,), (bias,))))
        native = pair.native(isa)
        for rows in ROWS:
            magnitude = np.abs(values[:rows]) @ np.abs(bench.tensors["w"].values().T) + 1
            assert (np.abs(native.rows(rows) - pair.expected(rows)) / magnitude).max() < 5e-7


def rounded_to_int8(x: np.ndarray, twice: bool) -> np.ndarray:
    """What an int8 storage keeps of rows: a code a value, in blocks of 32; twice: and a code of what that left."""
    blocks = x.astype(np.float32).reshape(len(x), -1, 32)
    top = np.abs(blocks).max(axis=2, keepdims=True)
    y = blocks * np.divide(np.float32(127), top, out=np.zeros_like(top), where=top > 0)
    codes = np.rint(y).astype(np.float64)
    fine = np.rint((y - codes.astype(np.float32)) * 254) / 254 if twice else 0
    return ((top / np.float32(127)).astype(np.float64) * (codes + fine)).reshape(x.shape)


@pytest.mark.parametrize("as_logits", [False, True])
@pytest.mark.parametrize("kind", ROUNDING_TYPES)
def test_linear_multiplies_exactly_what_the_activations_were_rounded_to(
    isa: str, kind: WeightType, as_logits: bool
) -> None:
    """Rounding of activations has a specification, in 8 bits or, before logits, 16; the product adds no error to it."""
    for width in widths_of(kind):
        bench = Bench()
        values = normal(31, width) * np.geomspace(1e-3, 1e3, 31)[:, None]
        values[5] = 0
        x = bench.rows("x", values)
        w, bias = bench.weight("w", normal(70, width), kind), bench.weight("b", normal(70))
        y = bench.g(Linear(x, (w,), (bias,)))
        pair = bench.build(y if as_logits else bench.g(Add(y, bench.rows("zero", np.zeros((31, 70))))))
        native = pair.native(isa, float_activations=False)
        if kind in QUANTIZED:
            rounded = rounded_to_int8(values, as_logits)
            assert np.abs(rounded - values).max() < np.abs(values).max() / 127 / (500 if as_logits else 1.99)
        else:
            rounded = stored(values, WeightType.BF16).values().astype(np.float64)
        want = rounded @ bench.tensors["w"].values().T + bench.tensors["b"].values()
        scale = np.abs(rounded) @ np.abs(bench.tensors["w"].values().T) + 1
        for rows in ROWS:
            got = native.rows(rows)
            assert (np.abs(got - want[:rows]) / scale[:rows]).max() < 2e-6
            if as_logits:
                kept = native.program.native.read(x.id)
                assert np.abs(kept - rounded[:rows]).max() < 1e-7 * np.abs(values).max()


@pytest.mark.parametrize("float_activations", [False, True])
@pytest.mark.parametrize("kind", ALL_TYPES)
def test_a_row_has_the_same_bits_whatever_the_number_of_rows_and_threads(
    isa: str, kind: WeightType, float_activations: bool
) -> None:
    bench = Bench()
    width, inner = {1: (160, 83), 32: (160, 96)}.get(FORMATS[kind].block_length, (256, 256))
    x = bench.rows("x", normal(40, width))
    gate, up = bench.weight("gate", normal(inner, width), kind), bench.weight("up", normal(inner, width, seed=1), kind)
    h = bench.g(GatedLinear(x, gate, up, Activation.SILU))
    y = bench.g(Linear(h, (bench.weight("down", normal(width, inner), kind),), (bench.weight("b", normal(width)),)))
    x = bench.g(RmsNorm(bench.g(Add(x, y)), bench.weight("n", normal(width)), 1e-5))
    pair = bench.build(bench.g(Linear(x, (bench.weight("head", normal(70, width), kind),), (None,))))
    whole = pair.native(isa, float_activations=float_activations).rows(40)
    for threads in (1, 3):
        native = pair.native(isa, threads=threads, float_activations=float_activations)
        for rows in (1, 5, 6, 13):
            for begin in range(0, 40, rows):
                part = native.step(np.arange(begin, min(begin + rows, 40)), [min(rows, 40 - begin)])
                assert np.array_equal(part, whole[begin : begin + rows])


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_gated_linear(isa: str, kind: WeightType) -> None:
    bench = Bench()
    width = 256 if FORMATS[kind].block_length > 32 else 160
    x = bench.rows("x", normal(31, width))
    gate, up = bench.weight("gate", normal(50, width), kind), bench.weight("up", normal(50, width, seed=1), kind)
    pair = bench.build(bench.g(GatedLinear(x, gate, up, Activation.SILU)))
    for rows in ROWS:
        assert relative_error(pair.native(isa).rows(rows), pair.expected(rows)) < 5e-6


def test_linears_of_several_types_share_their_input_by_casts(isa: str) -> None:
    """int8, bfloat16 and float32 readers of one tensor: each gets its own storage of it."""
    bench = Bench()
    x = bench.g(Add(bench.rows("x", normal(9, 256)), bench.rows("y", normal(9, 256, seed=1))))
    parts = [
        bench.g(Linear(x, (bench.weight(kind.name, normal(48, 256, seed=2), kind),), (None,))) for kind in ALL_TYPES
    ]
    total = x = parts[0]
    for part in parts[1:]:
        total = bench.g(Add(total, part))
    pair = bench.build(total)
    native = pair.native(isa, float_activations=False)
    assert sum(isinstance(node.op, Cast) for node in native.model.lowered.graph.nodes) == 2
    assert relative_error(native.rows(9), pair.expected(9)) < 0.02


def test_tiny_and_huge_values_survive_int8_activations(isa: str) -> None:
    bench = Bench()
    tiny = [normal(2, 64) * 1e-35, normal(2, 64) * 1e-37, np.full((1, 64), 1e-42)]
    x = bench.rows("x", np.concatenate([*tiny, normal(2, 64) * 1e30, np.zeros((1, 64))]))
    pair = bench.build(bench.g(Linear(x, (bench.weight("w", normal(16, 64), WeightType.Q8_0),), (None,))))
    got = pair.native(isa, float_activations=False).rows(8)
    want = pair.expected(8)
    for row in (0, 1, 5, 6):
        assert np.abs(got[row] - want[row]).max() < 0.05 * np.abs(want[row]).max()
    assert not got[[2, 3, 4, 7]].any(), "below 2^-119 a block counts as zeros"


def test_a_batch_that_does_not_fit_is_refused_and_the_next_step_works(isa: str) -> None:
    bench = Bench()
    pair = bench.build(bench.rows("x", normal(4, 16)))
    native = pair.native(isa)
    assert len(native.program.read("out")) == 0, "nothing was computed yet"
    for bad in (np.full(1, 4), np.full(1, -1), np.zeros(65), np.zeros(0)):
        with pytest.raises(ValueError, match=r"number of tokens|outside the vocabulary"):
            native.step(bad, [len(bad)])
    with pytest.raises(ValueError, match="selected row"):
        native.step(np.zeros(2), [2], selected=(2,))
    assert np.array_equal(native.rows(4), bench.tensors["x"].values().astype(np.float32))


def test_what_lies_in_the_place_of_its_addend_stays_float32(isa: str) -> None:
    """The sum of an AddRmsNorm whose only reader wants int8."""
    bench = Bench()
    x, y = bench.rows("x", normal(31, 64)), bench.rows("y", normal(31, 64, seed=1))
    total, normed = bench.g.outputs_of(AddRmsNorm(x, y, bench.weight("n", normal(64)), 1e-6))
    w = bench.weight("w", normal(64, 64), WeightType.Q8_0)
    pair = bench.build(bench.g(Add(normed, bench.g(Linear(total, (w,), (None,))))))
    assert relative_error(pair.native(isa, float_activations=False).rows(31), pair.expected(31)) < 0.02


def test_denormals_count_even_if_the_calling_thread_has_switched_them_off(isa: str) -> None:
    bench = Bench()
    x = bench.rows("x", np.full((4, 16), 1e-39))
    pair = bench.build(bench.g(Add(x, x)))
    native = pair.native(isa, threads=1)
    libm, before, flushing = ctypes.CDLL("libm.so.6"), (ctypes.c_uint32 * 8)(), (ctypes.c_uint32 * 8)()
    libm.fegetenv(before)
    flushing[:] = before[:]
    # In glibc's fenv_t: MXCSR, with a bit for results and one for operands, or FPCR, with one for both.
    word, bits = (0, 1 << 24) if platform.machine() == "aarch64" else (7, 0x8040)
    flushing[word] |= bits
    libm.fesetenv(flushing)
    got = native.rows(4)
    libm.fegetenv(after := (ctypes.c_uint32 * 8)())
    libm.fesetenv(before)
    assert np.array_equal(got, np.full((4, 16), 2 * np.float32(1e-39)))
    assert after[word] & bits == bits, "what the caller wants is left alone"


def test_what_the_system_does_not_give_is_an_error_with_a_remedy(isa: str) -> None:
    """In a process of its own, which may have 2 GiB of addresses."""
    code = f"""
import resource
from tests.backends.harness import Bench
from octavo.backends.cpu.backend import create_executor
from octavo.core.errors import ConfigError
import numpy as np
bench = Bench()
pair = bench.build(bench.rows("x", np.ones((4, 16))))
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for attempt in (lambda: create_executor("{isa}", 1000), lambda: pair.native("{isa}", num_blocks=10**6)):
    try:
        attempt()
    except ConfigError as e:
        print(e)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "does not give 1,000 threads" in done.stdout, done.stderr
    assert "does not give memory for 1,000,000 cache blocks" in done.stdout


@pytest.mark.parametrize("kind", ALL_TYPES)
def test_a_matrix_of_another_size_than_its_shape_says_is_refused(isa: str, kind: WeightType) -> None:
    k = FORMATS[kind].block_length
    store = _native.WeightStore(create_executor(isa, 1), 1 << 20)
    rows, scales = np.zeros(34 * row_bytes(kind, k), np.uint8), np.zeros(34, np.float32)
    for wrong_rows, wrong_scales in (
        (rows[:-1], scales),
        (np.zeros(len(rows) + 1, np.uint8), scales[:0]),
        (rows, scales[1:]),
    ):
        with pytest.raises(ValueError, match="another number of bytes or row scales than its shape says"):
            store.add_matrix(int(kind), 2, 17, k, wrong_rows, wrong_scales)
    if k > 1:
        with pytest.raises(ValueError, match="whole blocks"):
            store.add_matrix(int(kind), 2, 17, k - 1, rows, scales)
    assert store.add_matrix(int(kind), 2, 17, k, rows, scales) == 0


def test_weights_take_whole_panels(isa: str) -> None:
    assert _native.vector_bytes(3) == 64
    assert _native.matrix_bytes(int(WeightType.Q4_0), 17, 32) == 2 * (256 + 64)


def test_packed_weights_stay_close_to_the_bits_of_the_file(isa: str) -> None:
    """Sub-scales of 6 bits are widened to a byte, what U4 and U8 leave unused goes; nothing else changes."""
    bits = {kind: _native.matrix_bytes(int(kind), 16, 2048) * 8 / (16 * 2048) for kind in ALL_TYPES}
    of_file = {kind: row_bytes(kind, 2048) * 8 / 2048 for kind in ALL_TYPES}
    more = {kind: bits[kind] - of_file[kind] for kind in ALL_TYPES if bits[kind] != of_file[kind]}
    widened = {WeightType.Q3_K: 0.125, WeightType.Q4_K: 0.125, WeightType.Q5_K: 0.125, WeightType.IQ4_XS: 0.0625}
    assert more == widened | {WeightType.U4: -0.25, WeightType.U8: -0.25}
