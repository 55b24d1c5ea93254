"""SmolLM3 against transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from tests.models.parity import Case, GGUFForm, check_family, interleave_q_and_k, older_config

DIMENSIONS = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "pad_token_id": 1, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


def smollm3(form: GGUFForm | None, **settings: Any) -> Case:
    return Case(SmolLM3ForCausalLM, SmolLM3Config(**DIMENSIONS, **settings), form, old_config=older_config)


# A GGUF does not say which layers are not rotated: every fourth.
CASES = {
    "every fourth layer": smollm3(GGUFForm("smollm3", reorder=interleave_q_and_k)),
    "listed layers, untied, biases": smollm3(
        None, no_rope_layers=[0, 1, 0, 1], tie_word_embeddings=False, attention_bias=True
    ),
    "layers that are not rotated slide": smollm3(
        None, no_rope_layer_interval=2, use_sliding_window=True, sliding_window=40
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)
