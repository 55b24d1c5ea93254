"""Qwen3-MoE (Yang et al. 2025): Qwen3 with a mixture of experts; single layers can stay dense."""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import DecoderConfig, layer_windows
from octavo.models.decoder import Decoder, Experts
from octavo.models.files import Model, ModelFiles
from octavo.models.qwen2 import qwen_settings
from octavo.models.qwen2_moe import dense_layers


def qwen3_moe(files: ModelFiles) -> Model:
    c = DecoderConfig.read(files)
    c = replace(c, windows=layer_windows(qwen_settings(files), c.num_layers))
    experts = Experts.read(files, c, renormalized_in_gguf=True)
    dense = dense_layers(files, c)
    d = Decoder(files, c)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        q, k = d.head_norms(q, k, i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        h = d.rms_norm(x, f"blk.{i}.ffn_norm")
        x = d.add(x, d.gated_mlp(h, i) if i in dense else d.experts(h, i, experts))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
