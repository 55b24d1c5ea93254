"""Command R, Command R+ and Aya (Cohere 2024): Llama with LayerNorm, attention and MLP side by side on one norm, and a
factor on logits; neighbours are rotated in either kind of file. Command R+ normalizes the heads of q and k.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import DecoderConfig, settings, with_defaults
from octavo.models.decoder import Decoder
from octavo.models.files import Model, ModelFiles


def cohere(files: ModelFiles) -> Model:
    files = with_defaults(files, logit_scale=0.0625)
    read = settings(files)
    read.refuse_unless("hidden_act", "silu")
    c = DecoderConfig.read(files, tied_by_default=True, default_eps=1e-5, default_theta=500000.0)
    # Command R's max_position_embeddings is 8192, though it was trained on 128 Ki.
    length = read.positive_int("model_max_length", default=c.max_position_embeddings)
    c = replace(c, interleaved=True, max_position_embeddings=length)
    d = Decoder(files, c)
    normed = d.has("blk.0.attn_q_norm") if files.kind == "gguf" else read.flag("use_qk_norm", default=False)
    x = d.embed()
    for i in range(c.num_layers):
        h = d.layer_norm(x, f"blk.{i}.attn_norm")
        q, k, v = d.qkv(h, i)
        if normed:
            q = d.layer_norm(q, f"blk.{i}.attn_q_norm", c.num_heads)
            k = d.layer_norm(k, f"blk.{i}.attn_k_norm", c.num_kv_heads)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(h, i))
    return d.model(d.scale(d.head(d.layer_norm(d.select(x), "output_norm")), read.positive_float("logit_scale")))
