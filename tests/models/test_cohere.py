"""Command R against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM

from octavo.core.errors import ModelFileError
from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, check_family, hf_files, without

DIMENSIONS: dict[str, Any] = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "logit_scale": 0.3, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_logit_scale(config.logit_scale)
    writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)


GGUF = GGUFForm("command-r", describe, rms=False)


def cohere(form: GGUFForm | None = GGUF, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
    return Case(CohereForCausalLM, CohereConfig(**{**DIMENSIONS, **settings}), form, dtype=dtype)


CASES = {
    "tied": cohere(),
    "norms of heads": cohere(use_qk_norm=True),
    "norms of heads, bfloat16": cohere(dtype=torch.bfloat16, use_qk_norm=True),
    "norms of heads, one KV head": cohere(use_qk_norm=True, num_key_value_heads=1),
    # llama.cpp's converter knows no head of this family.
    "untied, biases": cohere(None, tie_word_embeddings=False, attention_bias=True),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def test_config_as_files_on_the_hub_have_it_means_the_same() -> None:
    files = hf_files(cohere(logit_scale=0.0625))
    old = without(files.config, "logit_scale", "layer_norm_eps", "tie_word_embeddings", "use_qk_norm", "attention_bias")
    assert build_model(replace(files, config=old)) == build_model(files)


def test_the_context_is_as_long_as_the_model_was_trained_for() -> None:
    files = hf_files(cohere())
    longer = build_model(replace(files, config={**files.config, "model_max_length": 131072}))
    assert longer.max_position_embeddings == 131072
    assert longer.graph == build_model(files).graph


def test_norms_of_heads_are_where_the_settings_say() -> None:
    files = hf_files(cohere(use_qk_norm=True))
    with pytest.raises(ModelFileError, match=r"the first is model\.layers\.0\.self_attn\.[kq]_norm\.weight"):
        build_model(replace(files, config={**files.config, "use_qk_norm": False}))
    name = "model.layers.1.self_attn.k_norm.weight"
    with pytest.raises(ModelFileError, match=rf"{name} .for blk.1.attn_k_norm.weight. has shape \[16, 2\]; \[2, 16\]"):
        build_model(replace(files, shapes={**files.shapes, name: (16, 2)}))
