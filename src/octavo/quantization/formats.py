"""The weight formats that octavo reads, as data: block sizes and a plain numpy decoder each.

This is the reference that kernels are compared with; it does not know files or how a backend packs a matrix.

A row of a matrix is a run of blocks; a block holds `block_length` consecutive elements in `block_bytes` bytes. All
numbers are little-endian (source: ggml's block definitions):

    F32    1 element,  4 bytes    float32
    F16    1 element,  2 bytes    float16
    BF16   1 element,  2 bytes    the upper half of a float32
    Q4_0  32 elements, 18 bytes   float16 d | 16 bytes of nibbles            value = d * (q - 8)
    Q4_1  32 elements, 20 bytes   float16 d | float16 m | 16 bytes of nibbles  value = d * q + m
    Q8_0  32 elements, 34 bytes   float16 d | 32 int8                        value = d * q

Byte j of the nibbles holds element j in its low half and element j + 16 in its high half. Scales are widened to
float32 first and products are exact there, so Q4_1 rounds once, in its sum, and the others never.
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
    """GGML's numbers of the formats that octavo reads."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 8
    BF16 = 30


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """`decode` takes blocks [n, block_bytes] and gives values [n, block_length]."""

    block_length: int
    block_bytes: int
    decode: Decoder


def _half(blocks: NDArray[np.uint8], at: int) -> NDArray[np.float32]:
    """The float16 at byte `at` of each block, as float32 [n, 1]."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: NDArray[np.uint8]) -> NDArray[np.float32]:
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


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


def _decode_q8_0(blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return _half(blocks, 0) * blocks[:, 2:].view(np.int8).astype(np.float32)


FORMATS: dict[WeightType, BlockFormat] = {
    WeightType.F32: BlockFormat(1, 4, _decode_f32),
    WeightType.F16: BlockFormat(1, 2, _decode_f16),
    WeightType.BF16: BlockFormat(1, 2, _decode_bf16),
    WeightType.Q4_0: BlockFormat(32, 18, _decode_q4_0),
    WeightType.Q4_1: BlockFormat(32, 20, _decode_q4_1),
    WeightType.Q8_0: BlockFormat(32, 34, _decode_q8_0),
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
