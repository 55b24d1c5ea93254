"""Qwen2, Qwen3 and their mixtures of experts against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import (
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.models.parity import Case, GGUFForm, State, check_family, older_config, stack_experts

DIMENSIONS = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 128}
WINDOWS = {"use_sliding_window": True, "sliding_window": 40, "max_window_layers": 1}


QWEN2, QWEN3 = GGUFForm("qwen2"), GGUFForm("qwen3")


def stacked(state: State, config: Any) -> State:
    for matrix in ("gate_proj", "up_proj", "down_proj"):
        pattern = f"model.layers.{{layer}}.mlp.experts.{{expert}}.{matrix}.weight"
        name = f"model.layers.{{layer}}.mlp.experts.{matrix}.weight"
        state = stack_experts(state, config, pattern, name, config.num_experts)
    return state


def squeezed(state: State, config: Any) -> State:
    """Converters of 2024 wrote the shared expert's gate as a vector."""
    state = stacked(state, config)
    return {name: v[0] if name.endswith("shared_expert_gate.weight") else v for name, v in state.items()}


def describe_experts(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def qwen2(form: GGUFForm | None = QWEN2, **settings: Any) -> Case:
    return Case(Qwen2ForCausalLM, Qwen2Config(**{**DIMENSIONS, **settings}), form, old_config=older_config)


def qwen3(form: GGUFForm | None = QWEN3, **settings: Any) -> Case:
    return Case(Qwen3ForCausalLM, Qwen3Config(**{**DIMENSIONS, **settings}), form, old_config=older_config)


def qwen2_moe(form: GGUFForm | None, **settings: Any) -> Case:
    config = Qwen2MoeConfig(**DIMENSIONS, **EXPERTS, shared_expert_intermediate_size=56, **settings)
    return Case(Qwen2MoeForCausalLM, config, form, old_config=older_config)


def qwen3_moe(form: GGUFForm | None, **settings: Any) -> Case:
    config = Qwen3MoeConfig(**DIMENSIONS, **EXPERTS, head_dim=32, **settings)
    return Case(Qwen3MoeForCausalLM, config, form)


# llama.cpp has no windows in these families, no dense layers beside experts, no biases in Qwen3.
CASES = {
    "qwen2": qwen2(),
    "qwen2, tied, odd widths": qwen2(tie_word_embeddings=True, hidden_size=60, intermediate_size=77,
                                     num_attention_heads=6, num_key_value_heads=3),
    "qwen2, yarn": qwen2(rope_parameters=YARN),
    "qwen2, upper layers slide": qwen2(None, **WINDOWS),
    "qwen2, listed layers slide": qwen2(None, **WINDOWS | {"layer_types": ["full_attention", "sliding_attention"]}),
    "qwen3": qwen3(head_dim=32),
    "qwen3, tied": qwen3(head_dim=16, tie_word_embeddings=True),
    "qwen3, biases": qwen3(None, head_dim=16, attention_bias=True),
    "qwen3, upper layers slide": qwen3(None, head_dim=16, **WINDOWS),
    "qwen2-moe": qwen2_moe(GGUFForm("qwen2moe", describe_experts, stacked)),
    "qwen2-moe, squeezed gate": qwen2_moe(GGUFForm("qwen2moe", describe_experts, squeezed)),
    "qwen2-moe, dense layers": qwen2_moe(None, mlp_only_layers=[0]),
    "qwen2-moe, renormalized": qwen2_moe(None, norm_topk_prob=True, decoder_sparse_step=2),
    "qwen2-moe, windows": qwen2_moe(None, **WINDOWS),
    "qwen3-moe": qwen3_moe(GGUFForm("qwen3moe", describe_experts, stacked), norm_topk_prob=True),
    "qwen3-moe, not renormalized": qwen3_moe(None, mlp_only_layers=[1], tie_word_embeddings=True),
    "qwen3-moe, windows": qwen3_moe(None, use_sliding_window=True, sliding_window=40),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)
