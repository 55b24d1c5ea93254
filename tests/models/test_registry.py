"""Model files whose settings or tensors do not fit are refused with the place, quickly, whatever the numbers; settings
that octavo knows nothing to do with are refused by name.
"""

from __future__ import annotations

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM, Olmo2Config, OlmoeConfig, Qwen2MoeConfig, Qwen2MoeForCausalLM

from octavo.core.errors import ModelFileError
from octavo.models.files import ModelFiles
from octavo.models.registry import FAMILIES, build_model
from octavo.weights.open_checkpoint import open_checkpoint
from tests.tiny_models import TinyLlama, write_tiny_llama

HUGE = 2**31 - 1
DIMENSIONS = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "max_position_embeddings": 1024,
}  # fmt: skip
EXPERTS = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "shared_expert_intermediate_size": 40,
}  # fmt: skip


def opened(path: Path) -> ModelFiles:
    checkpoint = open_checkpoint(path)
    checkpoint.close()
    return ModelFiles(checkpoint.kind, checkpoint.config, checkpoint.shapes, lambda name: [1.0] * 16)


def changed(files: ModelFiles, key: str, value: Any) -> ModelFiles:
    return replace(files, config={**files.config, key: value})


def refuse(files: ModelFiles, message: str) -> None:
    with pytest.raises(ModelFileError, match=message):
        build_model(files)


@pytest.fixture(scope="module")
def gguf_llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    return opened(write_tiny_llama(tmp_path_factory.mktemp("tiny") / "tiny.gguf", TinyLlama()))


@pytest.fixture(scope="module")
def hf_llama(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(LlamaConfig(**DIMENSIONS)).save_pretrained(folder)
    return opened(folder)


@pytest.fixture(scope="module")
def hf_experts(tmp_path_factory: pytest.TempPathFactory) -> ModelFiles:
    folder = tmp_path_factory.mktemp("experts")
    Qwen2MoeForCausalLM(Qwen2MoeConfig(**DIMENSIONS, **EXPERTS)).save_pretrained(folder)
    return opened(folder)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("block_count", HUGE, "block_count is 2147483647; it must be a whole number from 1 to 20"),
        ("block_count", 3, "blk.2.attn_norm.weight is missing"),
        ("block_count", 1, "9 tensors that octavo's llama does not know, the first is blk.1."),
        ("attention.head_count", HUGE, "blk.0.attn_q.weight has shape"),
        ("attention.head_count", 0, "head_count is 0"),
        ("attention.head_count", [2, 2], r"head_count is \[2, 2\]; it must be a whole number"),
        ("attention.head_count_kv", 3, "num_heads is a multiple of num_kv_heads \\(Attention\\)$"),
        ("attention.key_length", HUGE, "key_length is 2147483647"),
        ("attention.value_length", 16, "value_length is 16; only 32 is supported"),
        ("attention.causal", False, "causal is False; only True is supported"),
        ("attention.sliding_window", -1, "sliding_window is -1; it must be a whole number from 0"),
        ("rope.dimension_count", HUGE, "dimension_count is 2147483647; it must be a whole number from 1 to 32"),
        ("rope.dimension_count", 34, "from 1 to 32"),
        ("rope.dimension_count", 31, "it must be even"),
        ("rope.freq_base", float("nan"), "freq_base is nan; it must be a positive number"),
        ("rope.scaling.type", "yarn", "lack llama.rope.scaling.factor"),
        ("rope.scaling.type", "dynamic", "kind 'dynamic' is not supported; supported: default, linear"),
        ("rope.scale_linear", -4.0, "rope.scale_linear is -4.0"),
        ("expert_count", 8, "lack llama.num_experts_per_tok or llama.expert_used_count"),
        ("expert_count", HUGE, "expert_count is 2147483647; it must be a whole number from 1 to 4,096"),
        ("attention.layer_norm_rms_epsilon", None, "lack llama.attention.layer_norm_rms_epsilon"),
        ("context_length", 2**31, "context_length is 2147483648"),
        ("feed_forward_length", 97, "ffn_gate.weight has shape"),
    ],
)
def test_gguf_settings_that_do_not_fit_are_refused(gguf_llama: ModelFiles, key: str, value: Any, message: str) -> None:
    refuse(changed(gguf_llama, f"llama.{key}", value), message)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_hidden_layers", HUGE, "num_hidden_layers is 2147483647; it must be a whole number from 1 to 21"),
        ("num_hidden_layers", 3, "model.layers.2.input_layernorm.weight .for blk.2.attn_norm.weight. is missing"),
        ("num_hidden_layers", 1, "9 tensors that octavo's llama does not know, the first is model.layers.1."),
        ("num_attention_heads", HUGE, "q_proj.weight .for blk.0.attn_q.weight. has shape"),
        ("num_attention_heads", None, "lack num_attention_heads"),
        ("num_key_value_heads", 3, "num_heads is a multiple of num_kv_heads \\(Attention\\)$"),
        ("head_dim", HUGE, "head_dim is 2147483647"),
        ("vocab_size", 299, "embed_tokens.weight .for token_embd.weight. has shape"),
        ("hidden_size", "64", "hidden_size is '64'; it must be a whole number"),
        ("rms_norm_eps", 0.0, "rms_norm_eps is 0.0; it must be a positive number"),
        ("tie_word_embeddings", "yes", "tie_word_embeddings is 'yes'; it must be true or false"),
        ("tie_word_embeddings", 1, "tie_word_embeddings is 1"),
        ("rope_parameters", [], r"rope_parameters is \[\]; it must be an object"),
        ("rope_parameters", {"rope_theta": True}, "rope_parameters.rope_theta is True"),
        (
            "rope_parameters",
            {"rope_theta": 1.0},
            "base of the rotation's frequencies is 1.0; it must be greater than 1",
        ),
        (
            "rope_parameters",
            {"rope_type": "longrope", "factor": 2.0, "original_max_position_embeddings": 1},
            "original_max_position_embeddings is 1; it must be a whole number from 2",
        ),
        ("rope_parameters", {"rope_type": "dynamic", "factor": 2.0}, "kind 'dynamic' is not supported"),
        ("rope_parameters", {"rope_type": "linear"}, "lack rope_parameters.factor"),
        ("rope_parameters", {"rope_type": "longrope"}, "lacks its short factors"),
        (
            "rope_parameters",
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0},
            "low_freq_factor is 4.0, high_freq_factor is 4.0; it must be greater",
        ),
        ("partial_rotary_factor", 0.01, "the number of rotated dimensions is 1"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'; only 'silu' is supported"),
        ("is_encoder_decoder", True, "is_encoder_decoder is True"),
        ("add_cross_attention", True, "add_cross_attention is True"),
        ("layer_types", ["full_attention"], "layer_types is .*; it must be a list of 2 items"),
        ("layer_types", ["full_attention", "chunked_attention"], "layer_types has 'chunked_attention'; only"),
        ("sliding_window", 0.5, "sliding_window is 0.5"),
    ],
)
def test_hf_settings_that_do_not_fit_are_refused(hf_llama: ModelFiles, key: str, value: Any, message: str) -> None:
    refuse(changed(hf_llama, key, value), message)


