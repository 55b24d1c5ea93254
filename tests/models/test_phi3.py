"""Phi-3 and Phi-4 against transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from transformers import Phi3Config, Phi3ForCausalLM

from octavo.core.errors import ModelFileError
from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, check_family, hf_files, without

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 64, "intermediate_size": 75, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "pad_token_id": 0,
}  # fmt: skip


def long_rope(pairs: int) -> dict[str, Any]:
    return {
        "type": "longrope",
        "short_factor": [1 + 0.1 * i for i in range(pairs)],
        "long_factor": [1 + 0.7 * i for i in range(pairs)],
    }


def describe(writer: gguf.GGUFWriter, config: Any) -> None:
    rope = config.rope_parameters
    original = config.original_max_position_embeddings
    writer.add_rope_scaling_orig_ctx_len(original)
    head_dim = config.hidden_size // config.num_attention_heads
    writer.add_rope_dimension_count(int(rope["partial_rotary_factor"] * head_dim))
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_sliding_window(config.sliding_window or 0)
    if "long_factor" in rope:
        scale = config.max_position_embeddings / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
        for kind in ("long", "short"):
            writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


FORM = GGUFForm("phi3", describe)
LONG = Phi3Config(
    **SIZES, max_position_embeddings=2048, original_max_position_embeddings=256, rope_scaling=long_rope(8)
)

CASES = {
    # llama.cpp itself leaves out the window that its converter writes.
    "window": Case(Phi3ForCausalLM, Phi3Config(**SIZES, sliding_window=77), FORM),
    "long context": Case(Phi3ForCausalLM, LONG, FORM),  # tokens and wanted length are beyond the original length
    "short context, partial rotary, tied": Case(
        Phi3ForCausalLM,
        Phi3Config(
            **SIZES, max_position_embeddings=2048, original_max_position_embeddings=1024, rope_scaling=long_rope(6),
            partial_rotary_factor=0.75, tie_word_embeddings=True,
        ),
        FORM,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


@pytest.mark.parametrize("kind", ["longrope", "su"])
def test_config_as_files_on_the_hub_have_it_means_the_same(kind: str) -> None:
    files = hf_files(CASES["long context"])
    old = without(files.config, "rope_parameters")
    old |= {"rope_theta": 10000.0, "rope_scaling": {**long_rope(8), "type": kind}}
    assert build_model(replace(files, config=old)) == build_model(files)


def test_the_wanted_length_chooses_the_table_of_factors() -> None:
    files = hf_files(CASES["long context"])
    whole, short = build_model(files), build_model(replace(files, wanted_length=256))
    assert whole == build_model(replace(files, wanted_length=257)) != short


def test_a_window_as_long_as_the_context_is_none() -> None:
    files = hf_files(CASES["window"])
    longest = {**files.config, "sliding_window": files.config["max_position_embeddings"]}
    assert build_model(files).graph.kv_groups[0].kind == "sliding"
    assert build_model(replace(files, config=longest)).graph.kv_groups[0].kind == "full"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("hidden_act", "tanh", "hidden_act is 'tanh'; it must be silu or"),
        ("rope_scaling", {**long_rope(7), "type": "longrope"}, "has 7 numbers; 8 positive ones"),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported; supported: default, linear"),
        ("rope_scaling", {"type": "longrope"}, "lacks its long factors"),
    ],
)
def test_settings_that_are_not_supported_are_refused(key: str, value: Any, message: str) -> None:
    files = hf_files(CASES["long context"])
    with pytest.raises(ModelFileError, match=message):
        build_model(replace(files, config={**without(files.config, "rope_parameters"), key: value}))
