"""From float32 to each weight format that octavo writes: the inverse of the decoders in `formats.py`.

Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0 are bit for bit what GGML's reference makes. For the K-quants and IQ4_NL the scale and
minimum of each group are searched: several widths of the grid are tried, each fitted by weighted least squares (the
scheme of llama.cpp's reference quantizer), and where the format allows the scales' own rounding is fitted once more.

`quantized` does it to a tensor while it is loaded. Knows neither files nor which tensor deserves which format.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.quantization.formats import FORMATS, IQ4_VALUES, WeightType, dequantize, row_bytes
from octavo.quantization.stored_tensor import StoredTensor

F32 = NDArray[np.float32]
U8 = NDArray[np.uint8]
Encoder = Callable[[F32], U8]

CHUNK = 1 << 15  # elements at once: the temporaries of a search stay in the second cache
ELEMENTS_AT_ONCE = 1 << 20  # of a tensor that is converted while it is loaded, for each thread
LOW, FOUR = np.uint8(15), np.uint8(4)
MAX_VALUE = 65504.0  # float16's; scales are smaller than values


def encode(values: F32, kind: WeightType) -> U8:
    """The bytes of `values` [..., n] in the format `kind`, [num_bytes], rows one after the other.

    n must be a multiple of the format's block length. Raises ModelFileError for values that are not finite or beyond
    float16, which only float32 and bfloat16 hold.
    """
    form, encoder = FORMATS[kind], ENCODERS[kind]
    assert values.shape[-1] % form.block_length == 0, f"{values.shape[-1]} elements are not whole {kind.name} blocks"
    blocks = np.ascontiguousarray(values, np.float32).reshape(-1, form.block_length)
    out = np.empty((len(blocks), form.block_bytes), np.uint8)
    step = max(1, CHUNK // form.block_length)
    for first in range(0, len(blocks), step):
        chunk = blocks[first : first + step]
        if kind not in (WeightType.F32, WeightType.BF16):
            _check(chunk)
        out[first : first + step] = encoder(chunk)
    return out.reshape(-1)


def quantized(tensor: StoredTensor, kind: WeightType) -> StoredTensor:
    """The same tensor in the format `kind`, made when it is loaded, a few rows at a time on all processors.

    The length of its rows must be a multiple of the format's block length. Loading it raises ModelFileError for values
    that are not finite or beyond float16.
    """
    if tensor.type == kind:
        return tensor
    width = row_bytes(kind, tensor.shape[-1])
    if kind == WeightType.INT8:
        scales = partial(_converted, tensor, int8_row_scales, 1, np.float32)
        return StoredTensor(tensor.shape, kind, partial(_converted, tensor, encode_int8, width, np.uint8), scales)
    return StoredTensor(tensor.shape, kind, partial(_converted, tensor, partial(encode, kind=kind), width, np.uint8))


def _converted(
    tensor: StoredTensor, convert: Callable[[F32], NDArray[Any]], width: int, dtype: type[np.generic]
) -> NDArray[Any]:
    """The tensor through `convert`, which makes `width` items of each row; [rows * width]."""
    length = tensor.shape[-1]
    stored = tensor.load().reshape(-1, row_bytes(tensor.type, length))
    scales = None if tensor.row_scales is None else tensor.row_scales().reshape(-1, 1)
    out = np.empty((len(stored), width), dtype)
    step = max(1, ELEMENTS_AT_ONCE // length)

    def convert_rows(first: int) -> None:
        part = slice(first, first + step)
        values = dequantize(stored[part], tensor.type, (len(stored[part]), length))
        if scales is not None:
            values = values * scales[part]
        out[part] = convert(values).reshape(-1, width)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for _ in pool.map(convert_rows, range(0, len(stored), step)):
            pass  # raises what went wrong in a thread
    return out.reshape(-1)


def int8_row_scales(values: F32) -> F32:
    """values [..., n] -> [rows]: the scale of each row for `encode_int8`."""
    _check(values)
    largest: F32 = np.abs(values).max(axis=-1)
    return (largest / np.float32(127)).reshape(-1)


def encode_int8(values: F32) -> U8:
    """values [..., n] as WeightType.INT8, to be multiplied by `int8_row_scales`; n is a multiple of 32."""
    inverse = _inverse(int8_row_scales(values)).reshape(*values.shape[:-1], 1)
    codes: NDArray[np.int8] = np.rint(values * inverse).astype(np.int8)
    return codes.view(np.uint8).reshape(-1)


def _check(values: F32) -> None:
    low, high = values.min(), values.max()  # NaN if one is there
    if not (low >= -MAX_VALUE and high <= MAX_VALUE):
        raise ModelFileError(
            f"a weight is not finite or beyond float16 (values from {low} to {high}): it cannot be quantized"
        )


def _inverse(d: F32) -> F32:
    """1 / d, and 0 where that is no number."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / d
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _half_bytes(scales: F32) -> U8:
    """[n, 1] -> float16, [n, 2] bytes."""
    return scales.astype("<f2").view(np.uint8)


