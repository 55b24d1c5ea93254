"""A model file whose settings or tensors do not fit is refused with the place, quickly, whatever the numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.core.errors import ModelFileError
from octavo.models.registry import build_model
from octavo.weights.gguf import GGUFFile
from tests.tiny_models import TinyLlama, write_tiny_llama

HUGE = 2**31 - 1
Shapes = dict[str, tuple[int, ...]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Shapes]:
    path: Path = write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyLlama())
    with GGUFFile.open(path) as file:
        return dict(file.metadata), {name: t.shape for name, t in file.tensors.items()}


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", HUGE, "block_count is 2147483647; it must be a whole number from 1 to 20"),
        ("block_count", 3, "blk.2.attn_norm.weight is missing"),
        ("block_count", 1, "9 tensors that octavo's llama does not know, the first is blk.1."),
        ("attention.head_count", HUGE, "blk.0.attn_q.weight has shape"),
        ("attention.head_count", 0, "head_count is 0"),
        ("attention.head_count", [2, 2], r"head_count is \[2, 2\]; it must be a whole number"),
        ("attention.head_count_kv", 3, "num_heads is a multiple of num_kv_heads"),
        ("attention.key_length", HUGE, "key_length is 2147483647"),
        ("attention.value_length", 16, "value_length is 16; only 32 is supported"),
        ("rope.dimension_count", HUGE, "dimension_count is 2147483647; it must be a whole number from 1 to 32"),
        ("rope.dimension_count", 34, "from 1 to 32"),
        ("rope.dimension_count", 31, "it must be even"),
        ("rope.freq_base", float("nan"), "freq_base is nan; it must be a positive number"),
        ("rope.scaling.type", "yarn", "rope.scaling.type is 'yarn'; only 'none' is supported"),
        ("rope.scaling.factor", 4.0, "rope.scaling.factor is 4.0"),
        ("rope.scale_linear", 4.0, "rope.scale_linear is 4.0"),
        ("expert_count", 8, "expert_count is 8"),
        ("attention.layer_norm_rms_epsilon", None, "the file lacks llama.attention.layer_norm_rms_epsilon"),
        ("context_length", 2**31, "context_length is 2147483648"),
        ("feed_forward_length", 97, "ffn_gate.weight has shape"),
    ],
)
def test_settings_that_do_not_fit_are_refused(
    tiny: tuple[dict[str, Any], Shapes], key: str, value: Any, message: str
) -> None:
    metadata, shapes = tiny
    with pytest.raises(ModelFileError, match=message):
        build_model({**metadata, f"llama.{key}": value}, shapes)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.1.attn_output.bias", (64,), "the first is blk.1.attn_output.bias"),
        ("blk.1.attn_q.bias", (64,), "the first is blk.1.attn_q.bias"),
        ("rope_freqs.weight", (16,), "Llama 3's rope scaling is not supported"),
        ("token_embd.weight", (300, 64, 1), "a matrix"),
        ("token_embd.weight", (300, 65), "needed"),
        ("token_embd.weight", (299, 64), "vocabulary has 300 tokens, but token_embd.weight has 299 rows"),
        ("blk.0.attn_norm.weight", (1, 64), "needed"),
        ("blk.0.ffn_down.weight", (1, 64, 96), "needed"),
    ],
)
def test_tensors_that_do_not_fit_or_would_be_left_out_are_refused(
    tiny: tuple[dict[str, Any], Shapes], name: str, shape: tuple[int, ...], message: str
) -> None:
    metadata, shapes = tiny
    with pytest.raises(ModelFileError, match=message):
        build_model(metadata, {**shapes, name: shape})


def test_an_unknown_architecture_is_refused_with_those_there_are(tiny: tuple[dict[str, Any], Shapes]) -> None:
    with pytest.raises(ModelFileError, match="architecture 'mamba' is not supported; supported: llama"):
        build_model({**tiny[0], "general.architecture": "mamba"}, tiny[1])
