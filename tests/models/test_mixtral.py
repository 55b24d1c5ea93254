"""Mixtral against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import MixtralConfig, MixtralForCausalLM

from tests.models.parity import Case, GGUFForm, State, check_family, interleave_q_and_k, stack_experts

DIMENSIONS = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "num_local_experts": 5, "num_experts_per_tok": 2,
}  # fmt: skip
HF = "model.layers.{layer}.block_sparse_moe.experts.{expert}."


def stacked(state: State, config: Any) -> State:
    state = interleave_q_and_k(state, config)
    for matrix in ("w1", "w2", "w3"):
        name = f"layers.{{layer}}.feed_forward.experts.{matrix}.weight"
        state = stack_experts(state, config, f"{HF}{matrix}.weight", name, config.num_local_experts)
    return state


def matrix_by_matrix(state: State, config: Any) -> State:
    """Files of before April 2024 have a tensor for each expert: blk.0.ffn_gate.0.weight."""
    new = {"w1": "ffn_gate", "w2": "ffn_down", "w3": "ffn_up"}

    def renamed(name: str) -> str:
        if ".experts." not in name:
            return name
        _, _, layer, _, _, expert, matrix, _ = name.split(".")
        return f"blk.{layer}.{new[matrix]}.{expert}.weight"

    return {renamed(name): value for name, value in interleave_q_and_k(state, config).items()}


CASES = {
    "mixtral": Case(MixtralForCausalLM, MixtralConfig(**DIMENSIONS), GGUFForm("llama", reorder=stacked)),
    "old file": Case(MixtralForCausalLM, MixtralConfig(**DIMENSIONS), GGUFForm("llama", reorder=matrix_by_matrix)),
    "with a window": Case(MixtralForCausalLM, MixtralConfig(**DIMENSIONS, sliding_window=40), None),
    "all experts": Case(
        MixtralForCausalLM,
        MixtralConfig(**{**DIMENSIONS, "num_experts_per_tok": 5, "tie_word_embeddings": True}),
        GGUFForm("llama", reorder=stacked),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)