def _as_stored(scales: F32) -> F32:
    """What float16 keeps of them."""
    return scales.astype(np.float16).astype(np.float32)


def _nibbles(codes: U8) -> U8:
    """[n, 32] -> [n, 16]: j in the low half of byte j, j + 16 in the high."""
    return codes[:, :16] | codes[:, 16:] << FOUR


def _planes(codes: U8, bits: int, run: int) -> U8:
    """Fields of `bits` bits, as formats._fields reads them: runs of `run` elements over each other in `run` bytes."""
    per_byte = 8 // bits
    runs = codes.reshape(len(codes), -1, per_byte, run)
    packed = runs[:, :, 0].copy()
    for i in range(1, per_byte):
        packed |= runs[:, :, i] << np.uint8(bits * i)
    return packed.reshape(len(codes), -1)


# ---- floats ----


def _encode_f32(x: F32) -> U8:
    return x.astype("<f4").view(np.uint8)


def _encode_f16(x: F32) -> U8:
    return x.astype("<f2").view(np.uint8)


def _encode_bf16(x: F32) -> U8:
    bits = x.view(np.uint32)
    nearest = (bits + (np.uint32(0x7FFF) + (bits >> 16 & 1))) >> 16  # to even
    return np.where(np.isnan(x), np.uint32(0x7FC0), nearest).astype("<u2").view(np.uint8)


# ---- blocks of 32 with a scale ----


def _signed_scale(x: F32, steps: int) -> tuple[F32, F32]:
    """The scale that gives the value of largest magnitude the code 0 (-steps), and its inverse: [n, 1] each."""
    at = np.abs(x).argmax(axis=1)[:, None]
    d = np.take_along_axis(x, at, axis=1) / np.float32(-steps)
    return d, _inverse(d)


def _encode_q4_0(x: F32) -> U8:
    d, inverse = _signed_scale(x, 8)
    codes = np.minimum((x * inverse + np.float32(8.5)).astype(np.uint8), 15)
    return np.concatenate([_half_bytes(d), _nibbles(codes)], axis=1)


def _encode_q5_0(x: F32) -> U8:
    d, inverse = _signed_scale(x, 16)
    codes = np.minimum((x * inverse + np.float32(16.5)).astype(np.uint8), 31)
    return np.concatenate([_half_bytes(d), _planes(codes >> FOUR, 1, 1), _nibbles(codes & LOW)], axis=1)


def _affine(x: F32, steps: int) -> tuple[F32, F32, U8]:
    """Scale [n, 1], minimum [n, 1] and codes [n, 32] of the grid from the least to the greatest value."""
    low = x.min(axis=1, keepdims=True)
    d = (x.max(axis=1, keepdims=True) - low) / np.float32(steps)
    codes = np.minimum(((x - low) * _inverse(d) + np.float32(0.5)).astype(np.uint8), steps)
    return d, low, codes


def _encode_q4_1(x: F32) -> U8:
    d, low, codes = _affine(x, 15)
    return np.concatenate([_half_bytes(d), _half_bytes(low), _nibbles(codes)], axis=1)


def _encode_q5_1(x: F32) -> U8:
    d, low, codes = _affine(x, 31)
    high = _planes(codes >> FOUR, 1, 1)
    return np.concatenate([_half_bytes(d), _half_bytes(low), high, _nibbles(codes & LOW)], axis=1)


