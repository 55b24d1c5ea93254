"""Packed matrices of Hugging Face checkpoints (GPTQ, AWQ, compressed-tensors, fp8) as our weight formats.

What a module is stored as follows from the tensors it has, so that modules which were left alone, or quantized with
other settings than the rest, are read as they are; `quantization_config` only says whose conventions hold. Knows
neither files nor architectures. The bits are moved into our blocks, never unpacked to floats, with one exception:
inputs whose groups do not lie in blocks of 32 (GPTQ's desc_act) are quantized again to Q8_0, with a warning.

    GPTQ                qweight int32 [k * bits / 32, n], qzeros int32 [groups, n * bits / 32], scales [groups, n],
                        g_idx int32 [k]: the group of each input; zero = stored + 1 (v1) or stored (gptq_v2)
    AWQ                 qweight int32 [k, n * bits / 32], qzeros int32 [groups, n * bits / 32], scales [groups, n];
                        the nibbles of a word, low to high, are columns 0, 2, 4, 6, 1, 3, 5, 7; the bytes 0, 2, 1, 3
    compressed-tensors  weight_packed int32 [n, k * bits / 32] of q + 2^(bits - 1), weight_scale [n, groups] or [1],
                        weight_zero_point, weight_g_idx; or weight int8 or float8 [n, k] and weight_scale
    fp8                 weight float8_e4m3fn [n, k] and weight_scale or weight_scale_inv (multiplied too): one
                        number, one for each row, or one for each block of 128 x 128
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError, shorten
from octavo.quantization.encode import encode
from octavo.quantization.formats import WeightType
from octavo.quantization.stored_tensor import StoredTensor
from octavo.weights.raw_tensor import FLOAT_TYPES, RawTensor

BLOCK = 32
LOW, HIGH, FOUR, SIGN = np.uint8(0x0F), np.uint8(0xF0), np.uint8(4), np.uint8(0x80)
FP8_BLOCK = 128
ROWS_AT_ONCE = 256  # of a matrix that is quantized again
COMPRESSED_FORMATS = ("dense", "int-quantized", "float-quantized", "naive-quantized", "pack-quantized")
# What belongs to activations or to a quantized KV cache; octavo quantizes these in its own way.
SIDE_TENSORS = (
    ".input_scale", ".input_zero_point", ".output_scale", ".output_zero_point", ".q_scale", ".k_scale", ".v_scale",
    ".activation_scale",
)  # fmt: skip

Make = Callable[[], StoredTensor]
_AWQ_COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)
_AWQ_COLUMN_OF_BYTE = (0, 2, 1, 3)


@dataclass(frozen=True, slots=True)
class Contents:
    """tensors: what makes each tensor, by name. shapes: of each. warnings: whole sentences for the user.

    quantized_by: the method, as the checkpoint calls it.
    """

    tensors: Mapping[str, Make]
    shapes: Mapping[str, tuple[int, ...]]
    warnings: list[str] = field(default_factory=list)
    quantized_by: str | None = None


def plain_and_packed(path: Path, config: Mapping[str, Any], raw: Mapping[str, RawTensor]) -> Contents:
    """The contents of a checkpoint with this config.json and these stored tensors. Raises ModelFileError."""
    settings = _settings(config)
    if settings is None:
        return Contents({name: t.stored for name, t in raw.items()}, {name: t.shape for name, t in raw.items()})
    method = settings.get("quant_method")
    module_reader = METHODS.get(method) if isinstance(method, str) else None
    if module_reader is None:
        raise ModelFileError(
            f"{path} is quantized by {shorten(repr(method))}; supported are {', '.join(METHODS)}: take another "
            "variant of this model, or a GGUF"
        )
    checkpoint = _Checkpoint(path, settings, raw)
    module_reader(checkpoint)
    contents = replace(checkpoint.contents(), quantized_by=method)
    if (
        checkpoint.packed or settings.get("format") == "dense"
    ):  # as compressed-tensors says that only the cache is quantized, or nothing
        return contents
    contents.warnings.append(
        f"config.json of {path} says that the weights are quantized by {method}, but all are plain: they are served as "
        "they are stored. Are these the files that belong to it?"
    )
    return contents


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """`quantization_config`, of the text part where a model has several."""
    for place in (config, config.get("text_config")):
        if isinstance(place, Mapping):
            settings = place.get("quantization_config", place.get("compression_config"))
            if isinstance(settings, Mapping):
                return settings
            if settings is not None:
                raise ModelFileError(f"quantization_config is {shorten(repr(settings))}; it must be a JSON object")
    return None


@dataclass(slots=True)
class _Checkpoint:
    """Collects what each module turns out to be."""

    path: Path
    settings: Mapping[str, Any]
    raw: Mapping[str, RawTensor]
    packed: dict[str, tuple[tuple[int, ...], Make]] = field(default_factory=dict)
    used: set[str] = field(default_factory=set)
    requantized: list[str] = field(default_factory=list)

    def modules(self, suffix: str) -> list[str]:
        """Modules that have a tensor of this name."""
        return [name.removesuffix(suffix) for name in self.raw if name.endswith(suffix)]

    def take(self, module: str, suffix: str) -> RawTensor | None:
        name = module + suffix
        self.used.add(name)
        return self.raw.get(name)

    def need(
        self, module: str, suffix: str, dtypes: Collection[str], shape: tuple[int, ...] | None = None
    ) -> RawTensor:
        """A tensor of the module; its shape is checked if one is given."""
        t = self.take(module, suffix)
        if t is None:
            raise self.error(module, f"lacks {suffix[1:]}")
        if t.dtype not in dtypes:
            raise self.error(module, f"has {suffix[1:]} of the type {t.dtype}; supported: {', '.join(dtypes)}")
        if shape is not None and t.shape != shape:
            raise self.error(module, f"has {suffix[1:]} of shape {list(t.shape)} instead of {list(shape)}")
        return t

    def matrix(self, module: str, suffix: str, dtypes: Collection[str]) -> tuple[RawTensor, int, int]:
        """A tensor of the module that must have two dimensions, and these."""
        t = self.need(module, suffix, dtypes)
        if len(t.shape) != 2 or 0 in t.shape:
            raise self.error(module, f"has {suffix[1:]} of shape {list(t.shape)}; a matrix is needed")
        return t, *t.shape

    def error(self, module: str, problem: str) -> ModelFileError:
        return ModelFileError(f"{self.path}: the quantized matrix {module} {problem}")

    def refuse_unless(self, key: str, *supported: object) -> None:
        value = self.settings.get(key, supported[0])
        if value not in supported:
            raise ModelFileError(
                f"{self.path} has {key} {shorten(repr(value))} in its quantization_config; supported: "
                f"{', '.join(map(str, supported))}"
            )

    def add(self, module: str, shape: tuple[int, int], make: Make) -> None:
        self.packed[f"{module}.weight"] = (shape, make)

    def contents(self) -> Contents:
        tensors: dict[str, Make] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for name, t in self.raw.items():
            if name not in self.used and not name.endswith(SIDE_TENSORS):
                tensors[name], shapes[name] = t.stored, t.shape
        for name, (shape, make) in self.packed.items():
            tensors[name], shapes[name] = make, shape
        warnings = []
        if self.requantized:
            warnings.append(
                f"{len(self.requantized)} matrices, the first is {self.requantized[0]}, have quantization groups that "
                "do not lie in blocks of 32 inputs (desc_act): they are quantized again to Q8_0 while loading, which "
                "takes 8.5 bits a weight and rounds once more; a checkpoint without desc_act is kept as it is"
            )
        return Contents(tensors, shapes, warnings)


# ---- matrices of integer codes ----


@dataclass(frozen=True, slots=True)
class _Codes:
    """A matrix [n, k] of unsigned codes: value = scale * (code - zero), with scale and zero of the input's group.

    codes: [n, k * bits / 8] bytes, of two nibbles the lower is the earlier input. scales: [n, groups].
    zeros: [n, groups], or None for 2^(bits - 1). group_of_input: [k].
    """

    n: int
    k: int
    bits: int
    codes: Callable[[], NDArray[np.uint8]]
    scales: Callable[[], NDArray[np.float32]]
    zeros: Callable[[], NDArray[np.uint8]] | None
    group_of_input: NDArray[np.int64]


def _check_bits(c: _Checkpoint, module: str, bits: int, k: int) -> None:
    if bits not in (4, 8):
        raise c.error(module, f"has {bits} bits a weight; 4 and 8 are supported: take another variant or a GGUF")
    if k % BLOCK:
        raise c.error(module, f"has {k:,} inputs; they must be a multiple of {BLOCK}: take a GGUF of this model")


def _add_codes(c: _Checkpoint, module: str, codes: _Codes, num_groups: int) -> None:
    groups = codes.group_of_input
    if groups.shape != (codes.k,) or groups.min() < 0 or groups.max() >= num_groups:
        raise c.error(module, f"has inputs that belong to none of its {num_groups:,} groups")
    blocks = groups.reshape(-1, BLOCK)
    if (blocks != blocks[:, :1]).any():
        c.requantized.append(module)
        c.add(module, (codes.n, codes.k), partial(_again, codes))
    else:
        c.add(module, (codes.n, codes.k), partial(_blocked, c, module, codes, blocks[:, 0]))


def _even_groups(c: _Checkpoint, module: str, k: int, num_groups: int) -> NDArray[np.int64]:
    """The group of each of k inputs where nothing else is said: equal runs."""
    if num_groups < 1 or k % num_groups:
        raise c.error(module, f"has {num_groups:,} groups for {k:,} inputs")
    return np.arange(k) // (k // num_groups)


def _blocked(c: _Checkpoint, module: str, m: _Codes, block_groups: NDArray[np.int64]) -> StoredTensor:
    """A matrix each of whose blocks of 32 inputs has one scale and zero."""
    middle = 1 << (m.bits - 1)
    # The zeros are one byte for each group: little to read for the smaller format and kernel.
    symmetric = m.zeros is None or bool((m.zeros() == middle).all())
    if symmetric and m.bits == 8 and block_groups.max() == 0:
        return StoredTensor(
            (m.n, m.k),
            WeightType.INT8,
            lambda: (m.codes() ^ SIGN).reshape(-1),
            lambda: m.scales()[:, 0].astype(np.float32),
        )

    def load() -> NDArray[np.uint8]:
        codes = m.codes().reshape(m.n, m.k // BLOCK, -1)
        if m.bits == 4:
            codes = _nibble_blocks(codes)
        elif symmetric:
            codes = codes ^ SIGN
        scales = np.ascontiguousarray(_float16(c, module, m.scales())[:, block_groups])
        head = 2 if symmetric else 4
        blocks = np.empty((m.n, m.k // BLOCK, head + codes.shape[2]), np.uint8)
        blocks[..., :2] = scales.view(np.uint8).reshape(*scales.shape, 2)
        if m.zeros is not None and not symmetric:
            blocks[..., 2] = m.zeros()[:, block_groups]
            blocks[..., 3] = 0
        blocks[..., head:] = codes
        return blocks.reshape(-1)

    kinds = {
        (4, True): WeightType.Q4_0,
        (8, True): WeightType.Q8_0,
        (4, False): WeightType.U4,
        (8, False): WeightType.U8,
    }
    return StoredTensor((m.n, m.k), kinds[m.bits, symmetric], load)


def _again(m: _Codes) -> StoredTensor:
    """A matrix whose groups are scattered, as Q8_0."""

    def load() -> NDArray[np.uint8]:
        codes, scales = m.codes(), m.scales()
        zeros = np.full_like(scales, 1 << (m.bits - 1)) if m.zeros is None else m.zeros().astype(np.float32)
        parts = []
        for first in range(0, m.n, ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            numbers = codes[rows] if m.bits == 8 else _unpack_nibbles(codes[rows])
            values = numbers.astype(np.float32) - zeros[rows][:, m.group_of_input]
            values *= scales[rows][:, m.group_of_input]
            parts.append(encode(values, WeightType.Q8_0))
        return np.concatenate(parts)

    return StoredTensor((m.n, m.k), WeightType.Q8_0, load)


def _unpack_nibbles(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[..., b] -> [..., 2 b], the lower half of each byte first."""
    return np.stack([packed & LOW, packed >> FOUR], axis=-1).reshape(*packed.shape[:-1], -1)


