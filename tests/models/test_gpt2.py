"""GPT-2 against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import GPT2Config, GPT2LMHeadModel

from octavo.core.errors import ModelFileError
from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, State, check_family, hf_files

SIZES: dict[str, Any] = {
    "vocab_size": 101,
    "n_embd": 44,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def out_first(state: State, config: Any) -> State:
    kept_as_in_out = (".c_attn.weight", ".c_proj.weight", ".c_fc.weight")
    return {name: value.T if name.endswith(kept_as_in_out) else value for name, value in state.items()}


CASES = {
    "tied": Case(GPT2LMHeadModel, GPT2Config(**SIZES), GGUFForm("gpt2", reorder=out_first, rms=False)),
    "untied, other scales, inner width and activation": Case(
        GPT2LMHeadModel,
        GPT2Config(
            **SIZES, n_inner=50, scale_attn_weights=False, scale_attn_by_inverse_layer_idx=True,
            tie_word_embeddings=False, activation_function="relu",
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def test_files_of_the_bare_model_with_its_masks_are_read_as_the_hub_has_them() -> None:
    files = hf_files(CASES["tied"])
    shapes = {name.removeprefix("transformer."): shape for name, shape in files.shapes.items()}
    shapes |= {"h.0.attn.bias": (1, 1, 512, 512), "h.1.attn.bias": (1, 1, 512, 512)}
    old = {
        "model_type": "gpt2", "activation_function": "gelu_new", "n_ctx": 512, "n_embd": 44, "n_head": 4, "n_layer": 2,
        "n_positions": 512, "vocab_size": 101, "layer_norm_epsilon": 1e-5,
    }  # fmt: skip
    assert build_model(replace(files, config=old, shapes=shapes)).graph == build_model(files).graph


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("add_cross_attention", True, "add_cross_attention is True"),
        ("activation_function", "tanh", "activation_function is 'tanh'"),
        ("n_positions", 1024, r"wpe.weight \(for position_embd.weight\) has shape \[512, 44\]; \[1024, 44\] is needed"),
    ],
)
def test_settings_that_are_not_supported_are_refused(key: str, value: Any, message: str) -> None:
    files = hf_files(CASES["tied"])
    with pytest.raises(ModelFileError, match=message):
        build_model(replace(files, config={**files.config, key: value}))
