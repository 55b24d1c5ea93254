"""Gemma (Gemma Team 2024): Llama with scaled embeddings, norms that keep their weight less one, and GELU gates.

The embeddings' scale, sqrt(hidden_size), is not rounded to bfloat16, as it would be in a bfloat16 computation.
"""

from __future__ import annotations

import math

from octavo.models.config import DecoderConfig, settings, with_defaults
from octavo.models.decoder import ACTIVATIONS, Decoder
from octavo.models.files import Model, ModelFiles


def gemma(files: ModelFiles) -> Model:
    files = with_defaults(files, head_dim=256)
    read = settings(files)
    for key in ("hidden_act", "hidden_activation"):
        read.refuse_unless(key, "gelu", "gelu_pytorch_tanh")  # its first files say gelu and mean the approximation
    read.refuse_unless("use_bidirectional_attention", False)
    c = DecoderConfig.read(files, tied_by_default=True)
    d = Decoder(files, c, hf_norm_offset=1.0)
    x = d.scale(d.embed(), math.sqrt(c.hidden_size))
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i, ACTIVATIONS["gelu_pytorch_tanh"]))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
