"""The numpy decoders against the `gguf` package and against values worked out by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from octavo.quantization.formats import FORMATS, WeightType, dequantize, row_bytes


@pytest.mark.parametrize("kind", list(WeightType))
def test_decoded_blocks_equal_the_gguf_packages_bit_for_bit(kind: WeightType) -> None:
    rng = np.random.default_rng(kind)
    weights = rng.normal(size=(6, 96)).astype(np.float32)
    packed = gguf.quantize(weights, gguf.GGMLQuantizationType(kind)).view(np.uint8)
    ours = dequantize(packed, kind, (6, 96))
    theirs = gguf.dequantize(packed, gguf.GGMLQuantizationType(kind))
    assert ours.dtype == np.float32
    assert ours.shape == (6, 96)
    np.testing.assert_array_equal(ours, theirs)
    assert np.abs(ours - weights).max() < 0.5


@pytest.mark.parametrize("kind", list(WeightType))
def test_sizes_equal_the_gguf_packages(kind: WeightType) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    assert (FORMATS[kind].block_length, FORMATS[kind].block_bytes) == (block, size)
    assert row_bytes(kind, 64 * block) == 64 * size


def test_q4_1_nibbles_low_half_first() -> None:
    block = np.zeros(20, np.uint8)
    block[0:2] = np.frombuffer(np.float16(0.5).tobytes(), np.uint8)
    block[2:4] = np.frombuffer(np.float16(-1).tobytes(), np.uint8)
    block[4] = 0x3F  # element 0 is 15, element 16 is 3
    values = dequantize(block, WeightType.Q4_1, (32,))
    assert values[0] == 6.5
    assert values[16] == 0.5
    assert np.all(np.delete(values, [0, 16]) == -1)


def test_decoding_does_not_change_or_alias_the_data() -> None:
    data = np.arange(16, dtype=np.uint8)
    data.flags.writeable = False
    values = dequantize(data, WeightType.F32, (2, 2))
    values += 1
    assert data.tolist() == list(range(16))
