"""OPT against transformers; llama.cpp does not know it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import OPTConfig, OPTForCausalLM

from octavo.core.errors import ModelFileError
from octavo.models.registry import build_model
from tests.models.parity import Case, check_family, hf_files, without

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 44,
    "ffn_dim": 75,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
}

CASES = {
    "norms first": Case(OPTForCausalLM, OPTConfig(**SIZES, word_embed_proj_dim=44), None),
    "norms last, narrow embeddings": Case(
        OPTForCausalLM, OPTConfig(**SIZES, word_embed_proj_dim=20, do_layer_norm_before=False), None
    ),
    "no biases, no last norm, untied, gelu": Case(
        OPTForCausalLM,
        OPTConfig(
            **SIZES, word_embed_proj_dim=44, enable_bias=False, _remove_final_layer_norm=True,
            tie_word_embeddings=False, activation_function="gelu",
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def test_config_and_names_as_files_on_the_hub_have_them_mean_the_same() -> None:
    files = hf_files(CASES["norms first"])
    old = without(files.config, "enable_bias", "layer_norm_elementwise_affine", "_remove_final_layer_norm")
    shapes = {name.removeprefix("model."): shape for name, shape in files.shapes.items()}
    assert build_model(replace(files, config=old, shapes=shapes)).graph == build_model(files).graph


def test_norms_without_weights_are_refused() -> None:
    files = hf_files(CASES["norms first"])
    with pytest.raises(ModelFileError, match="layer_norm_elementwise_affine is False"):
        build_model(replace(files, config={**files.config, "layer_norm_elementwise_affine": False}))
