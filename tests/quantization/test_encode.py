"""Encoders against the `gguf` package where it has them, and against what llama.cpp's quantizer reached otherwise."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.core.errors import ModelFileError
from octavo.quantization.encode import ENCODERS, encode, encode_int8, int8_row_scales, quantized
from octavo.quantization.formats import FORMATS, WeightType, dequantize
from octavo.quantization.stored_tensor import StoredTensor

EXACT = [WeightType.F32, WeightType.F16, WeightType.BF16, WeightType.Q8_0]
EXACT += [WeightType.Q4_0, WeightType.Q4_1, WeightType.Q5_0, WeightType.Q5_1]
# Relative RMS error of llama.cpp's ggml_quantize_chunk on `heavy_tailed()`, through xllamacpp 2026.10.11549.
LLAMA_CPP = {
    WeightType.IQ4_NL: 0.08596,
    WeightType.Q2_K: 0.32543,
    WeightType.Q3_K: 0.17152,
    WeightType.Q4_K: 0.08063,
    WeightType.Q5_K: 0.04086,
    WeightType.Q6_K: 0.02069,
}


def heavy_tailed() -> np.ndarray:
    return (np.random.default_rng(0).standard_t(6, size=(64, 2048)) * 0.02).astype(np.float32)


def relative_error(values: np.ndarray, kind: WeightType) -> float:
    decoded = dequantize(encode(values, kind), kind, values.shape)
    return float(np.sqrt(((decoded - values) ** 2).mean() / (values**2).mean()))


@pytest.mark.parametrize("kind", EXACT)
def test_simple_formats_are_bit_for_bit_what_the_gguf_package_makes(kind: WeightType) -> None:
    rng = np.random.default_rng(1)
    values = (rng.normal(size=(300, 256)) * 10.0 ** rng.integers(-6, 3, size=(300, 1))).astype(np.float32)
    values[3], values[4, :40], values[5] = 0, 0, 1.5
    values[6] = np.round(values[6] * 4) / 4  # ties
    theirs = gguf.quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8).reshape(-1)
    np.testing.assert_array_equal(encode(values, kind), theirs)


@pytest.mark.parametrize("kind", LLAMA_CPP)
def test_searched_formats_come_within_two_and_a_half_percent_of_llama_cpp(kind: WeightType) -> None:
    assert relative_error(heavy_tailed(), kind) < 1.025 * LLAMA_CPP[kind]


@pytest.mark.parametrize("kind", LLAMA_CPP)
@pytest.mark.parametrize("shift", [0.0, 0.05, -0.05])
def test_searched_formats_beat_the_plain_grid_over_the_range(kind: WeightType, shift: float) -> None:
    bits = {WeightType.Q2_K: 2, WeightType.Q3_K: 3, WeightType.Q5_K: 5, WeightType.Q6_K: 6}.get(kind, 4)
    values = heavy_tailed() + np.float32(shift)
    groups = values.reshape(-1, 32 if kind in (WeightType.Q4_K, WeightType.Q5_K, WeightType.IQ4_NL) else 16)
    if kind in (WeightType.Q2_K, WeightType.Q4_K, WeightType.Q5_K):
        low = np.minimum(groups.min(axis=1, keepdims=True), 0)
        step = (groups.max(axis=1, keepdims=True) - low) / (2**bits - 1)
        plain = np.rint((groups - low) / step) * step + low
    else:
        step = np.abs(groups).max(axis=1, keepdims=True) / (2 ** (bits - 1) - 1)
        plain = np.rint(groups / step) * step
    naive = np.sqrt(((plain - groups) ** 2).mean() / (groups**2).mean())
    assert relative_error(values, kind) < naive


@pytest.mark.parametrize("kind", ENCODERS)
def test_zeros_constants_and_tiny_values_come_back(kind: WeightType) -> None:
    length = max(256, FORMATS[kind].block_length)
    for value in (0.0, 1.0, -1.0, 1e-30):
        values = np.full((3, length), value, np.float32)
        decoded = dequantize(encode(values, kind), kind, values.shape)
        np.testing.assert_allclose(decoded, values, atol=0.07 * abs(value) + 1e-7)


@pytest.mark.parametrize("kind", [WeightType.Q4_K, WeightType.Q8_0, WeightType.Q3_K])
def test_a_row_is_encoded_alike_alone_and_among_others(kind: WeightType) -> None:
    values = heavy_tailed()
    whole = encode(values, kind).reshape(len(values), -1)
    np.testing.assert_array_equal(encode(values[7:8], kind), whole[7])


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e9])
@pytest.mark.parametrize("kind", [WeightType.Q8_0, WeightType.Q4_K, WeightType.F16])
def test_values_that_cannot_be_stored_are_refused(kind: WeightType, bad: float) -> None:
    values = np.ones((2, 256), np.float32)
    values[1, 3] = bad
    with pytest.raises(ModelFileError, match="not finite or beyond float16"):
        encode(values, kind)


def test_int8_has_the_largest_value_of_a_row_at_127() -> None:
    values = np.concatenate([heavy_tailed(), np.zeros((1, 2048), np.float32)])
    scales, data = int8_row_scales(values), encode_int8(values)
    codes = dequantize(data, WeightType.INT8, values.shape)
    assert np.abs(codes[:-1]).max(axis=1).tolist() == [127] * 64
    assert np.abs(codes * scales[:, None] - values).max() <= scales.max() * 0.501
    assert not codes[-1].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_bfloat16_keeps_what_only_float32_holds_beside_it(bad: float) -> None:
    values = np.full((1, 32), bad, np.float32)
    np.testing.assert_allclose(dequantize(encode(values, WeightType.BF16), WeightType.BF16, (1, 32)), values, rtol=0.01)


@pytest.mark.parametrize("kind", [WeightType.Q8_0, WeightType.Q4_K, WeightType.INT8])
@pytest.mark.parametrize("scaled", [False, True])
def test_a_tensor_is_quantized_when_it_is_loaded_and_not_before(kind: WeightType, scaled: bool) -> None:
    values = np.random.default_rng(0).normal(size=(3, 1500, 512)).astype(np.float32)  # more than one piece
    scales = np.random.default_rng(1).uniform(0.5, 2, size=4500).astype(np.float32)
    loaded = []

    def load() -> np.ndarray:
        loaded.append(1)
        return encode(values, WeightType.F16)

    source = StoredTensor(values.shape, WeightType.F16, load, (lambda: scales) if scaled else None)
    tensor = quantized(source, kind)
    assert (tensor.type, tensor.shape, loaded) == (kind, values.shape, [])
    want = source.values()
    if kind == WeightType.INT8:
        np.testing.assert_array_equal(tensor.load(), encode_int8(want))
        assert tensor.row_scales is not None
        np.testing.assert_array_equal(tensor.row_scales(), int8_row_scales(want))
    else:
        np.testing.assert_array_equal(tensor.load(), encode(want, kind))
        assert tensor.row_scales is None
    assert quantized(source, WeightType.F16) is source
