"""A Hugging Face folder from end to end: tokenizer, template, defaults, float types and packing while loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from octavo import LLM, SamplingParams
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError
from octavo.engine.loader import load_model
from octavo.engine.packing import packed
from octavo.quantization.formats import WeightType
from octavo.weights.open_checkpoint import open_checkpoint
from tests.tiny_folder import write_tiny_folder
from tests.tiny_models import TinyLlama, write_tiny_llama

TEXT = "Once upon a time, in a land of hills"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_folder(tmp_path_factory.mktemp("model") / "tiny")


def generate(folder: Path, **options: Any) -> list[int]:
    with LLM(str(folder), max_model_len=128, threads=1, **options) as llm:
        params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
        return llm.generate(TEXT, params)[0].outputs[0].token_ids


def types(folder: Path, **options: Any) -> dict[str, WeightType]:
    checkpoint = open_checkpoint(folder)
    try:
        tensors = packed(load_model(checkpoint).tensors, EngineConfig(str(folder), **options), None)
        return {name: t.type for name, t in tensors.items()}
    finally:
        checkpoint.close()


def test_greedy_text_is_that_of_transformers(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    want = model.generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)[0, ids.shape[1] :].tolist()
    assert generate(folder, kv_cache_dtype="float32") == want


def test_float_weights_become_what_dtype_says(folder: Path) -> None:
    kept = types(folder)
    assert {kept["blk.0.attn_q.weight"], kept["blk.0.attn_norm.weight"]} == {WeightType.F32}
    halved = types(folder, dtype="half")
    assert (halved["blk.0.attn_q.weight"], halved["output.weight"]) == (WeightType.F16, WeightType.F16)
    assert halved["blk.0.attn_norm.weight"] == WeightType.F32, "vectors are small, and kept"
    assert types(folder, dtype="bfloat16")["token_embd.weight"] == WeightType.BF16
    assert len(generate(folder, dtype="bfloat16")) == 24


@pytest.mark.parametrize(
    ("asked", "matrix"),
    [("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("q4_1", "Q4_1"), ("q4_k", "Q8_0"), ("int8", "INT8")],
)
def test_float_weights_are_packed_while_they_load(folder: Path, asked: str, matrix: str) -> None:
    found = types(folder, quantization=asked)
    assert found["blk.0.attn_q.weight"].name == matrix, "rows of 64 are no whole super-blocks of q4_k"
    assert found["token_embd.weight"] == found["output.weight"] == WeightType.Q8_0
    assert found["blk.0.attn_norm.weight"] == WeightType.F32
    assert len(generate(folder, quantization=asked)) == 24


def test_routers_are_not_packed(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "moe.gguf", TinyLlama(num_experts=4))
    found = types(path, quantization="q8_0")
    assert found["blk.0.ffn_gate_inp.weight"] == WeightType.F32
    assert found["blk.0.ffn_down_exps.weight"] == WeightType.Q8_0


def test_packing_what_is_packed_is_refused(tmp_path: Path) -> None:
    path = write_tiny_llama(tmp_path / "q8.gguf", TinyLlama(type=WeightType.Q8_0))
    with pytest.raises(ConfigError, match=r"packed already \(Q8_0\): leave it out"):
        types(path, quantization="q4_0")
    moe = write_tiny_llama(tmp_path / "moe.gguf", TinyLlama(type=WeightType.Q8_0, num_experts=4))
    assert types(moe)["blk.0.ffn_gate_inp.weight"] == WeightType.F32, "a router is a float matrix"
    with pytest.raises(ConfigError, match=r"packed already \(Q8_0\): leave it out"):
        types(moe, quantization="q4_0")


def test_a_method_that_the_checkpoint_does_not_have_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="this checkpoint is not quantized; float weights can become q8_0"):
        types(folder, quantization="gptq")


def test_requests_that_set_nothing_get_the_makers_defaults(tmp_path: Path) -> None:
    recommended = {"temperature": 0.25, "top_k": 7, "max_new_tokens": 5, "eos_token_id": [256, 65]}
    path = write_tiny_folder(tmp_path / "m", generation=recommended)
    with LLM(str(path), max_model_len=128, threads=1) as llm:
        params = llm.get_default_sampling_params()
        assert (params.temperature, params.top_k, params.max_tokens) == (0.25, 7, 5)
        assert len(llm.generate(TEXT)[0].outputs[0].token_ids) <= 5
        assert 65 in llm._engine._eos_token_ids  # type: ignore[attr-defined]
    with LLM(str(path), generation_config="vllm", max_model_len=128, threads=1) as llm:
        assert llm.get_default_sampling_params() == SamplingParams()


def test_overrides_change_the_model_and_nonsense_is_refused(folder: Path) -> None:
    scaled = generate(folder, hf_overrides={"rope_parameters": {"rope_type": "linear", "factor": 4.0}})
    assert scaled != generate(folder)
    with pytest.raises(ModelFileError, match="'nonsense' is not supported"):
        generate(folder, hf_overrides={"rope_parameters": {"rope_type": "nonsense"}})


def test_a_broken_chat_template_is_said_at_the_start_and_again_to_chats(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_tiny_folder(tmp_path / "model")
    (model / "chat_template.jinja").write_text("{% if %}")
    with LLM(str(model), max_model_len=128, threads=1) as llm:
        assert any(
            "the default chat template, as it is broken: Expected" in record.message for record in caplog.records
        )
        with pytest.raises(InvalidRequestError, match="the chat template failed: Expected"):
            llm.chat([{"role": "user", "content": "hi"}])
        assert llm.generate("hi")


def test_what_does_not_go_together_is_said_at_the_start(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    larger = write_tiny_folder(tmp_path / "larger")
    config = json.loads((larger / "tokenizer_config.json").read_text())
    entry = {"content": "<more>", "special": True}
    (larger / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": {"257": entry}}))
    with LLM(
        str(folder),
        tokenizer=str(larger),
        hf_overrides={"rope_thetta": 1.0},
        override_generation_config={"eos_token_id": 999},
        max_model_len=128,
        threads=1,
    ) as llm:
        warnings = [record.message for record in caplog.records]
        with pytest.raises(InvalidRequestError, match="token id 257; ids of this model go from 0 to 256"):
            llm.generate("<more>")
    assert any("the tokenizer has 258 tokens, but the model knows 257" in w for w in warnings)
    assert any("cannot end a reply with token 999: its ids go to 256" in w for w in warnings)
    assert any("--hf-overrides sets 'rope_thetta', which this model's settings do not have" in w for w in warnings)
    caplog.clear()
    with LLM(str(folder), max_model_len=128, threads=1):
        assert not caplog.records


def test_the_length_follows_from_rope_scaling(tmp_path: Path) -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "rope_theta": 10000.0}
    path = write_tiny_folder(tmp_path / "m", rope_parameters=scaling)
    with LLM(str(path), threads=1, kv_cache_memory_bytes=1 << 24) as llm:
        assert llm._engine.info.max_model_len == 2048