@pytest.mark.timeout(10)
@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_experts", HUGE, "num_experts is 2147483647; it must be a whole number from 1 to 4,096"),
        (
            "num_experts",
            4,
            "experts.3.gate_proj.weight .* is missing; .40, 64. is needed",
        ),
        ("num_experts", 2, "mlp.gate.weight .for blk.0.ffn_gate_inp.weight. has shape"),
        ("num_experts_per_tok", 4, "num_experts_per_tok is 4; it must be a whole number from 1 to 3"),
        ("moe_intermediate_size", 41, "experts.0.gate_proj.weight .for blk.0.ffn_gate_exps.weight. has shape"),
        ("decoder_sparse_step", 0, "decoder_sparse_step is 0"),
        ("mlp_only_layers", [0], "layers.0.mlp.gate_proj.weight .for blk.0.ffn_gate.weight. is missing"),
        ("mlp_only_layers", 0, "mlp_only_layers is 0; it must be a list"),
        ("expert_gating_func", 2, "expert_gating_func is 2; only 1 is supported"),
    ],
)
def test_settings_of_experts_that_do_not_fit_are_refused(
    hf_experts: ModelFiles, key: str, value: Any, message: str
) -> None:
    refuse(changed(hf_experts, key, value), message)


def test_a_small_file_that_claims_many_layers_and_experts_costs_nothing(hf_experts: ModelFiles) -> None:
    filler = {f"filler.{i}": (1,) for i in range(20_000)}
    claims = {"num_hidden_layers": 20_000, "num_experts": 4096, "layer_types": None}
    files = replace(hf_experts, config={**hf_experts.config, **claims}, shapes={**hf_experts.shapes, **filler})
    tracemalloc.start()
    refuse(files, "experts.3.gate_proj.weight .for blk.0.ffn_gate_exps.weight. is missing")
    assert tracemalloc.get_traced_memory()[1] < 20_000_000
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (OlmoeConfig(clip_qkv=8.0), "clip_qkv is 8.0"),
        (Olmo2Config(hidden_act="gelu"), "hidden_act is 'gelu'"),
    ],
)
def test_settings_that_change_the_computation_are_refused_by_name(config: Any, message: str) -> None:
    refuse(ModelFiles("hf", json.loads(config.to_json_string()), {}, lambda name: []), message)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("blk.1.attn_sinks.weight", (64,), "the first is blk.1.attn_sinks.weight"),
        ("blk.1.attn_q.bias", (63,), r"blk.1.attn_q.bias has shape \[63\]; \[64\] is needed"),
        ("rope_freqs.weight", (16,), "table of rope factors has 15 numbers; 16 positive ones are needed"),
        ("token_embd.weight", (300, 64, 1), "a matrix"),
        ("token_embd.weight", (300, 65), "needed"),
        ("token_embd.weight", (299, 64), "vocabulary has 300 tokens, but token_embd.weight has 299 rows"),
        ("blk.0.attn_norm.weight", (1, 64), "needed"),
        ("blk.0.ffn_down.weight", (1, 64, 96), "needed"),
        ("blk.0.ffn_down.weight", (64,), "needed"),
    ],
)
def test_tensors_that_do_not_fit_or_would_be_left_out_are_refused(
    gguf_llama: ModelFiles, name: str, shape: tuple[int, ...], message: str
) -> None:
    refuse(replace(gguf_llama, shapes={**gguf_llama.shapes, name: shape}, read_values=lambda _: [1.0] * 15), message)


