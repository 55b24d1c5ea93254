"""Random blocks of every weight format, for formats that nothing here can quantize to. Shared by tests."""

from __future__ import annotations

import gguf
import numpy as np
from numpy.typing import NDArray

from octavo.quantization.formats import FORMATS, WeightType, row_bytes

_EASY = (WeightType.F32, WeightType.F16, WeightType.BF16)
# Byte offsets of the scales, float16 (float32 for FP8_E4M3_BLOCK), and the size of a typical value when they are 1.
_SCALES: dict[WeightType, tuple[tuple[int, ...], float]] = {
    WeightType.Q4_0: ((0,), 4.6),
    WeightType.Q4_1: ((0, 2), 4.6),
    WeightType.Q5_0: ((0,), 9.2),
    WeightType.Q5_1: ((0, 2), 9.2),
    WeightType.Q8_0: ((0,), 74.0),
    WeightType.Q2_K: ((80, 82), 16.0),
    WeightType.Q3_K: ((108,), 43.0),
    WeightType.Q4_K: ((0, 2), 200.0),
    WeightType.Q5_K: ((0, 2), 350.0),
    WeightType.Q6_K: ((208,), 1360.0),
    WeightType.IQ4_NL: ((0,), 70.0),
    WeightType.IQ4_XS: ((0,), 1300.0),
    WeightType.FP8_E4M3_BLOCK: ((0,), 80.0),
    WeightType.U4: ((0,), 6.5),
    WeightType.U8: ((0,), 104.0),
}


def packed(values: NDArray[np.float32], kind: WeightType, rng: np.random.Generator) -> NDArray[np.uint8]:
    """`values` in a GGML type, [rows, bytes]: quantized where the gguf package can, else random blocks."""
    try:
        return gguf.quantize(values, gguf.GGMLQuantizationType(kind)).view(np.uint8).reshape(*values.shape[:-1], -1)
    except NotImplementedError:
        return random_blocks(kind, values.shape, rng, float(values.std())).reshape(*values.shape[:-1], -1)


def random_blocks(
    kind: WeightType, shape: tuple[int, ...], rng: np.random.Generator, size: float = 1.0
) -> NDArray[np.uint8]:
    """The bytes of a tensor, rows of `shape` one after the other; values are about `size` large, of both signs in every
    format that has them, and finite. Codes and sub-scales are any bits. INT8 and FP8_E4M3 have no scale, so no size.
    """
    if kind in _EASY:
        values = (rng.normal(size=shape) * size).astype(np.float32)
        return gguf.quantize(values, gguf.GGMLQuantizationType(int(kind))).view(np.uint8).reshape(-1)
    rows = int(np.prod(shape[:-1]))
    blocks = rng.integers(256, size=(rows * row_bytes(kind, shape[-1]),), dtype=np.uint8).reshape(
        -1, FORMATS[kind].block_bytes
    )
    if kind in (WeightType.FP8_E4M3, WeightType.FP8_E4M3_BLOCK):
        numbers = blocks[:, FORMATS[kind].block_bytes - FORMATS[kind].block_length :]
        numbers[numbers & 127 == 127] = 0
    if kind is WeightType.U4:
        blocks[:, 2] &= 15
    offsets, typical = _SCALES.get(kind, ((), 1.0))
    dtype = "<f4" if kind is WeightType.FP8_E4M3_BLOCK else "<f2"
    for i, at in enumerate(offsets):
        scale = rng.uniform(0.5, 1.5, len(blocks)) * size / typical
        if kind in (WeightType.Q4_1, WeightType.Q5_1) and i == 1:  # the minimum, so that values lie around 0
            scale *= -1.7 * typical
        raw = scale.astype(dtype).reshape(-1, 1).view(np.uint8)
        blocks[:, at : at + raw.shape[1]] = raw
    return blocks.reshape(-1)
