"""Gemma 2 (Gemma Team 2024): Gemma with a norm after each block, too, every other layer sliding, and soft caps on
attention scores and logits.
"""

from __future__ import annotations

import math
from dataclasses import replace

from octavo.models.config import DecoderConfig, layer_windows, settings, with_defaults
from octavo.models.decoder import Decoder, read_activation
from octavo.models.files import Model, ModelFiles

HF_NAMES = {
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_norm": "model.layers.{}.pre_feedforward_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}
GGUF_LAYERS_OF_27B = 46


def gemma2(files: ModelFiles) -> Model:
    files = with_defaults(
        files, head_dim=256, sliding_window=4096, query_pre_attn_scalar=256, attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
    )  # fmt: skip
    read = settings(files)
    read.refuse_unless("use_bidirectional_attention", False)
    activation = read_activation(read, "hidden_activation", "gelu_pytorch_tanh")
    c = DecoderConfig.read(files, tied_by_default=True)
    c = replace(c, windows=layer_windows(read, c.num_layers, slides=lambda layer: layer % 2 == 0))
    scale = query_scale(files, c, GGUF_LAYERS_OF_27B)
    attention_cap, logit_cap = (
        read.positive_float(key) if files.kind == "gguf" or read.has(key) else None
        for key in ("attn_logit_softcapping", "final_logit_softcapping")
    )
    d = Decoder(files, c, HF_NAMES, hf_norm_offset=1.0)
    x = d.scale(d.embed(), math.sqrt(c.hidden_size))
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i, scale=scale, softcap=attention_cap or 0.0)
        a = d.linear(a, f"blk.{i}.attn_output", c.hidden_size)
        x = d.add(x, d.rms_norm(a, f"blk.{i}.post_attention_norm"))
        h = d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i, activation)
        x = d.add(x, d.rms_norm(h, f"blk.{i}.post_ffw_norm"))
    return d.model(d.softcap(d.head(d.rms_norm(d.select(x), "output_norm")), logit_cap))


def query_scale(files: ModelFiles, c: DecoderConfig, layers_of_27b: int) -> float:
    """1 / sqrt(query_pre_attn_scalar). A GGUF does not have it; only the 27B model's is not head_dim."""
    if files.kind == "hf":
        return 1 / math.sqrt(settings(files).positive_float("query_pre_attn_scalar"))
    return 1 / math.sqrt(c.hidden_size / c.num_heads if c.num_layers == layers_of_27b else c.head_dim)