def _encode_q8_0(x: F32) -> U8:
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    scaled = x * _inverse(d)
    # Halves away from zero, as the reference rounds.
    codes = np.trunc(scaled + np.copysign(np.float32(0.5), scaled)).astype(np.int8)
    return np.concatenate([_half_bytes(d), codes.view(np.uint8)], axis=1)


# Between neighbouring values lie multiples of a half, so twice a number, rounded down, tells the nearest value.
_IQ4_DOUBLED = np.arange(2 * IQ4_VALUES[0], 2 * IQ4_VALUES[-1] + 1, dtype=np.float32)
_IQ4_NEAREST: U8 = np.abs((_IQ4_DOUBLED / 2 + 0.25)[:, None] - IQ4_VALUES).argmin(axis=1).astype(np.uint8)
_IQ4_NEAREST_VALUE = IQ4_VALUES[_IQ4_NEAREST]


def _iq4_places(x: F32, inverse: F32) -> NDArray[np.int16]:
    """Where x [n, 32] * inverse [n, 1] stands in the two tables above."""
    doubled = x * (inverse * np.float32(2))
    doubled -= _IQ4_DOUBLED[0]
    return np.clip(doubled, 0, len(_IQ4_DOUBLED) - 1, out=doubled).astype(np.int16)


def _encode_iq4_nl(x: F32) -> U8:
    weights = x * x
    at = np.abs(x).argmax(axis=1)[:, None]
    inverse = _inverse(np.take_along_axis(x, at, axis=1))
    best_d, best_gain = np.zeros_like(inverse), np.full_like(inverse, -1)
    # The extreme may go to either end of the grid, which is longer on one side.
    for end in [*range(-134, -119), *range(106, 121, 2)]:
        q = np.take(_IQ4_NEAREST_VALUE, _iq4_places(x, inverse * np.float32(end)))
        best_d, best_gain = _better(x, weights, q, best_d, best_gain)
    best_d = _as_stored(best_d)
    codes: U8 = _IQ4_NEAREST[_iq4_places(x, _inverse(best_d))]
    return np.concatenate([_half_bytes(best_d), _nibbles(codes)], axis=1)


def _better(x: F32, weights: F32, q: F32, best_d: F32, best_gain: F32) -> tuple[F32, F32]:
    """Of the best scale so far and the least-squares scale for the grid values q, the one that leaves less error.

    With d = sum(w q x) / sum(w q q) the weighted squared error is less than sum(w x x) by d * sum(w q x), the gain.
    """
    wq = weights * q
    dot = np.einsum("ij,ij->i", wq, x)[:, None]
    d = dot * _inverse(np.einsum("ij,ij->i", wq, q)[:, None])
    gain = d * dot
    better = gain > best_gain
    return np.where(better, d, best_d), np.where(better, gain, best_gain)


# ---- super-blocks of 256 ----


def _best_scales(x: F32, steps: int) -> F32:
    """For groups x [n, length] and codes -steps to steps - 1: the scale of least weighted error, [n, 1]."""
    weights = x * x
    at = np.abs(x).argmax(axis=1)[:, None]
    inverse = _inverse(np.take_along_axis(x, at, axis=1))
    best_d, best_gain = np.zeros_like(inverse), np.full_like(inverse, -1)
    for i in range(-9, 10):
        q = np.clip(np.rint(x * (inverse * np.float32(-(steps + 0.1 * i)))), -steps, steps - 1)
        best_d, best_gain = _better(x, weights, q, best_d, best_gain)
    return best_d


