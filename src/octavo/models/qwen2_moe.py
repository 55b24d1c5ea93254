"""Qwen1.5-MoE and Qwen2-MoE (Yang et al. 2024): Qwen2 with a mixture of experts beside one expert that every token goes
to, weighed by a gate of its own; single layers can stay dense.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.graph.schema import GateRows
from octavo.models.config import DecoderConfig, layer_windows, settings
from octavo.models.decoder import Decoder, Experts
from octavo.models.files import Model, ModelFiles
from octavo.models.qwen2 import qwen_settings

HF_NAMES = {
    "ffn_gate_inp_shexp": "model.layers.{}.mlp.shared_expert_gate",
    "ffn_gate_shexp": "model.layers.{}.mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "model.layers.{}.mlp.shared_expert.up_proj",
    "ffn_down_shexp": "model.layers.{}.mlp.shared_expert.down_proj",
}


def qwen2_moe(files: ModelFiles) -> Model:
    read = qwen_settings(files)
    c = DecoderConfig.read(files)
    first_full = read.whole("max_window_layers", default=28)
    windows = layer_windows(read, c.num_layers, lambda i: i % 2 == 0 and i < first_full)
    c = replace(c, windows=windows)
    experts = Experts.read(files, c)
    shared_width = read.positive_int(
        "shared_expert_intermediate_size", "expert_shared_feed_forward_length", default=c.intermediate_size
    )
    dense = dense_layers(files, c)
    d = Decoder(files, c, HF_NAMES)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        h = d.rms_norm(x, f"blk.{i}.ffn_norm")
        if i in dense:
            x = d.add(x, d.gated_mlp(h, i))
            continue
        gate = d.linear(h, f"blk.{i}.ffn_gate_inp_shexp", 1)
        shared = d.g(GateRows(d.gated_mlp(h, i, width=shared_width, suffix="_shexp"), gate))
        x = d.add(x, d.add(d.experts(h, i, experts), shared))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))


def dense_layers(files: ModelFiles, c: DecoderConfig) -> set[int]:
    """The layers that have a plain MLP."""
    read = settings(files)
    step, listed = read.positive_int("decoder_sparse_step", default=1), read.items("mlp_only_layers")
    return {i for i in range(c.num_layers) if i in listed or (i + 1) % step}
