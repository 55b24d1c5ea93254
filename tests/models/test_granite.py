"""Granite 3 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import GraniteConfig, GraniteForCausalLM

from tests.models.parity import Case, GGUFForm, check_family, interleave_q_and_k

DIMENSIONS = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
FACTORS = {
    "embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 2.5,
}  # fmt: skip


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attention_scale(config.attention_multiplier)
    writer.add_embedding_scale(config.embedding_multiplier)
    writer.add_residual_scale(config.residual_multiplier)
    writer.add_logit_scale(config.logits_scaling)


GGUF = GGUFForm("granite", describe, interleave_q_and_k)
CASES = {
    "four factors": Case(GraniteForCausalLM, GraniteConfig(**DIMENSIONS, **FACTORS), GGUF),
    "tied, biases": Case(
        GraniteForCausalLM,
        GraniteConfig(**DIMENSIONS, **FACTORS, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
        GGUF,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)