def test_biases_are_used_where_the_file_has_them(gguf_llama: ModelFiles) -> None:
    model = build_model(replace(gguf_llama, shapes={**gguf_llama.shapes, "blk.1.attn_output.bias": (64,)}))
    assert "blk.1.attn_output.bias" in model.graph.weights
    assert "blk.0.attn_output.bias" not in model.graph.weights


def test_tensors_that_follow_from_settings_may_be_left_out(hf_llama: ModelFiles) -> None:
    old = {**hf_llama.shapes, "model.layers.0.self_attn.rotary_emb.inv_freq": (16,)}
    assert build_model(replace(hf_llama, shapes=old)) == build_model(hf_llama)


@pytest.mark.parametrize(("stated", "windows"), [({}, {4096}), ({"sliding_window": None}, {0})])
def test_a_mistral_config_without_a_window_means_another_than_one_with_null(
    hf_llama: ModelFiles, stated: dict[str, Any], windows: set[int]
) -> None:
    config = {**hf_llama.config, "model_type": "mistral", "max_position_embeddings": 8192, **stated}
    groups = build_model(replace(hf_llama, config=config)).graph.kv_groups
    assert {group.window for group in groups} == windows


def test_an_unknown_architecture_is_refused_with_those_there_are(gguf_llama: ModelFiles, hf_llama: ModelFiles) -> None:
    refuse(
        changed(gguf_llama, "general.architecture", "mamba"),
        "general.architecture is 'mamba', which is not supported; supported: .*llama, .*qwen2",
    )
    refuse(changed(hf_llama, "model_type", "mamba"), "model_type is 'mamba', .* supported: .*llama, .*mistral")
    refuse(changed(hf_llama, "model_type", ["llama"]), r"model_type is \['llama'\]")


def test_the_length_that_a_scaling_reaches_is_the_models_length(hf_llama: ModelFiles) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 1024}
    assert build_model(hf_llama).max_position_embeddings == 1024
    assert build_model(changed(hf_llama, "rope_parameters", yarn)).max_position_embeddings == 4096
    endless = changed(hf_llama, "rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": 1e30})
    assert build_model(endless).max_position_embeddings == HUGE
    counted = changed(changed(hf_llama, "rope_parameters", yarn), "max_position_embeddings", 4096)
    assert build_model(counted).max_position_embeddings == 4096


def test_the_table_of_supported_models_has_every_family_and_its_test() -> None:
    root = Path(__file__).parent.parent.parent
    rows = [line.split("|") for line in (root / "docs/supported_models.md").read_text().splitlines() if "| `" in line]
    hf, gguf = (set(re.findall(r"`([\w-]+)`", "".join(row[column] for row in rows))) for column in (2, 3))
    assert hf == {name for family in FAMILIES for name in family.hf}
    assert gguf == {name for family in FAMILIES for name in family.gguf}
    assert all((root / "tests/models" / row[5].strip(" `")).exists() for row in rows)
