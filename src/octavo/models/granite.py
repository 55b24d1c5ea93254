"""Granite 3 (IBM 2024): Llama with constant factors on embeddings, attention scores, what each block adds, and logits
(after muP, Yang et al. 2022).
"""

from __future__ import annotations

from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder
from octavo.models.files import Model, ModelFiles


def granite(files: ModelFiles) -> Model:
    read = settings(files)
    read.refuse_unless("hidden_act", "silu")
    read.refuse_unless("rope.scaling.finetuned", True)  # llama.cpp's switch for no rotation
    c = DecoderConfig.read(files, interleaved_in_gguf=True)
    # llama.cpp's default of the scores' factor is the usual one, transformers' is 1.
    usual = c.head_dim**-0.5 if files.kind == "gguf" else 1.0
    attention_multiplier = read.positive_float("attention_multiplier", "attention.scale", default=usual)
    embedding_multiplier = read.positive_float("embedding_multiplier", "embedding_scale", default=1.0)
    residual_multiplier = read.positive_float("residual_multiplier", "residual_scale", default=1.0)
    logits_scaling = read.positive_float("logits_scaling", "logit_scale", default=1.0)
    d = Decoder(files, c)
    x = d.scale(d.embed(), embedding_multiplier)
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i, scale=attention_multiplier)
        a = d.linear(a, f"blk.{i}.attn_output", c.hidden_size)
        x = d.add(x, d.scale(a, residual_multiplier))
        h = d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i)
        x = d.add(x, d.scale(h, residual_multiplier))
    return d.model(d.scale(d.head(d.rms_norm(d.select(x), "output_norm")), 1 / logits_scaling))
