"""The weight formats that octavo reads, as data: block sizes and a plain numpy decoder each.

This is the reference that kernels are compared with; it does not know files or how a backend packs a matrix.

A row of a matrix is a run of blocks; a block holds `block_length` consecutive elements in `block_bytes` bytes. All
numbers are little-endian. GGML's formats (source: ggml's block definitions):

    F32            1 element    float32
    F16            1            float16
    BF16           1            the upper half of a float32
    Q4_0          32 elements   float16 d | nibbles                              value = d * (q - 8)
    Q4_1          32            float16 d | float16 m | nibbles                  value = d * q + m
    Q5_0          32            float16 d | 32 high bits | nibbles               value = d * (q - 16)
    Q5_1          32            float16 d | float16 m | 32 high bits | nibbles   value = d * q + m
    Q8_0          32            float16 d | 32 int8                              value = d * q
    IQ4_NL        32            float16 d | nibbles                              value = d * IQ4_VALUES[q]
    IQ4_XS       256            float16 d | uint16 high 2 bits of 8 scales | their low 4 bits | 8 times nibbles
                                                                   value = d * (scale - 32) * IQ4_VALUES[q]
    Q2_K         256            16 bytes: scale and minimum, 4 bits each | 2-bit codes | float16 d | float16 dmin
                                                                   value = d * scale * q - dmin * minimum
    Q3_K         256            high bits | 2-bit codes | 16 scales of 6 bits | float16 d
                                                                   value = d * (scale - 32) * (q - 4)
    Q4_K         256            float16 d | float16 dmin | 8 scales and minima of 6 bits | nibbles
                                                                   value = d * scale * q - dmin * minimum
    Q5_K         256            float16 d | float16 dmin | 8 scales and minima of 6 bits | high bits | nibbles; as Q4_K
    Q6_K         256            nibbles | high 2 bits | 16 int8 scales | float16 d
                                                                   value = d * scale * (q - 32)

Our own, which readers of other files produce. INT8 and FP8_E4M3 are multiplied by a scale for each row, which is kept
beside the matrix (weights.checkpoint.StoredTensor.row_scales):

    INT8          32            32 int8
    FP8_E4M3       1            sign, 4 bits exponent, 3 bits mantissa; no infinities, 0x7f and 0xff are NaN
    FP8_E4M3_BLOCK 128          float32 d | 128 FP8_E4M3                         value = d * number
    U4            32            float16 d | uint8 zero | uint8 unused | nibbles  value = d * (q - zero)
    U8            32            float16 d | uint8 zero | uint8 unused | 32 uint8 value = d * (q - zero)

Fields of less than a byte lie in runs (`_fields`). In a block of 32, byte j of the nibbles holds element j in its low
half and element j + 16 in its high half. Scales are widened to float32 first; each product and difference above is
rounded to float32 in the order in which it is written.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
from numpy.typing import NDArray

Decoder = Callable[[NDArray[np.uint8]], NDArray[np.float32]]


class WeightType(enum.IntEnum):
    """GGML's numbers of the formats that octavo reads; our own begin at 1000 (`GGML_TYPES` has the others)."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30
    INT8 = 1000
    FP8_E4M3 = 1001
    FP8_E4M3_BLOCK = 1002
    U4 = 1003
    U8 = 1004


GGML_TYPES = tuple(t for t in WeightType if t < 1000)
IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`decode` takes blocks [n, block_bytes] and gives values [n, block_length]."""

    block_length: int
    block_bytes: int
    decode: Decoder


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _fields(packed: NDArray[np.uint8], bits: int, run: int) -> NDArray[np.uint8]:
    """Fields of `bits` bits: `run` bytes hold 8 / bits runs of `run` elements, the first run in the lowest bits."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8).reshape(1, 1, -1, 1)
    values = (packed.reshape(len(packed), -1, 1, run) >> shifts) & np.uint8((1 << bits) - 1)
    return values.reshape(len(packed), -1)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _fields(packed, 4, 16).astype(np.float32)


def _spread(scales: NDArray[np.float32], codes: NDArray[np.float32]) -> NDArray[np.float32]:
    """scales [n, s] for codes [n, length]: each repeated for its length / s elements."""
    return np.repeat(scales, codes.shape[1] // scales.shape[1], axis=1)


def _decode_f32(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f4").astype(np.float32)


def _decode_f16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view("<f2").astype(np.float32)


def _decode_bf16(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return (blocks.view("<u2").astype(np.uint32) << 16).view(np.float32)


def _decode_q4_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]) - np.float32(8))


