"""StableLM against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import StableLmConfig, StableLmForCausalLM

from octavo.core.errors import ModelFileError
from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, check_family, hf_files, without

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * head_dim))
    # Files of models whose config.json lacks the entry say true, whatever the layers are.
    writer.add_parallel_residual(True)


FORM = GGUFForm("stablelm", describe, rms=False)

CASES = {
    "blocks in a row, biases": Case(
        StableLmForCausalLM, StableLmConfig(**SIZES, num_key_value_heads=4, use_qkv_bias=True), FORM
    ),
    "side by side, grouped queries, half rotated": Case(
        StableLmForCausalLM,
        StableLmConfig(**SIZES, num_key_value_heads=2, use_parallel_residual=True, partial_rotary_factor=0.5),
        FORM,
    ),
    # llama.cpp wants a head.
    "tied": Case(StableLmForCausalLM, StableLmConfig(**SIZES, num_key_value_heads=4, tie_word_embeddings=True), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def test_config_as_files_on_the_hub_have_it_means_the_same() -> None:
    files = hf_files(CASES["blocks in a row, biases"])
    old = without(files.config, "rope_parameters", "use_parallel_residual")
    old |= {"rope_theta": 10000, "partial_rotary_factor": 0.25}
    assert build_model(replace(files, config=old)) == build_model(files)


def test_norms_of_single_heads_are_refused() -> None:
    files = hf_files(CASES["blocks in a row, biases"])
    with pytest.raises(ModelFileError, match="qk_layernorm is True"):
        build_model(replace(files, config={**files.config, "qk_layernorm": True}))
