"""Llama's logits against transformers, on tiny random checkpoints written as GGUF: float weights, 1e-4 relative."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from octavo.quantization.formats import WeightType, dequantize
from octavo.weights.gguf import GGUFFile
from tests.backends.harness import ISAS
from tests.models.native import NativeModel
from tests.tiny_models import TinyLlama, write_tiny_llama

SPECS = {
    "plain": TinyLlama(),
    "grouped queries, untied head": TinyLlama(
        hidden_size=96, intermediate_size=160, num_layers=3, num_heads=6, num_kv_heads=2, head_dim=48,
        vocab_size=301, tied_embeddings=False, seed=1,
    ),
    "odd widths, biases": TinyLlama(
        hidden_size=75, intermediate_size=131, num_heads=3, num_kv_heads=3, head_dim=40, attention_bias=True, seed=2
    ),
    "wide heads, one KV head": TinyLlama(hidden_size=64, num_heads=4, num_kv_heads=1, head_dim=128, seed=3),
}  # fmt: skip


def transformers_logits(path: Path, spec: TinyLlama, tokens: list[int]) -> np.ndarray:
    config = LlamaConfig(
        vocab_size=spec.vocab_size, hidden_size=spec.hidden_size, intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers, num_attention_heads=spec.num_heads, num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim, max_position_embeddings=spec.context_length, rms_norm_eps=1e-5, rope_theta=10000.0,
        tie_word_embeddings=spec.tied_embeddings, attention_bias=spec.attention_bias, hidden_act="silu",
    )  # fmt: skip
    model = LlamaForCausalLM(config).to(torch.float32).eval()
    modules = {
        "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head",
        "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm", "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
    }  # fmt: skip
    state = {}
    with GGUFFile.open(path) as file:
        for name, t in file.tensors.items():
            values = dequantize(t.load(), t.type, t.shape)
            *layer, module, kind = name.split(".")
            if module in ("attn_q", "attn_k"):  # GGUF's q and k are ordered for interleaved rotation
                heads = spec.num_heads if module == "attn_q" else spec.num_kv_heads
                values = values.reshape(heads, spec.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(values.shape)
            prefix = f"model.layers.{layer[1]}." if layer else ""
            state[f"{prefix}{modules[module]}.{kind}"] = torch.from_numpy(values.copy())
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    # A bias that the file lacks (attention output) is zero; a tied head is the embedding.
    assert all(m == "lm_head.weight" or m.endswith("o_proj.bias") for m in missing)
    for layer in model.model.layers:
        if layer.self_attn.o_proj.bias is not None:
            torch.nn.init.zeros_(layer.self_attn.o_proj.bias)
    model.tie_weights()
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].numpy()


@pytest.mark.parametrize("kind", [WeightType.F32, WeightType.F16, WeightType.BF16])
@pytest.mark.parametrize("name", SPECS)
def test_logits_equal_transformers_in_prefill_chunks_and_decode(tmp_path: Path, name: str, kind: WeightType) -> None:
    spec = replace(SPECS[name], type=kind)
    path = write_tiny_llama(tmp_path / "tiny.gguf", spec)
    tokens = np.random.default_rng(spec.seed).integers(0, spec.vocab_size, 400).tolist()
    want = transformers_logits(path, spec, tokens)
    scale = np.abs(want).max()
    for isa in ISAS:
        whole = NativeModel(path, isa=isa, max_tokens=512).logits(tokens)
        assert np.abs(whole - want).max() < 1e-4 * scale
        chunked = NativeModel(path, isa=isa).logits(tokens, [100, 1, 17, 128, 100, 4] + [1] * 50)
        assert np.array_equal(chunked, whole), "chunks and single tokens give the same bits as one prefill"
