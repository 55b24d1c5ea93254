"""Qwen3 (Yang et al. 2025): Qwen2 without biases, and with an RMS norm of each head's q and k."""

from __future__ import annotations

from octavo.models.decoder import Decoder
from octavo.models.files import Model, ModelFiles
from octavo.models.qwen2 import read_qwen


def qwen3(files: ModelFiles) -> Model:
    c = read_qwen(files)
    d = Decoder(files, c)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        q, k = d.head_norms(q, k, i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