def _scaled_symmetric(
    x: F32, length: int, steps: int, scale_steps: int
) -> tuple[F32, NDArray[np.float32], NDArray[np.float32]]:
    """Super-blocks x [n, 256] -> d [n, 1], integer scales [n, 256 / length], codes [n, 256].

    Value = d * scale * code; scales from -scale_steps to scale_steps - 1, codes from -steps to steps - 1.
    """
    n = len(x)
    groups = x.reshape(-1, length)
    wanted = _best_scales(groups, steps).reshape(n, -1)
    at = np.abs(wanted).argmax(axis=1)[:, None]
    d = _as_stored(np.take_along_axis(wanted, at, axis=1) / np.float32(-scale_steps))
    scales = np.clip(np.rint(wanted * _inverse(d)), -scale_steps, scale_steps - 1)
    for _ in range(2):
        spread = (d * scales).reshape(-1, 1)
        codes = np.clip(np.rint(groups * _inverse(spread)), -steps, steps - 1).reshape(n, 256)
        # Least squares for d with scales and codes as they are.
        q = np.repeat(scales, length, axis=1) * codes
        wq = x * x * q
        d_fitted = np.einsum("ij,ij->i", wq, x)[:, None] * _inverse(np.einsum("ij,ij->i", wq, q)[:, None])
        d = _as_stored(d_fitted)
    spread = (d * scales).reshape(-1, 1)
    return d, scales, np.clip(np.rint(groups * _inverse(spread)), -steps, steps - 1).reshape(n, 256)


def _encode_q6_k(x: F32) -> U8:
    d, scales, codes = _scaled_symmetric(x, 16, 32, 128)
    q = (codes + np.float32(32)).astype(np.uint8)
    low, high = _planes(q & LOW, 4, 64), _planes(q >> FOUR, 2, 32)
    return np.concatenate([low, high, scales.astype(np.int8).view(np.uint8), _half_bytes(d)], axis=1)


def _encode_q3_k(x: F32) -> U8:
    d, scales, codes = _scaled_symmetric(x, 16, 4, 32)
    q, s = (codes + np.float32(4)).astype(np.uint8), (scales + np.float32(32)).astype(np.uint8)
    packed_scales = [_planes(s & LOW, 4, 8), _planes(s >> FOUR, 2, 4)]
    return np.concatenate(
        [_planes(q >> np.uint8(2), 1, 32), _planes(q & np.uint8(3), 2, 32), *packed_scales, _half_bytes(d)], axis=1
    )


def _best_affine(x: F32, weights: F32, steps: int, first: float, last: float, num: int) -> tuple[F32, F32]:
    """For groups x [n, length] and codes 0 to steps: scale and minimum (what is subtracted, >= 0), [n, 1] each.

    Grids of steps + first to steps + last widths over the range are tried, each fitted by weighted least squares.
    """
    low = np.minimum(x.min(axis=1, keepdims=True), 0)
    span = x.max(axis=1, keepdims=True) - low
    inverse_span = _inverse(span)
    above = x - low
    sum_w = weights.sum(axis=1)[:, None]
    wx = weights * x
    sum_wx = wx.sum(axis=1)[:, None]
    best_d, best_m = span / np.float32(steps), -low
    best_gain = np.full_like(low, -np.inf)
    for width in np.linspace(steps + first, steps + last, num, dtype=np.float32):
        q = np.minimum(np.rint(above * (inverse_span * width)), steps)
        wq = weights * q
        sum_wq = wq.sum(axis=1)[:, None]
        sum_wqq = np.einsum("ij,ij->i", wq, q)[:, None]
        sum_wqx = np.einsum("ij,ij->i", wx, q)[:, None]
        inverse = _inverse(sum_w * sum_wqq - sum_wq * sum_wq)
        d = (sum_w * sum_wqx - sum_wx * sum_wq) * inverse
        m = (sum_wq * sum_wqx - sum_wqq * sum_wx) * inverse
        without = m < 0  # a negative minimum cannot be stored
        d = np.where(without, sum_wqx * _inverse(sum_wqq), d)
        m = np.where(without, 0, m)
        gain = d * sum_wqx - m * sum_wx  # how much less than sum(w x x) the squared error is
        better = (gain > best_gain) & (d > 0)
        best_d, best_m = np.where(better, d, best_d), np.where(better, m, best_m)
        best_gain = np.where(better, gain, best_gain)
    return best_d, best_m


