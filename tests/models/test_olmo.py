"""OLMo 2 and OLMoE against transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Olmo2Config, Olmo2ForCausalLM, OlmoeConfig, OlmoeForCausalLM

from tests.models.parity import Case, GGUFForm, check_family
from tests.models.test_qwen import stacked

DIMENSIONS = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3}
OLMOE = GGUFForm("olmoe", reorder=stacked)

# llama.cpp wants as many KV heads as heads in OLMoE.
CASES = {
    "olmo2": Case(Olmo2ForCausalLM, Olmo2Config(**DIMENSIONS), GGUFForm("olmo2")),
    "olmo2, biases, tied": Case(
        Olmo2ForCausalLM, Olmo2Config(**DIMENSIONS, attention_bias=True, tie_word_embeddings=True), None
    ),
    "olmoe": Case(OlmoeForCausalLM, OlmoeConfig(**{**DIMENSIONS, **EXPERTS, "num_key_value_heads": 4}), OLMOE),
    "olmoe, renormalized": Case(OlmoeForCausalLM, OlmoeConfig(**DIMENSIONS, **EXPERTS, norm_topk_prob=True), None),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)
