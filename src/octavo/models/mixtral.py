"""Mixtral (Jiang et al. 2024): Llama with a mixture of experts in the place of each MLP, weighed by a softmax over the
chosen ones.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.graph.schema import Routing
from octavo.models.config import DecoderConfig, layer_windows, settings
from octavo.models.decoder import Decoder, Experts
from octavo.models.files import Model, ModelFiles

HF_NAMES = {
    "ffn_gate_inp": "model.layers.{}.block_sparse_moe.gate",
    "ffn_gate_exps": "model.layers.{}.block_sparse_moe.experts.{e}.w1",
    "ffn_up_exps": "model.layers.{}.block_sparse_moe.experts.{e}.w3",
    "ffn_down_exps": "model.layers.{}.block_sparse_moe.experts.{e}.w2",
}


def mixtral(files: ModelFiles) -> Model:
    read = settings(files)
    read.refuse_unless("hidden_act", "silu")
    c = DecoderConfig.read(files, interleaved_in_gguf=True, default_theta=1e6, default_eps=1e-5)
    c = replace(c, windows=layer_windows(read, c.num_layers))
    experts = Experts.read(files, c, Routing.TOP_K_THEN_SOFTMAX)
    d = Decoder(files, c, HF_NAMES)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.experts(d.rms_norm(x, f"blk.{i}.ffn_norm"), i, experts))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
