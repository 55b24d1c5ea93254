"""Llama, Mistral and Ministral against transformers, with each way of stretching a context."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
    MistralConfig,
    MistralForCausalLM,
)

from tests.models.parity import Case, GGUFForm, State, check_family, interleave_q_and_k

DIMENSIONS = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
}  # fmt: skip


def llama3_table(state: State, config: Any) -> State:
    """The converter makes a table of divisors out of Llama 3's scaling."""
    state, rope = interleave_q_and_k(state, config), config.rope_parameters
    frequencies = rope["rope_theta"] ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    turns = rope["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    divisors = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return {**state, "rope.freqs.weight": divisors.astype(np.float32)}


GGUF = GGUFForm("llama", lambda writer, c: writer.add_rope_dimension_count(c.head_dim), interleave_q_and_k)
GGUF_LLAMA3 = GGUFForm("llama", reorder=llama3_table)


def llama(form: GGUFForm | None = GGUF, seed: int = 0, dtype: torch.dtype = torch.float32, **settings: Any) -> Case:
    return Case(LlamaForCausalLM, LlamaConfig(**{**DIMENSIONS, **settings}), form, seed, dtype=dtype)


def mistral(form: GGUFForm | None, **settings: Any) -> Case:
    return Case(MistralForCausalLM, MistralConfig(**{**DIMENSIONS, **settings}), form)


def scaling(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **settings}


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN = {"factor": 4.0, "original_max_position_embeddings": 128}

# llama.cpp itself ignores a window and YaRN's betas in files of this architecture; the model they describe has them.
CASES = {
    "tied": llama(tie_word_embeddings=True),
    "grouped queries": llama(
        hidden_size=96, intermediate_size=160, num_hidden_layers=3, num_attention_heads=6, head_dim=48, vocab_size=301,
        seed=1,
    ),
    "odd widths": llama(hidden_size=75, intermediate_size=131, num_attention_heads=3, num_key_value_heads=3,
                        head_dim=40, seed=2),
    "float16, odd widths": llama(hidden_size=75, intermediate_size=131, num_attention_heads=3, num_key_value_heads=3,
                                 head_dim=40, dtype=torch.float16),
    "bfloat16": llama(dtype=torch.bfloat16, tie_word_embeddings=True),
    "bfloat16, biases": llama(dtype=torch.bfloat16, attention_bias=True, vocab_size=301, intermediate_size=131),
    "biases everywhere": llama(attention_bias=True, mlp_bias=True),
    "wide heads, one KV head": llama(num_key_value_heads=1, head_dim=128, seed=3),
    "linear": llama(rope_parameters=scaling("linear", factor=4.0)),
    "llama3": llama(GGUF_LLAMA3, rope_parameters=scaling("llama3", **LLAMA3)),
    "yarn": llama(head_dim=32, rope_parameters=scaling("yarn", **YARN)),
    "yarn, all settings": llama(None, head_dim=32, rope_parameters=scaling(
        "yarn", **YARN, beta_fast=16.0, beta_slow=2.0, attention_factor=1.3, truncate=False)),
    "yarn, two scales": llama(None, head_dim=32, rope_parameters=scaling(
        "yarn", **YARN, mscale=0.7, mscale_all_dim=0.4)),
    "yarn, betas": llama(head_dim=32, rope_parameters=scaling("yarn", **YARN, beta_fast=16.0, beta_slow=2.0)),
    "mistral": mistral(GGUF, sliding_window=None, head_dim=32),
    "mistral with a window": mistral(
        GGUFForm("llama", lambda writer, c: writer.add_sliding_window(c.sliding_window), interleave_q_and_k),
        sliding_window=40,
    ),
    "ministral": Case(
        MinistralForCausalLM,
        MinistralConfig(
            **DIMENSIONS, head_dim=16, sliding_window=40, layer_types=["sliding_attention", "full_attention"]
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)
