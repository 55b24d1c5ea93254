"""StarCoder2 against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, check_family, hf_files, without

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "bos_token_id": 0, "eos_token_id": 0,
    "rope_theta": 999999.0,
}  # fmt: skip


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    """llama.cpp's files do not say that layers slide."""
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


CASES = {
    "tied": Case(Starcoder2ForCausalLM, Starcoder2Config(**SIZES), GGUFForm("starcoder2", describe, rms=False)),
    "window, untied, no biases": Case(
        Starcoder2ForCausalLM,
        Starcoder2Config(**SIZES, sliding_window=77, use_bias=False, tie_word_embeddings=False),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def test_config_as_files_on_the_hub_have_it_means_the_same() -> None:
    files = hf_files(CASES["window, untied, no biases"])
    old = without(files.config, "rope_parameters")
    old |= {"rope_theta": 999999.0, "norm_type": "layer_norm", "mlp_type": "default"}
    assert build_model(replace(files, config=old)) == build_model(files)