def _decode_q4_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _five_bits(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    high = _fields(blocks[:, at : at + 4], 1, 1)
    return (_fields(blocks[:, at + 4 :], 4, 16) | high << 4).astype(np.float32)


def _decode_q5_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * (_five_bits(blocks, 2) - np.float32(16))


def _decode_q5_1(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * _five_bits(blocks, 4) + _half(blocks, 2)


def _decode_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


def _decode_q2_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    codes = _fields(blocks[:, 16:80], 2, 32).astype(np.float32)
    scales = _half(blocks, 80) * (blocks[:, :16] & 15).astype(np.float32)
    minima = _half(blocks, 82) * (blocks[:, :16] >> 4).astype(np.float32)
    return _spread(scales, codes) * codes - _spread(minima, codes)


def _decode_q3_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    codes = (_fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2).astype(np.float32)
    scales = (_fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4).astype(np.float32)
    return _spread(_half(blocks, 108) * (scales - np.float32(32)), codes) * (codes - np.float32(4))


def _scales_and_minima(packed: NDArray[np.uint8]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Of Q4_K and Q5_K, 12 bytes: the first four scales in the low 6 bits of bytes 0..3, the first four minima in those
    of 4..7; of the last four the low 4 bits in the halves of bytes 8..11, the upper 2 on top of bytes 0..7.
    """
    first, second, low = packed[:, :4], packed[:, 4:8], packed[:, 8:12]
    scales = np.concatenate([first & 63, low & 15 | (first >> 6) << 4], axis=1)
    minima = np.concatenate([second & 63, low >> 4 | (second >> 6) << 4], axis=1)
    return scales.astype(np.float32), minima.astype(np.float32)


def _affine_k(blocks: NDArray[np.uint8], codes: NDArray[np.uint8]) -> NDArray[np.float32]:
    scales, minima = _scales_and_minima(blocks[:, 4:16])
    q = codes.astype(np.float32)
    return _spread(_half(blocks, 0) * scales, q) * q - _spread(_half(blocks, 2) * minima, q)


def _decode_q4_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _affine_k(blocks, _fields(blocks[:, 16:], 4, 32))


def _decode_q5_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _affine_k(blocks, _fields(blocks[:, 48:], 4, 32) | _fields(blocks[:, 16:48], 1, 32) << np.uint8(4))


def _decode_q6_k(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    codes = (_fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4).astype(np.float32)
    scales = _half(blocks, 208) * blocks[:, 192:208].view(np.int8).astype(np.float32)
    return _spread(scales, codes) * (codes - np.float32(32))


def _decode_iq4_nl(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * IQ4_VALUES[_fields(blocks[:, 2:], 4, 16)]


def _decode_iq4_xs(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    scales = (_fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4).astype(np.float32)
    values = IQ4_VALUES[_fields(blocks[:, 8:], 4, 16)]
    return _spread(_half(blocks, 0) * (scales - np.float32(32)), values) * values


def _decode_int8(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return blocks.view(np.int8).astype(np.float32)


def _e4m3_values() -> NDArray[np.float32]:
    """All 256, by their bits."""
    bits = np.arange(256)
    exponent, mantissa = (bits >> 3) & 15, bits & 7
    magnitude = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    magnitude[(bits & 127) == 127] = np.nan
    return np.where(bits < 128, magnitude, -magnitude).astype(np.float32)


_E4M3 = _e4m3_values()


def _decode_fp8_e4m3(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _E4M3[blocks]


def _decode_fp8_e4m3_block(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.ascontiguousarray(blocks[:, :4]).view("<f4") * _E4M3[blocks[:, 4:]]


def _decode_u4(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * (_nibbles(blocks[:, 4:]) - blocks[:, 2:3].astype(np.float32))


def _decode_u8(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * (blocks[:, 4:].astype(np.float32) - blocks[:, 2:3].astype(np.float32))


FLOATS = (WeightType.F32, WeightType.F16, WeightType.BF16)

FORMATS: dict[WeightType, BlockFormat] = {
    WeightType.F32: BlockFormat(1, 4, _decode_f32),
    WeightType.F16: BlockFormat(1, 2, _decode_f16),
    WeightType.BF16: BlockFormat(1, 2, _decode_bf16),
    WeightType.Q4_0: BlockFormat(32, 18, _decode_q4_0),
    WeightType.Q4_1: BlockFormat(32, 20, _decode_q4_1),
    WeightType.Q5_0: BlockFormat(32, 22, _decode_q5_0),
    WeightType.Q5_1: BlockFormat(32, 24, _decode_q5_1),
    WeightType.Q8_0: BlockFormat(32, 34, _decode_q8_0),
    WeightType.Q2_K: BlockFormat(256, 84, _decode_q2_k),
    WeightType.Q3_K: BlockFormat(256, 110, _decode_q3_k),
    WeightType.Q4_K: BlockFormat(256, 144, _decode_q4_k),
    WeightType.Q5_K: BlockFormat(256, 176, _decode_q5_k),
    WeightType.Q6_K: BlockFormat(256, 210, _decode_q6_k),
    WeightType.IQ4_NL: BlockFormat(32, 18, _decode_iq4_nl),
    WeightType.IQ4_XS: BlockFormat(256, 136, _decode_iq4_xs),
    WeightType.INT8: BlockFormat(32, 32, _decode_int8),
    WeightType.FP8_E4M3: BlockFormat(1, 1, _decode_fp8_e4m3),
    WeightType.FP8_E4M3_BLOCK: BlockFormat(128, 132, _decode_fp8_e4m3_block),
    WeightType.U4: BlockFormat(32, 20, _decode_u4),
    WeightType.U8: BlockFormat(32, 36, _decode_u8),
}


def row_bytes(weight_type: WeightType, n: int) -> int:
    """Bytes of a row of n elements; n must be a multiple of the format's block length."""
    form = FORMATS[weight_type]
    assert n % form.block_length == 0, f"{n} elements are not whole {weight_type.name} blocks"
    return n // form.block_length * form.block_bytes


def dequantize(data: NDArray[np.uint8], weight_type: WeightType, shape: Sequence[int]) -> NDArray[np.float32]:
    """The numbers of a stored tensor, as float32 of `shape` (slowest dimension first).

    data: the tensor's bytes, of any shape, rows one after the other.
    """
    form = FORMATS[weight_type]
    assert data.size == prod(shape[:-1]) * row_bytes(weight_type, shape[-1]), f"{data.size} bytes are not {shape}"
    blocks = np.ascontiguousarray(data).reshape(-1, form.block_bytes)
    return form.decode(blocks).reshape(tuple(shape))
