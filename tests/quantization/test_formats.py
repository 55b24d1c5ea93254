"""The numpy decoders against the `gguf` package and against values worked out by hand."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch

from octavo.quantization.formats import FORMATS, GGML_TYPES, WeightType, dequantize, row_bytes
from tests.random_blocks import random_blocks


@pytest.mark.parametrize("kind", GGML_TYPES)
def test_decoded_blocks_equal_the_gguf_packages_bit_for_bit(kind: WeightType) -> None:
    packed = random_blocks(kind, (12, 768), np.random.default_rng(kind))
    ours = dequantize(packed, kind, (12, 768))
    theirs = gguf.dequantize(packed.reshape(12, -1), gguf.GGMLQuantizationType(kind))
    assert ours.dtype == np.float32
    assert ours.shape == (12, 768)
    np.testing.assert_array_equal(ours, theirs)
    assert 0.3 < ours.std() < 3, "the test's blocks are of a size that shows every code"
    assert ours.min() < 0 < ours.max()


@pytest.mark.parametrize("kind", GGML_TYPES)
def test_sizes_equal_the_gguf_packages(kind: WeightType) -> None:
    block, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
    assert (FORMATS[kind].block_length, FORMATS[kind].block_bytes) == (block, size)
    assert row_bytes(kind, 64 * block) == 64 * size


def test_our_own_formats_stay_clear_of_ggmls_numbers() -> None:
    assert set(WeightType) - set(GGML_TYPES) == {t for t in WeightType if t >= 1000}
    assert max(gguf.GGMLQuantizationType) < 1000
    assert set(FORMATS) == set(WeightType)


def test_fp8_equals_torch_for_all_256_numbers() -> None:
    raw = np.arange(256, dtype=np.uint8)
    theirs = torch.from_numpy(raw).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(dequantize(raw, WeightType.FP8_E4M3, (256,)), theirs)
    block = np.concatenate([np.array([0.375], "<f4").view(np.uint8), raw[:128]])
    np.testing.assert_array_equal(
        dequantize(block, WeightType.FP8_E4M3_BLOCK, (128,)), np.float32(0.375) * theirs[:128]
    )


def test_int8_is_the_codes_alone() -> None:
    codes = np.arange(-128, -64, dtype=np.int8)
    np.testing.assert_array_equal(dequantize(codes.view(np.uint8), WeightType.INT8, (2, 32)), codes.reshape(2, 32))


def test_u4_and_u8_subtract_their_zero_first() -> None:
    head = np.concatenate([np.array([0.25], "<f2").view(np.uint8), np.array([9, 77], np.uint8)])
    values = dequantize(np.concatenate([head, np.full(16, 0x3F, np.uint8)]), WeightType.U4, (32,))
    assert values.tolist() == [0.25 * (15 - 9)] * 16 + [0.25 * (3 - 9)] * 16
    values = dequantize(np.concatenate([head, np.arange(32, dtype=np.uint8)]), WeightType.U8, (32,))
    assert values.tolist() == [0.25 * (q - 9) for q in range(32)]


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
