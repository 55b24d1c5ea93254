"""Hugging Face folders against what the `safetensors` library writes from PyTorch tensors."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from octavo.core.errors import ModelFileError
from octavo.quantization.formats import WeightType
from octavo.weights.open_checkpoint import open_checkpoint
from octavo.weights.safetensors import HFCheckpoint

FLOATS = {torch.float32: WeightType.F32, torch.float16: WeightType.F16, torch.bfloat16: WeightType.BF16}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "hidden_size": 8}')
    return tmp_path


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def write_shards(folder: Path, shards: list[dict[str, torch.Tensor]]) -> None:
    index = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / name)
        index |= dict.fromkeys(shard, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_single_file_gives_the_bytes_of_each_float_type(folder: Path, dtype: torch.dtype) -> None:
    want = {"a.weight": random(5, 8, dtype=dtype), "b": random(3, seed=1, dtype=dtype), "c": random(2, 3, 4).to(dtype)}
    save_file(want, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    assert checkpoint.kind == "hf"
    assert checkpoint.config["hidden_size"] == 8
    assert checkpoint.shapes == {name: tuple(t.shape) for name, t in want.items()}
    for name, tensor in want.items():
        stored = checkpoint.tensor(name)
        assert stored.type == FLOATS[dtype]
        assert stored.load().dtype == np.uint8
        assert not stored.load().flags.owndata  # a view of the file
        np.testing.assert_array_equal(stored.values(), tensor.float().numpy())


def test_shards_are_read_through_the_index(folder: Path) -> None:
    write_shards(folder, [{"a": random(2, 4)}, {"b": random(3, seed=1), "c": random(1, seed=2)}])
    checkpoint = HFCheckpoint.open(folder)
    assert set(checkpoint.shapes) == {"a", "b", "c"}
    np.testing.assert_array_equal(checkpoint.tensor("b").values(), random(3, seed=1).numpy())


def test_data_outlives_close_and_released_pages_come_back(folder: Path) -> None:
    save_file({"a": random(64, 64)}, folder / "model.safetensors")
    checkpoint = HFCheckpoint.open(folder)
    data = checkpoint.tensor("a").load()
    before = data.copy()
    checkpoint.release_pages()
    checkpoint.close()
    checkpoint.close()
    checkpoint.release_pages()
    np.testing.assert_array_equal(data, before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.bool, torch.float8_e5m2])
def test_other_types_are_refused_by_name_when_they_are_asked_for(folder: Path, dtype: torch.dtype) -> None:
    save_file({"mask": torch.ones(2, 4).to(dtype), "a": random(2)}, folder / "model.safetensors")
    checkpoint = HFCheckpoint.open(folder)  # a model that does not ask for it may ignore it
    assert checkpoint.shapes["mask"] == (2, 4)
    with pytest.raises(ModelFileError, match=r"tensor mask has the type .*F32, F16, BF16"):
        checkpoint.tensor("mask")


def test_a_scalar_counts_as_a_vector_of_one(folder: Path) -> None:
    save_file({"a": torch.tensor(2.5)}, folder / "model.safetensors")
    assert HFCheckpoint.open(folder).tensor("a").values().tolist() == [2.5]


def test_a_missing_shard_is_named(folder: Path) -> None:
    write_shards(folder, [{"a": random(2)}, {"b": random(3)}, {"c": random(3)}])
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelFileError, match=r"lacks model-00002-of-00003.safetensors, one of 3"):
        open_checkpoint(folder)


def test_of_a_tensor_in_two_shards_the_index_says_which_is_meant(folder: Path) -> None:
    write_shards(folder, [{"a": random(2)}, {"b": random(3), "a": random(2, seed=9)}])
    np.testing.assert_array_equal(HFCheckpoint.open(folder).tensor("a").values(), random(2, seed=9).numpy())
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    del index["weight_map"]["a"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": {"b": "x.safetensors"}}))
    with pytest.raises(ModelFileError, match=r"lacks x.safetensors"):
        HFCheckpoint.open(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "must be a JSON object"),
        ({}, "lacks a weight_map"),
        ({"weight_map": []}, "lacks a weight_map"),
        ({"weight_map": {"a": 3}}, "lacks a weight_map"),
        ({"weight_map": {"a": "../x.safetensors"}}, "'../x.safetensors'.*must be a safetensors file beside"),
        ({"weight_map": {"a": "/etc/passwd"}}, "must be a safetensors file beside"),
        ({"weight_map": {"a": "a.bin"}}, "must be a safetensors file beside"),
        ({"weight_map": {"zz": "a.safetensors"}}, "says that a.safetensors has the tensor 'zz'"),
        ({"weight_map": {"a": "gone.safetensors"}}, "lacks gone.safetensors"),
    ],
)
def test_an_index_that_points_nowhere_or_outside_is_refused(folder: Path, index: object, message: str) -> None:
    save_file({"a": random(2)}, folder / "a.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelFileError, match=message):
        open_checkpoint(folder)


def test_what_a_folder_has_instead_of_a_model_is_said(tmp_path: Path) -> None:
    def refused(message: str) -> None:
        with pytest.raises(ModelFileError, match=message):
            open_checkpoint(tmp_path)

    refused("neither .*safetensors nor .*gguf")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    refused("pickle.*save_pretrained")
    for name in ("q4.gguf", "q8-00001-of-00002.gguf", "q8-00002-of-00002.gguf", "mmproj-f16.gguf"):
        (tmp_path / name).write_bytes(b"x")
    refused(r"2 GGUF models: .*\(q4.gguf, q8-00001-of-00002.gguf\)")
    (tmp_path / "q8-00001-of-00002.gguf").unlink()
    (tmp_path / "q8-00002-of-00002.gguf").unlink()
    refused("q4.gguf is not a GGUF file")
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": random(2)}, tmp_path / name)
    refused("config.json")
    (tmp_path / "config.json").write_text("[1]")
    refused(r"config.json holds \[1\]; it must be a JSON object")
    (tmp_path / "config.json").write_text("{")
    refused("config.json is not JSON")
    (tmp_path / "config.json").write_text("{}")
    refused("2 safetensors files but no model.safetensors.index.json")
    with pytest.raises(ModelFileError, match="give the folder"):
        open_checkpoint(tmp_path / "x.safetensors")
    with pytest.raises(ModelFileError, match="No such file"):
        open_checkpoint(tmp_path / "gone")


@pytest.mark.parametrize("name", ["model.safetensors", "model.gguf"])
def test_a_pointer_of_git_lfs_is_called_so(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:1234\nsize 5000000\n")
    with pytest.raises(ModelFileError, match=f"pointer of Git LFS.*run 'git lfs pull' in {tmp_path}"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer.model"])
def test_a_file_beside_the_weights_is_no_model(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("{}")
    with pytest.raises(ModelFileError, match=f"{name} is one file of a model: give the folder {tmp_path}"):
        open_checkpoint(tmp_path / name)