def _scaled_affine(
    x: F32, length: int, steps: int, scale_steps: int, first: float, last: float, num: int
) -> tuple[F32, F32, F32, F32, U8]:
    """Super-blocks x [n, 256] -> d, dmin [n, 1], integer scales and minima [n, 256 / length], codes [n, 256].

    Value = d * scale * code - dmin * minimum; scales and minima from 0 to scale_steps, codes from 0 to steps.
    """
    n = len(x)
    groups = x.reshape(-1, length)
    size = np.sqrt(np.einsum("ij,ij->i", groups, groups)[:, None] / np.float32(length))
    weights = size + np.abs(groups)
    wanted, minima = (a.reshape(n, -1) for a in _best_affine(groups, weights, steps, first, last, num))
    d = _as_stored(wanted.max(axis=1, keepdims=True) / np.float32(scale_steps))
    dmin = _as_stored(minima.max(axis=1, keepdims=True) / np.float32(scale_steps))
    s = np.minimum(np.rint(wanted * _inverse(d)), scale_steps)
    m = np.minimum(np.rint(minima * _inverse(dmin)), scale_steps)

    def codes() -> F32:
        lifted = groups + (dmin * m).reshape(-1, 1)
        found: F32 = np.clip(np.rint(lifted * _inverse((d * s).reshape(-1, 1))), 0, steps)
        return found.reshape(n, 256)

    q = codes()
    # Least squares for d and dmin with scales, minima and codes as they are.
    w = weights.reshape(n, 256)
    a, b = np.repeat(s, length, axis=1) * q, -np.repeat(m, length, axis=1)
    wa, wb = w * a, w * b
    aa, ab, bb, ax, bx = (np.einsum("ij,ij->i", *p)[:, None] for p in ((wa, a), (wa, b), (wb, b), (wa, x), (wb, x)))
    inverse = _inverse(aa * bb - ab * ab)
    fitted_d, fitted_dmin = (ax * bb - bx * ab) * inverse, (bx * aa - ax * ab) * inverse
    good = (fitted_d > 0) & (fitted_dmin > 0)
    d = np.where(good, _as_stored(fitted_d), d)
    dmin = np.where(good, _as_stored(fitted_dmin), dmin)
    return d, dmin, s, m, codes().astype(np.uint8)


def _packed_scales(scales: F32, minima: F32) -> U8:
    """8 scales and 8 minima of 6 bits -> 12 bytes, as formats._scales_and_minima reads them."""
    s, m = scales.astype(np.uint8), minima.astype(np.uint8)
    first = s[:, :4] | (s[:, 4:] >> FOUR) << np.uint8(6)
    second = m[:, :4] | (m[:, 4:] >> FOUR) << np.uint8(6)
    return np.concatenate([first, second, s[:, 4:] & LOW | (m[:, 4:] & LOW) << FOUR], axis=1)


def _encode_q4_k(x: F32) -> U8:
    d, dmin, s, m, q = _scaled_affine(x, 32, 15, 63, -1.0, 1.0, 21)
    return np.concatenate([_half_bytes(d), _half_bytes(dmin), _packed_scales(s, m), _planes(q, 4, 32)], axis=1)


def _encode_q5_k(x: F32) -> U8:
    d, dmin, s, m, q = _scaled_affine(x, 32, 31, 63, -0.5, 1.0, 16)
    head = [_half_bytes(d), _half_bytes(dmin), _packed_scales(s, m)]
    return np.concatenate([*head, _planes(q >> FOUR, 1, 32), _planes(q & LOW, 4, 32)], axis=1)


def _encode_q2_k(x: F32) -> U8:
    d, dmin, s, m, q = _scaled_affine(x, 16, 3, 15, -0.5, 1.0, 16)
    both = s.astype(np.uint8) | m.astype(np.uint8) << FOUR
    return np.concatenate([both, _planes(q, 2, 32), _half_bytes(d), _half_bytes(dmin)], axis=1)


ENCODERS: dict[WeightType, Encoder] = {
    WeightType.F32: _encode_f32,
    WeightType.F16: _encode_f16,
    WeightType.BF16: _encode_bf16,
    WeightType.Q4_0: _encode_q4_0,
    WeightType.Q4_1: _encode_q4_1,
    WeightType.Q5_0: _encode_q5_0,
    WeightType.Q5_1: _encode_q5_1,
    WeightType.Q8_0: _encode_q8_0,
    WeightType.IQ4_NL: _encode_iq4_nl,
    WeightType.Q2_K: _encode_q2_k,
    WeightType.Q3_K: _encode_q3_k,
    WeightType.Q4_K: _encode_q4_k,
    WeightType.Q5_K: _encode_q5_k,
    WeightType.Q6_K: _encode_q6_k,
}