def _nibble_blocks(consecutive: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Blocks [..., 16] whose byte t holds inputs 2 t and 2 t + 1 -> byte j holds inputs j and j + 16."""
    first, second = consecutive[..., :8], consecutive[..., 8:]
    blocks = np.empty_like(consecutive)
    blocks[..., 0::2] = first & LOW | second << FOUR
    blocks[..., 1::2] = first >> FOUR | second & HIGH
    return blocks


def _float16(c: _Checkpoint, module: str, scales: NDArray[np.float32]) -> NDArray[np.float16]:
    with np.errstate(over="ignore"):
        halves = scales.astype("<f2")
    if not np.isfinite(halves).all():
        raise c.error(module, f"has a scale of {scales.flat[np.argmax(~np.isfinite(halves))]}; the limit is 65,504")
    return halves


# ---- GPTQ ----


def _gptq(c: _Checkpoint) -> None:
    c.refuse_unless("checkpoint_format", "gptq", "gptq_v2", None)
    c.refuse_unless("is_marlin_format", False, None)
    one = 0 if c.settings.get("checkpoint_format") == "gptq_v2" else 1
    for module in c.modules(".qweight"):
        weight, words, n = c.matrix(module, ".qweight", ("I32",))
        scales, groups, _ = c.matrix(module, ".scales", FLOAT_TYPES)
        zeros, _, zero_words = c.matrix(module, ".qzeros", ("I32",))
        bits = 32 * zero_words // n
        k = words * 32 // max(bits, 1)
        _check_bits(c, module, bits, k)
        c.need(module, ".scales", FLOAT_TYPES, (groups, n))
        c.need(module, ".qzeros", ("I32",), (groups, n * bits // 32))
        index = c.take(module, ".g_idx")
        codes = _Codes(
            n,
            k,
            bits,
            partial(_gptq_codes, weight),
            partial(_turned, scales),
            partial(_gptq_zeros, zeros, bits, one),
            _even_groups(c, module, k, groups) if index is None else index.integers().astype(np.int64),
        )
        _add_codes(c, module, codes, groups)


def _gptq_codes(weight: RawTensor) -> NDArray[np.uint8]:
    return np.ascontiguousarray(weight.integers().T).view(np.uint8)


def _gptq_zeros(zeros: RawTensor, bits: int, one: int) -> NDArray[np.uint8]:
    packed = np.ascontiguousarray(zeros.integers()).view(np.uint8)
    codes = (packed if bits == 8 else _unpack_nibbles(packed)).T
    return codes + np.uint8(one) & np.uint8((1 << bits) - 1)


def _turned(scales: RawTensor) -> NDArray[np.float32]:
    return scales.stored().values().T


# ---- AWQ ----


def _awq(c: _Checkpoint) -> None:
    for key in ("version", "format"):
        c.refuse_unless(key, "gemm", "GEMM", None)
    for module in c.modules(".qweight"):
        weight, k, words = c.matrix(module, ".qweight", ("I32",))
        scales, groups, n = c.matrix(module, ".scales", FLOAT_TYPES)
        bits = 32 * words // n
        _check_bits(c, module, bits, k)
        if 32 * words != n * bits:
            raise c.error(module, f"has qweight of shape {[k, words]} for {n:,} outputs of {bits} bits")
        zeros = c.need(module, ".qzeros", ("I32",), (groups, words))
        codes = _Codes(
            n,
            k,
            bits,
            partial(_awq_codes if bits == 4 else _awq_bytes, weight),
            partial(_turned, scales),
            partial(_awq_zeros if bits == 4 else _awq_bytes, zeros),
            _even_groups(c, module, k, groups),
        )
        _add_codes(c, module, codes, groups)


def _awq_codes(weight: RawTensor) -> NDArray[np.uint8]:
    """Pairs of inputs from two rows of nibbles along the outputs."""
    k, words = weight.shape
    pairs = np.ascontiguousarray(weight.integers()).view(np.uint8).reshape(k // 2, 2, words, 4)
    even, odd = pairs[:, 0], pairs[:, 1]  # [k / 2, words, 4]
    codes = np.empty((words, 8, k // 2), np.uint8)
    for byte in range(4):
        low, high = _AWQ_COLUMN_OF_NIBBLE[2 * byte : 2 * byte + 2]
        codes[:, low] = (even[..., byte] & LOW | odd[..., byte] << FOUR).T
        codes[:, high] = (even[..., byte] >> FOUR | odd[..., byte] & HIGH).T
    return codes.reshape(8 * words, k // 2)


def _awq_zeros(zeros: RawTensor) -> NDArray[np.uint8]:
    groups, words = zeros.shape
    nibbles = _unpack_nibbles(np.ascontiguousarray(zeros.integers()).view(np.uint8)).reshape(groups, words, 8)
    columns = np.empty_like(nibbles)
    columns[..., list(_AWQ_COLUMN_OF_NIBBLE)] = nibbles
    return columns.reshape(groups, -1).T


def _awq_bytes(packed: RawTensor) -> NDArray[np.uint8]:
    """Of 8 bits: [rows, words] -> [columns, rows], for weights and zeros alike."""
    rows, words = packed.shape
    stored = np.ascontiguousarray(packed.integers()).view(np.uint8).reshape(rows, words, 4)
    columns = np.empty_like(stored)
    columns[..., list(_AWQ_COLUMN_OF_BYTE)] = stored
    return np.ascontiguousarray(columns.reshape(rows, -1).T)


# ---- compressed-tensors and fp8 ----


def _compressed_tensors(c: _Checkpoint) -> None:
    c.refuse_unless("format", *COMPRESSED_FORMATS, "mixed-precision")
    groups = c.settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        kind = group.get("format") if isinstance(group, Mapping) else None
        if kind is not None and kind not in COMPRESSED_FORMATS:
            raise ModelFileError(
                f"{c.path} has matrices in the format {shorten(repr(kind))}; supported: {', '.join(COMPRESSED_FORMATS)}"
            )
    sparsity = c.settings.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        raise ModelFileError(f"{c.path} has sparse weights ({sparsity.get('format')}); only dense ones are supported")
    if c.settings.get("transform_config"):
        raise ModelFileError(f"{c.path} has a transform_config: transforms of activations are not supported")
    for module in c.modules(".weight_packed"):
        _packed_integers(c, module)
    _scaled_weights(c)


def _packed_integers(c: _Checkpoint, module: str) -> None:
    packed, n, words = c.matrix(module, ".weight_packed", ("I32",))
    k = int(c.need(module, ".weight_shape", ("I32", "I64"), (2,)).integers()[1])
    bits = 32 * words // max(k, 1)
    _check_bits(c, module, bits, k)
    if words * 32 != k * bits:
        raise c.error(module, f"has weight_packed of shape {[n, words]} for {k:,} inputs of {bits} bits")
    scales = c.need(module, ".weight_scale", FLOAT_TYPES)
    groups = _num_groups(c, module, scales, n)
    index = c.take(module, ".weight_g_idx")
    group_of = None if index is None else index.integers().astype(np.int64)
    if group_of is None or group_of.size == 0 or group_of.min() < 0:  # -1 stands for none
        group_of = _even_groups(c, module, k, groups)
    zeros = _zero_points(c, module, n, groups, bits)
    codes = _Codes(n, k, bits, lambda: packed.data.reshape(n, 4 * words), partial(_by_row, scales, n), zeros, group_of)
    _add_codes(c, module, codes, groups)


def _num_groups(c: _Checkpoint, module: str, scales: RawTensor, n: int) -> int:
    """Of scales [n, groups], [n] or [1]."""
    if scales.shape in ((1,), (1, 1), (n,)):
        return 1
    if len(scales.shape) != 2 or scales.shape[0] != n or scales.shape[1] < 1:
        raise c.error(module, f"has scales of shape {list(scales.shape)} for {n:,} outputs")
    return scales.shape[1]


def _by_row(scales: RawTensor, n: int) -> NDArray[np.float32]:
    """[n, groups]"""
    values = scales.stored().values()
    columns = values if values.ndim == 2 else values[:, None]
    return np.broadcast_to(columns, (n, columns.shape[1]))


def _zero_points(c: _Checkpoint, module: str, n: int, groups: int, bits: int) -> Callable[[], NDArray[np.uint8]] | None:
    """[n, groups], in the numbering of unsigned codes: stored packed along the outputs, or as int8 around zero."""
    zeros = c.take(module, ".weight_zero_point")
    if zeros is None:
        return None

    def packed() -> NDArray[np.uint8]:
        columns = np.ascontiguousarray(zeros.integers().T).view(np.uint8)
        return (columns if bits == 8 else _unpack_nibbles(columns))[:, :n].T

    def plain() -> NDArray[np.uint8]:
        around = zeros.integers().reshape(-1, groups).astype(np.int16) + (1 << (bits - 1))
        return np.broadcast_to(around.astype(np.uint8), (n, groups))

    if zeros.dtype == "I32" and zeros.shape == (-(-n * bits // 32), groups):
        return packed
    one_group = groups == 1 and zeros.shape in ((n,), (1,), (1, 1))
    if zeros.dtype == "I8" and (one_group or zeros.shape == (n, groups)):
        return plain
    raise c.error(module, f"has zero points {zeros.dtype} {list(zeros.shape)} for [{n:,}, {groups:,}] scales")


def _scaled_weights(c: _Checkpoint) -> None:
    """Modules with an int8 or float8 weight and its scales."""
    for module in c.modules(".weight"):
        if c.raw[f"{module}.weight"].dtype not in ("I8", "F8_E4M3"):
            continue
        weight, n, k = c.matrix(module, ".weight", ("I8", "F8_E4M3"))
        suffix = ".weight_scale_inv" if f"{module}.weight_scale_inv" in c.raw else ".weight_scale"
        scales = c.need(module, suffix, FLOAT_TYPES)
        if weight.dtype == "I8":
            _plain_integers(c, module, weight, scales)
        elif scales.shape in ((1,), (1, 1), (n,), (n, 1)):
            c.add(module, (n, k), partial(_fp8, weight, scales))
        elif scales.shape == (-(-n // FP8_BLOCK), -(-k // FP8_BLOCK)) and k % FP8_BLOCK == 0:
            c.add(module, (n, k), partial(_fp8_blocks, weight, scales))
        else:
            raise c.error(
                module,
                f"is float8 [{n:,}, {k:,}] with scales of shape {list(scales.shape)}; supported are one scale, one for "
                f"each row, and one for each block of {FP8_BLOCK} x {FP8_BLOCK} with inputs a multiple of {FP8_BLOCK}",
            )


def _plain_integers(c: _Checkpoint, module: str, weight: RawTensor, scales: RawTensor) -> None:
    n, k = weight.shape
    _check_bits(c, module, 8, k)
    groups = _num_groups(c, module, scales, n)
    codes = _Codes(
        n,
        k,
        8,
        lambda: weight.data.reshape(n, k) ^ SIGN,
        partial(_by_row, scales, n),
        _zero_points(c, module, n, groups, 8),
        _even_groups(c, module, k, groups),
    )
    _add_codes(c, module, codes, groups)


def _fp8(weight: RawTensor, scales: RawTensor) -> StoredTensor:
    n = weight.shape[0]
    return StoredTensor(
        weight.shape, WeightType.FP8_E4M3, lambda: weight.data, lambda: np.ascontiguousarray(_by_row(scales, n)[:, 0])
    )


def _fp8_blocks(weight: RawTensor, scales: RawTensor) -> StoredTensor:
    n, k = weight.shape

    def load() -> NDArray[np.uint8]:
        rows = np.repeat(scales.stored().values().astype("<f4"), FP8_BLOCK, axis=0)[:n]  # [n, k / 128]
        blocks = np.empty((n, k // FP8_BLOCK, 4 + FP8_BLOCK), np.uint8)
        blocks[..., :4] = rows.view(np.uint8).reshape(*rows.shape, 4)
        blocks[..., 4:] = weight.data.reshape(n, -1, FP8_BLOCK)
        return blocks.reshape(-1)

    return StoredTensor(weight.shape, WeightType.FP8_E4M3_BLOCK, load)


METHODS: dict[str, Callable[[_Checkpoint], None]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed_tensors,
    "fp8": _scaled_weights,
    "fbgemm_fp8": _scaled_weights,
}
