"""Quantized Hugging Face checkpoints against values computed in float64 by each format's own rule.

The packers here are written from the formats' descriptions and share nothing with the reader; compressed-tensors' own
packer makes one file more.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from safetensors.torch import save_file

from octavo.core.errors import ModelFileError
from octavo.quantization.formats import WeightType
from octavo.weights.hf_quantization import METHODS
from octavo.weights.safetensors import HFCheckpoint

RNG = np.random.default_rng


def checkpoint(folder: Path, settings: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> HFCheckpoint:
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": settings}))
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / "model.safetensors")
    return HFCheckpoint.open(folder)


def words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """Packs codes [rows, columns] along the columns into int32 words: nibble i of a word is column order[i] of it."""
    per_word = 32 // bits
    grouped = codes.reshape(len(codes), -1, per_word).astype(np.uint64)
    packed = sum(grouped[:, :, (order or range(per_word))[i]] << np.uint64(bits * i) for i in range(per_word))
    return torch.from_numpy(np.asarray(packed).astype(np.uint32).view(np.int32))


def scales_of(shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.from_numpy(RNG(seed).uniform(0.001, 0.02, size=shape)).to(dtype)


class Grid:
    """Random codes [n, k], scales and zeros [n, groups], and what they stand for."""

    def __init__(
        self, n: int, k: int, group: int, bits: int, *, symmetric: bool, scale_dtype: Any = torch.float16
    ) -> None:
        groups = 1 if group < 0 else k // group
        self.bits, self.groups = bits, groups
        self.codes = RNG(1).integers(0, 1 << bits, size=(n, k))
        self.scales = scales_of((n, groups), 2, scale_dtype)
        self.zeros = RNG(3).integers(0, 1 << bits, size=(n, groups))
        if symmetric:
            self.zeros[:] = 1 << (bits - 1)
        self.group_of = np.arange(k) // (k // groups)

    def values(self) -> np.ndarray:
        scales = self.scales.double().numpy()
        return (self.codes - self.zeros[:, self.group_of]) * scales[:, self.group_of]

    def gptq(self, *, version: int = 1, g_idx: bool = True) -> dict[str, torch.Tensor]:
        stored_zeros = (self.zeros - (version == 1)) % (1 << self.bits)
        tensors = {
            "qweight": words(self.codes, self.bits).T,
            "qzeros": words(stored_zeros.T, self.bits),
            "scales": self.scales.T,
        }
        if g_idx:
            tensors["g_idx"] = torch.from_numpy(self.group_of.astype(np.int32))
        return {f"m.{name}": t for name, t in tensors.items()}


def assert_stands_for(found: HFCheckpoint, kind: WeightType, want: np.ndarray, tolerance: float = 1e-6) -> None:
    assert found.shapes["m.weight"] == want.shape
    stored = found.tensor("m.weight")
    assert (stored.type, stored.shape) == (kind, want.shape)
    np.testing.assert_allclose(stored.values(), want, rtol=tolerance, atol=tolerance * np.abs(want).max())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 64, 128, -1])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("version", [1, 2])
def test_gptq(tmp_path: Path, bits: int, group: int, symmetric: bool, version: int) -> None:
    grid = Grid(40, 256, group, bits, symmetric=symmetric)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": symmetric, "desc_act": False}
    if version == 2:
        settings["checkpoint_format"] = "gptq_v2"
    found = checkpoint(tmp_path, settings, grid.gptq(version=version, g_idx=version == 1) | {"m.bias": torch.ones(40)})
    if symmetric:
        kind = WeightType.Q4_0 if bits == 4 else WeightType.INT8 if group < 0 else WeightType.Q8_0
    else:
        kind = WeightType.U4 if bits == 4 else WeightType.U8
    assert_stands_for(found, kind, grid.values())
    assert list(found.shapes) == ["m.bias", "m.weight"]
    assert found.warnings == []


def test_gptq_keeps_blocks_whose_groups_come_in_another_order(tmp_path: Path) -> None:
    grid = Grid(8, 256, 32, 4, symmetric=False)
    grid.group_of = np.repeat(RNG(0).permutation(8), 32)
    found = checkpoint(tmp_path, {"quant_method": "gptq", "bits": 4, "desc_act": True}, grid.gptq())
    assert_stands_for(found, WeightType.U4, grid.values())
    assert found.warnings == []


@pytest.mark.parametrize("bits", [4, 8])
def test_gptq_with_scattered_groups_becomes_q8_0_and_says_so(tmp_path: Path, bits: int) -> None:
    grid = Grid(304, 256, 64, bits, symmetric=False)
    grid.group_of = RNG(0).permutation(grid.group_of)
    found = checkpoint(tmp_path, {"quant_method": "gptq", "bits": bits, "desc_act": True}, grid.gptq())
    assert_stands_for(found, WeightType.Q8_0, grid.values(), 1 / 200)
    (warning,) = found.warnings
    assert warning.startswith("1 matrices, the first is m, have quantization groups")
    assert "desc_act" in warning


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("symmetric", [True, False])
def test_awq(tmp_path: Path, bits: int, group: int, symmetric: bool) -> None:
    grid = Grid(48, 256, group, bits, symmetric=symmetric)
    order = (0, 2, 4, 6, 1, 3, 5, 7) if bits == 4 else (0, 2, 1, 3)
    tensors = {
        "m.qweight": words(grid.codes.T, bits, order),
        "m.qzeros": words(grid.zeros.T, bits, order),
        "m.scales": grid.scales.T,
    }
    settings = {"quant_method": "awq", "bits": bits, "group_size": group, "zero_point": True, "version": "gemm"}
    packed = (WeightType.Q4_0, WeightType.U4) if bits == 4 else (WeightType.Q8_0, WeightType.U8)
    kind = packed[not symmetric]
    assert_stands_for(checkpoint(tmp_path, settings, tensors), kind, grid.values())


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("group", [32, 128, -1])
@pytest.mark.parametrize("zeros", [None, "packed", "plain"])
def test_compressed_tensors_packed(tmp_path: Path, bits: int, group: int, zeros: str | None) -> None:
    grid = Grid(24, 256, group, bits, symmetric=zeros is None, scale_dtype=torch.bfloat16)
    tensors = {
        "m.weight_packed": words(grid.codes, bits),
        "m.weight_scale": grid.scales,
        "m.weight_shape": torch.tensor([24, 256]),
        "m.input_scale": torch.ones(1),
    }
    if zeros == "packed":
        tensors["m.weight_zero_point"] = words(grid.zeros.T, bits).T
    elif zeros == "plain":
        tensors["m.weight_zero_point"] = torch.from_numpy((grid.zeros - (1 << (bits - 1))).astype(np.int8))
    found = checkpoint(tmp_path, {"quant_method": "compressed-tensors", "format": "pack-quantized"}, tensors)
    if zeros is None:
        kind = WeightType.Q4_0 if bits == 4 else WeightType.INT8 if group < 0 else WeightType.Q8_0
    else:
        kind = WeightType.U4 if bits == 4 else WeightType.U8
    assert_stands_for(found, kind, grid.values())
    assert list(found.shapes) == ["m.weight"]


def test_compressed_tensors_group_index_is_used_unless_it_says_none(tmp_path: Path) -> None:
    grid = Grid(8, 128, 32, 4, symmetric=True)
    tensors = {"m.weight_packed": words(grid.codes, 4), "m.weight_scale": grid.scales}
    tensors["m.weight_shape"] = torch.tensor([8, 128], dtype=torch.int32)
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    none = checkpoint(tmp_path, settings, tensors | {"m.weight_g_idx": torch.full((128,), -1, dtype=torch.int32)})
    assert_stands_for(none, WeightType.Q4_0, grid.values())
    grid.group_of = RNG(0).permutation(grid.group_of)
    index = torch.from_numpy(grid.group_of.astype(np.int32))
    scattered = checkpoint(tmp_path, settings, tensors | {"m.weight_g_idx": index})
    assert_stands_for(scattered, WeightType.Q8_0, grid.values(), 1 / 200)


@pytest.mark.parametrize("shape", [(24, 1), (24,), (1,), (24, 4)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_tensors_int8(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    codes = RNG(0).integers(-128, 128, size=(24, 128)).astype(np.int8)
    scales = scales_of(shape, 1, dtype)
    tensors = {"m.weight": torch.from_numpy(codes), "m.weight_scale": scales}
    found = checkpoint(tmp_path, {"quant_method": "compressed-tensors", "format": "int-quantized"}, tensors)
    wide = np.broadcast_to(
        scales.double().numpy().reshape(-1, shape[1] if len(shape) > 1 else 1),
        (24, shape[-1] if shape == (24, 4) else 1),
    )
    want = codes * np.repeat(wide, 128 // wide.shape[1], axis=1)
    # A scale for each row stays float32; one for each group becomes float16.
    kind, tolerance = (WeightType.Q8_0, 2.0**-11) if shape == (24, 4) else (WeightType.INT8, 1e-6)
    assert_stands_for(found, kind, want, tolerance)


FP8_SCALES = {"weight_scale": [(1,), (), (40,), (40, 1)], "weight_scale_inv": [(1,), (1, 2), (40, 1)]}


@pytest.mark.parametrize(("name", "shape"), [(name, shape) for name, shapes in FP8_SCALES.items() for shape in shapes])
@pytest.mark.parametrize("method", ["fp8", "compressed-tensors", "fbgemm_fp8"])
def test_fp8(tmp_path: Path, method: str, name: str, shape: tuple[int, ...]) -> None:
    weight = torch.from_numpy(RNG(0).normal(size=(40, 256))).to(torch.float8_e4m3fn)
    scales = scales_of(shape, 1, torch.float32)
    found = checkpoint(tmp_path, {"quant_method": method}, {"m.weight": weight, f"m.{name}": scales})
    wide = scales.double().numpy().reshape((-1, shape[1]) if len(shape) == 2 else (-1, 1))
    want = weight.double().numpy() * np.repeat(np.broadcast_to(wide, (40, wide.shape[1])), 256 // wide.shape[1], axis=1)
    assert_stands_for(found, WeightType.FP8_E4M3_BLOCK if shape == (1, 2) else WeightType.FP8_E4M3, want)


def test_fp8_blocks_may_end_in_the_middle_of_the_outputs(tmp_path: Path) -> None:
    weight = torch.from_numpy(RNG(0).normal(size=(300, 256))).to(torch.float8_e4m3fn)
    scales = scales_of((3, 2), 1, torch.bfloat16)
    settings = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    found = checkpoint(tmp_path, settings, {"m.weight": weight, "m.weight_scale_inv": scales})
    wide = np.repeat(np.repeat(scales.double().numpy(), 128, axis=0)[:300], 128, axis=1)
    assert_stands_for(found, WeightType.FP8_E4M3_BLOCK, weight.double().numpy() * wide)


def test_modules_that_were_left_alone_are_plain(tmp_path: Path) -> None:
    grid = Grid(16, 64, 32, 4, symmetric=True)
    plain = {"lm_head.weight": torch.randn(8, 64).bfloat16(), "norm.weight": torch.ones(64)}
    found = checkpoint(tmp_path, {"quant_method": "gptq", "bits": 4}, grid.gptq() | plain)
    assert found.tensor("lm_head.weight").type == WeightType.BF16
    assert found.tensor("norm.weight").type == WeightType.F32
    assert set(found.shapes) == {"lm_head.weight", "norm.weight", "m.weight"}


def test_scales_that_float16_cannot_hold_are_rounded_or_refused(tmp_path: Path) -> None:
    grid = Grid(16, 64, 32, 4, symmetric=True, scale_dtype=torch.float32)
    settings = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    tensors = {"m.weight_packed": words(grid.codes, 4), "m.weight_shape": torch.tensor([16, 64])}
    found = checkpoint(tmp_path, settings, tensors | {"m.weight_scale": grid.scales})
    assert_stands_for(found, WeightType.Q4_0, grid.values(), 2.0**-11)
    found = checkpoint(tmp_path, settings, tensors | {"m.weight_scale": torch.full((16, 2), 1e6)})
    with pytest.raises(ModelFileError, match=r"m has a scale of 1000000.0; the limit is 65,504"):
        found.tensor("m.weight").load()


GPTQ = {"quant_method": "gptq", "bits": 4}
CT = {"quant_method": "compressed-tensors"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "method": ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'; supported are gptq, awq, compressed"),
    "no method": ({"bits": 4}, "quantized by None"),
    "odd method": ({"quant_method": ["gptq"]}, r"quantized by \['gptq'\]"),
    "marlin": ({**GPTQ, "checkpoint_format": "marlin"}, "checkpoint_format 'marlin'.*supported: gptq"),
    "marlin flag": ({**GPTQ, "is_marlin_format": True}, "is_marlin_format True"),
    "awq gemv": ({"quant_method": "awq", "version": "gemv"}, "version 'gemv'"),
    "nvfp4": ({**CT, "format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized'.*int-quantized"),
    "marlin 2:4": ({**CT, "format": "marlin-24"}, "format 'marlin-24'"),
    "mixed": ({**CT, "config_groups": {"a": {"format": "mxfp4-pack-quantized"}}}, "'mxfp4-pack-quantized'; supported"),
    "sparse": ({**CT, "sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse weights"),
    "transforms": ({**CT, "transform_config": {"u": 1}}, "transforms of activations"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_refused_by_its_name(tmp_path: Path, case: str) -> None:
    settings, message = REFUSED[case]
    with pytest.raises(ModelFileError, match=message):
        checkpoint(tmp_path, settings, {"m.weight": torch.ones(32, 32)})


def test_settings_that_are_no_object_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": 4}')
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ModelFileError, match="quantization_config is 4; it must be a JSON object"):
        HFCheckpoint.open(tmp_path)


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def half(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.float16)


FP8 = torch.float8_e4m3fn
DAMAGED: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor], str]] = {
    "no zeros": (GPTQ, {"qweight": int32(8, 16), "scales": half(2, 16)}, "matrix m lacks qzeros"),
    "three bits": (GPTQ, {"qweight": int32(6, 32), "scales": half(2, 32), "qzeros": int32(2, 3)}, "3 bits a weight; 4"),
    "awq of sixteen bits": (
        {"quant_method": "awq"},
        {"qweight": int32(64, 16), "scales": half(2, 32), "qzeros": int32(2, 16)},
        "16 bits a weight; 4",
    ),
    "half a block": (GPTQ, {"qweight": int32(2, 16), "scales": half(1, 16), "qzeros": int32(1, 2)}, "has 16 inputs"),
    "scales": (GPTQ, {"qweight": int32(8, 16), "scales": half(2, 8), "qzeros": int32(2, 2)}, "scales of shape"),
    "zeros": (GPTQ, {"qweight": int32(8, 16), "scales": half(2, 16), "qzeros": int32(3, 2)}, "qzeros of shape"),
    "groups": (GPTQ, {"qweight": int32(8, 16), "scales": half(3, 16), "qzeros": int32(3, 2)}, "3 groups for 64 inputs"),
    "empty": (GPTQ, {"qweight": int32(0, 16), "scales": half(2, 16), "qzeros": int32(2, 2)}, "a matrix is needed"),
    "a vector": (GPTQ, {"qweight": int32(8), "scales": half(2, 16), "qzeros": int32(2, 2)}, "a matrix is needed"),
    "type": (GPTQ, {"qweight": int32(8, 16).float()}, "qweight of the type F32; supported: I32"),
    "index": (
        GPTQ,
        {"qweight": int32(8, 16), "scales": half(2, 16), "qzeros": int32(2, 2), "g_idx": int32(64) + 2},
        "belong to none of its 2 groups",
    ),
    "short index": (
        GPTQ,
        {"qweight": int32(8, 16), "scales": half(2, 16), "qzeros": int32(2, 2), "g_idx": int32(63)},
        "belong to none of its 2 groups",
    ),
    "float index": (
        GPTQ,
        {"qweight": int32(8, 16), "scales": half(2, 16), "qzeros": int32(2, 2), "g_idx": half(64)},
        "g_idx has the type F16 where integers",
    ),
    "packed shape": (
        CT,
        {"weight_packed": int32(4, 8), "weight_scale": half(4, 1), "weight_shape": torch.tensor([4, 2**62])},
        "0 bits a weight",
    ),
    "negative shape": (
        CT,
        {"weight_packed": int32(4, 8), "weight_scale": half(4, 1), "weight_shape": torch.tensor([4, -64])},
        "256 bits a weight",
    ),
    "packed zeros": (
        CT,
        {
            "weight_packed": int32(4, 8),
            "weight_scale": half(4, 1),
            "weight_shape": torch.tensor([4, 64]),
            "weight_zero_point": int32(2, 1),
        },
        "zero points I32",
    ),
    "fp8 blocks": (CT, {"weight": half(256, 96).to(FP8), "weight_scale": half(2, 1)}, r"float8 \[256, 96\]"),
    "fp8 without scale": (CT, {"weight": half(32, 32).to(FP8)}, "lacks weight_scale"),
    "fp8 stack": (CT, {"weight": half(2, 32, 32).to(FP8), "weight_scale": half(1)}, "a matrix is needed"),
    "int8 scale": (CT, {"weight": half(32, 32).to(torch.int8), "weight_scale": half(16, 1)}, "for 32 outputs"),
    "scale type": (CT, {"weight": half(32, 32).to(FP8), "weight_scale": int32(1)}, "weight_scale of the type I32"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_a_packed_matrix_that_does_not_fit_together_is_refused(tmp_path: Path, case: str) -> None:
    settings, tensors, message = DAMAGED[case]
    with pytest.raises(ModelFileError, match=message):
        checkpoint(tmp_path, settings, {f"m.{name}": t for name, t in tensors.items()})


def test_compressed_tensors_own_packing(tmp_path: Path) -> None:
    codes = torch.from_numpy(RNG(0).integers(-8, 8, size=(20, 128)).astype(np.int8))
    zeros = torch.from_numpy(RNG(1).integers(-8, 8, size=(20, 4)).astype(np.int8))
    scales = scales_of((20, 4), 1)
    tensors = {
        "m.weight_packed": pack_to_int32(codes, 4),
        "m.weight_scale": scales,
        "m.weight_shape": torch.tensor([20, 128]),
        "m.weight_zero_point": pack_to_int32(zeros, 4, packed_dim=0),
    }
    found = checkpoint(tmp_path, CT, tensors)
    wide_zeros, wide_scales = (np.repeat(t.double().numpy(), 32, axis=1) for t in (zeros, scales))
    assert_stands_for(found, WeightType.U4, (codes.double().numpy() - wide_zeros) * wide_scales)


def test_the_method_is_known_of_a_text_part_too(tmp_path: Path) -> None:
    quantized = {"quant_method": "fp8"}
    for config, method in (({"text_config": {"quantization_config": quantized}}, "fp8"), ({}, None)):
        (tmp_path / "config.json").write_text(json.dumps(config))
        save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
        assert HFCheckpoint.open(tmp_path).quantized_by == method


@pytest.mark.parametrize("method", METHODS)
def test_plain_weights_that_are_said_to_be_quantized_are_a_warning(tmp_path: Path, method: str) -> None:
    found = checkpoint(tmp_path, {"quant_method": method, "bits": 4}, {"m.weight": torch.ones(4, 64)})
    [warning] = found.warnings
    assert f"quantized by {method}, but all are plain" in warning


def test_plain_weights_that_are_said_to_be_plain_are_none(tmp_path: Path) -> None:
    settings = {"quant_method": "compressed-tensors", "format": "dense"}
    assert checkpoint(tmp_path, settings, {"m.weight": torch.ones(4, 64)}).warnings == []
