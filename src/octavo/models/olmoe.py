"""OLMoE (Muennighoff et al. 2024): Llama with RMS norms of q and k over all heads, and a mixture of experts."""

from __future__ import annotations

from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder, Experts
from octavo.models.files import Model, ModelFiles


def olmoe(files: ModelFiles) -> Model:
    read = settings(files)
    read.refuse_unless("hidden_act", "silu")
    read.refuse_unless("clip_qkv", None)
    c = DecoderConfig.read(files, default_eps=1e-5)
    experts = Experts.read(files, c)
    d = Decoder(files, c)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        q, k = d.rms_norm(q, f"blk.{i}.attn_q_norm"), d.rms_norm(k, f"blk.{i}.attn_k_norm")
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.experts(d.rms_norm(x, f"blk.{i}.ffn_norm"), i, experts))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
