"""Gemma 1, 2 and 3 against transformers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    SiglipVisionConfig,
)

from octavo.core.errors import ModelFileError
from octavo.models.config import DecoderConfig
from octavo.models.gemma2 import query_scale
from octavo.models.registry import build_model
from tests.models.parity import Case, GGUFForm, State, check_family, hf_files, without

SIZES: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 40, "intermediate_size": 56, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512,
}  # fmt: skip
GEMMA3 = Gemma3TextConfig(
    **{**SIZES, "num_hidden_layers": 7}, query_pre_attn_scalar=16, sliding_window=70,
    rope_scaling={"rope_type": "linear", "factor": 8.0},
)  # fmt: skip


def norms_plus_one(state: State, config: Any) -> State:
    return {name: value + 1 if name.endswith("norm.weight") else value for name, value in state.items()}


def describe_gemma2(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
    writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)


def describe_gemma3(writer: gguf.GGUFWriter, config: Any) -> None:
    """The rotation of the sliding layers is not in most files: it is always 10,000."""
    full = config.rope_parameters["full_attention"]
    writer.add_rope_freq_base(full["rope_theta"])
    if full["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    writer.add_sliding_window(config.sliding_window)


GGUF1 = GGUFForm("gemma", reorder=norms_plus_one)
GGUF2 = GGUFForm("gemma2", describe_gemma2, norms_plus_one)
GGUF3 = GGUFForm("gemma3", describe_gemma3, norms_plus_one)

CASES = {
    "gemma": Case(GemmaForCausalLM, GemmaConfig(**SIZES), GGUF1),
    "gemma2": Case(
        Gemma2ForCausalLM,
        Gemma2Config(
            **SIZES, query_pre_attn_scalar=16, sliding_window=50, attn_logit_softcapping=3.0,
            final_logit_softcapping=2.0,
        ),
        GGUF2,
    ),
    "gemma2 without caps, scaled queries": Case(
        Gemma2ForCausalLM,
        Gemma2Config(
            **SIZES, query_pre_attn_scalar=10, attn_logit_softcapping=None, final_logit_softcapping=None
        ),
        None,
    ),
    "gemma3": Case(Gemma3ForCausalLM, GEMMA3, GGUF3),
    "gemma3 with a vision tower, scaled queries": Case(
        Gemma3ForConditionalGeneration,
        Gemma3Config(
            text_config=Gemma3TextConfig(
                **SIZES, query_pre_attn_scalar=10, sliding_window=33, sliding_window_pattern=2
            ),
            vision_config=SiglipVisionConfig(
                hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, image_size=28,
                patch_size=14,
            ),
            boi_token_index=102, eoi_token_index=103, image_token_index=104,
        ),
        None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_logits_equal_transformers(tmp_path: Path, name: str) -> None:
    check_family(CASES[name], tmp_path)


def test_config_as_the_gemma2_files_on_the_hub_have_it_means_the_same() -> None:
    files = hf_files(CASES["gemma2"])
    old = without(files.config, "rope_parameters", "layer_types")
    old |= {"rope_theta": 10000.0, "hidden_act": "gelu_pytorch_tanh", "cache_implementation": "hybrid"}
    assert build_model(replace(files, config=old)) == build_model(files)


def test_config_as_the_gemma3_files_on_the_hub_have_it_means_the_same() -> None:
    files = hf_files(CASES["gemma3"])
    old = without(files.config, "rope_parameters", "layer_types", "_sliding_window_pattern")
    old |= {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window_pattern": 6,
    }
    assert build_model(replace(files, config=old)) == build_model(files)


def test_gemma3_config_may_leave_out_what_is_usual_and_keep_the_rest_in_text_config() -> None:
    config = Gemma3TextConfig(vocab_size=262208, num_hidden_layers=7, intermediate_size=64, sliding_window=1024)
    files = hf_files(Case(Gemma3ForCausalLM, config, None))
    text = {"model_type": "gemma3_text", "num_hidden_layers": 7, "intermediate_size": 64, "sliding_window": 1024}
    shapes = {f"language_model.{name}": shape for name, shape in files.shapes.items()}
    shapes |= {"vision_tower.vision_model.head.weight": (3, 3), "multi_modal_projector.mm_soft_emb_norm.weight": (3,)}
    old = {"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}}
    assert build_model(replace(files, config=old, shapes=shapes)).graph == build_model(files).graph


def test_queries_of_a_gguf_are_scaled_by_its_number_of_layers() -> None:
    """query_pre_attn_scalar is not in the file; the 27B models' is the width of a head's share of the layer."""
    hf = hf_files(CASES["gemma2"])
    c = DecoderConfig.read(hf)
    file = replace(hf, kind="gguf")
    assert query_scale(file, c, layers_of_27b=46) == pytest.approx(16**-0.5)
    assert query_scale(file, replace(c, num_layers=46), layers_of_27b=46) == pytest.approx((40 / 4) ** -0.5)


@pytest.mark.parametrize(
    ("name", "key", "value", "message"),
    [
        ("gemma", "hidden_act", "silu", "hidden_act is 'silu'; only 'gelu' or 'gelu_pytorch_tanh' is supported"),
        ("gemma2", "layer_types", ["full_attention", "chunked_attention", "full_attention"], "has 'chunked_attention'"),
        ("gemma2", "layer_types", ["full_attention"], "a list of 3 items"),
        ("gemma2", "hidden_activation", "quick_gelu", "hidden_activation is 'quick_gelu'"),
        ("gemma3", "use_bidirectional_attention", True, "use_bidirectional_attention is True"),
        ("gemma3", "attn_logit_softcapping", 50.0, "attn_logit_softcapping is 50.0"),
        ("gemma3", "sliding_window_pattern", 0, "sliding_window_pattern is 0"),
    ],
)
def test_settings_that_change_the_model_are_refused(name: str, key: str, value: Any, message: str) -> None:
    files = hf_files(CASES[name])
    config = without(files.config, *(["layer_types"] if key == "sliding_window_pattern" else []))
    with pytest.raises(ModelFileError, match=message):
        build_model(replace(files, config={**config, key: value}))
