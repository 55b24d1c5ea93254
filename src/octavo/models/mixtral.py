"""Mixtral (Jiang et al. 2024): Llama with a mixture of experts in the place of each MLP, weighed by a softmax over the
chosen ones.
"""

from __future__ import annotations

from octavo.graph.schema import Routing
from octavo.models.config import DecoderConfig, settings
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
    c = DecoderConfig.read(files, interleaved_in_gguf=True)
    experts = Experts(
        num_experts=read.positive_int("num_local_experts", "expert_count"),
        top_k=read.positive_int("num_experts_per_tok", "expert_used_count"),
        intermediate_size=c.intermediate_size,
        routing=Routing.TOP_K_THEN_SOFTMAX,
    )
    d = Decoder(files, c, HF_NAMES)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.experts(d.rms_norm(x, f"blk.{i}.ffn_norm"), i, experts))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
