"""GPT-NeoX and Pythia against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from octavo.core.errors import ModelFileError
from octavo.models.files import ModelFiles
from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, State, check_family, hf_files, without

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 512,
}  # fmt: skip


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(config.rope_parameters["partial_rotary_factor"] * head_dim))
    writer.add_parallel_residual(config.use_parallel_residual)


def queries_then_keys_then_values(state: State, config: Any) -> State:
    heads = config.num_attention_heads

    def reordered(name: str, value: Any) -> Any:
        if ".query_key_value." not in name:
            return value
        by_head = value.reshape(heads, 3, value.shape[0] // heads // 3, *value.shape[1:])
        return by_head.swapaxes(0, 1).reshape(value.shape)

    return {name: reordered(name, value) for name, value in state.items()}


FORM = GGUFForm("gptneox", describe, queries_then_keys_then_values, rms=False)

CASES = {
    "side by side": Case(GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES), FORM),
    "in a row, all rotated": Case(
        GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, use_parallel_residual=False, rotary_pct=1.0), FORM
    ),
    # llama.cpp wants a head and all biases.
    "tied, no attention biases": Case(
        GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, tie_word_embeddings=True, attention_bias=False), None
    ),
    # A GGUF does not say which GELU it is.
    "the other gelu": Case(GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, hidden_act="gelu_fast"), None),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def checkpoint() -> ModelFiles:
    """transformers calls the head lm_head and stores it as embed_out."""
    files = hf_files(CASES["side by side"])
    return replace(files, shapes={name.replace("lm_head", "embed_out"): shape for name, shape in files.shapes.items()})


def test_config_and_buffers_as_files_on_the_hub_have_them_mean_the_same() -> None:
    files = checkpoint()
    old = without(files.config, "rope_parameters", "attention_bias") | {"rotary_emb_base": 10000, "rotary_pct": 0.25}
    layer = "gpt_neox.layers.1.attention"
    buffers = {f"{layer}.bias": (1, 1, 512, 512), f"{layer}.masked_bias": (), f"{layer}.rotary_emb.inv_freq": (2,)}
    assert build_model(replace(files, config=old, shapes={**files.shapes, **buffers})) == build_model(files)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "tanh", "hidden_act is 'tanh'"),
        ("use_parallel_residual", "yes", "use_parallel_residual is 'yes'; it must be true or false"),
    ],
)
def test_settings_that_are_not_supported_are_refused(key: str, value: Any, message: str) -> None:
    files = checkpoint()
    with pytest.raises(ModelFileError, match=message):
        build_model(replace(files, config={**files.config, key: value}))
