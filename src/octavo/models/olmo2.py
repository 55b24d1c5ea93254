"""OLMo 2 (OLMo team 2025): Llama with RMS norms of what each block adds, in the place of those before it, and of q and
k over all heads.
"""

from __future__ import annotations

from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder
from octavo.models.files import Model, ModelFiles

HF_NAMES = {
    "post_attention_norm": "model.layers.{}.post_attention_layernorm",
    "post_ffw_norm": "model.layers.{}.post_feedforward_layernorm",
}


def olmo2(files: ModelFiles) -> Model:
    read = settings(files)
    read.refuse_unless("hidden_act", "silu")
    read.refuse_unless("attention.sliding_window", 0)  # a GGUF of OLMo 3
    c = DecoderConfig.read(files, default_eps=1e-5)
    d = Decoder(files, c, HF_NAMES)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(x, i)
        q, k = d.rms_norm(q, f"blk.{i}.attn_q_norm"), d.rms_norm(k, f"blk.{i}.attn_k_norm")
        a = d.linear(d.attention(d.rope(q), d.rope(k), v, i), f"blk.{i}.attn_output", c.hidden_size)
        x = d.add(x, d.rms_norm(a, f"blk.{i}.post_attention_norm"))
        x = d.add(x, d.rms_norm(d.gated_mlp(x, i), f"blk.{i}.post_ffw_norm"))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
