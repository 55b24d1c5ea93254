"""Falcon against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import FalconConfig, FalconForCausalLM

from octavo.core.errors import ModelFileError
from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, State, check_family, hf_files

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip


def kv_heads(config: Any) -> int:
    return config.num_kv_heads if config.new_decoder_architecture else 1


def queries_then_keys_then_values(state: State, config: Any) -> State:
    kv, head_dim = kv_heads(config), config.hidden_size // config.num_attention_heads

    def reordered(name: str, value: Any) -> Any:
        if ".query_key_value." not in name:
            return value
        by_group = value.reshape(kv, -1, head_dim, *value.shape[1:])
        parts = (by_group[:, :-2], by_group[:, -2], by_group[:, -1])
        return np.concatenate([part.reshape(-1, *value.shape[1:]) for part in parts])

    return {name: reordered(name, value) for name, value in state.items()}


FORM = GGUFForm("falcon", reorder=queries_then_keys_then_values, rms=False, kv_heads=kv_heads)

CASES = {
    "7B": Case(FalconForCausalLM, FalconConfig(**SIZES), FORM),
    "40B": Case(FalconForCausalLM, FalconConfig(**SIZES, num_kv_heads=2, new_decoder_architecture=True), FORM),
    "11B, biases, untied, other width": Case(
        FalconForCausalLM,
        FalconConfig(
            **SIZES, num_kv_heads=2, new_decoder_architecture=True, num_ln_in_parallel_attn=1, bias=True,
            ffn_hidden_size=75, tie_word_embeddings=False,
        ),
        None,
    ),
    "a key for each query": Case(FalconForCausalLM, FalconConfig(**SIZES, multi_query=False, bias=True), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def test_config_as_files_on_the_hub_have_it_means_the_same() -> None:
    files = hf_files(Case(FalconForCausalLM, FalconConfig(**{**SIZES, "max_position_embeddings": 2048}), None))
    old = {
        "model_type": "falcon", "alibi": False, "bias": False, "hidden_size": 64, "layer_norm_epsilon": 1e-5,
        "multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 4, "num_hidden_layers": 2,
        "parallel_attn": True, "vocab_size": 101,
    }  # fmt: skip
    stored = {**files.shapes, "lm_head.weight": (101, 64)}
    assert build_model(replace(files, config=old, shapes=stored)) == build_model(files)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("alibi", True, "alibi is True; only False is supported"),
        ("parallel_attn", False, "parallel_attn is False; only True is supported"),
        ("activation", "tanh", "activation is 'tanh'"),
    ],
)
def test_settings_that_are_not_supported_are_refused(key: str, value: Any, message: str) -> None:
    files = hf_files(CASES["7B"])
    with pytest.raises(ModelFileError, match=message):
        build_model(replace(files, config={**files.config, key: value}))
