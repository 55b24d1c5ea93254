"""Phi-3 and Phi-4 (Abdin et al. 2024): Llama with q, k, v in one stored matrix and gate and up in another; long-context
models rotate by LongRoPE, Phi-4-mini only part of each head.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.core.tensor_source import RowPattern
from octavo.models.config import DecoderConfig, layer_windows, settings
from octavo.models.decoder import Decoder, Part, read_activation
from octavo.models.files import Model, ModelFiles


def phi3(files: ModelFiles) -> Model:
    read = settings(files)
    activation = read_activation(read, "hidden_act", "silu")
    c = DecoderConfig.read(files, default_eps=1e-5)
    c = replace(c, windows=layer_windows(read, c.num_layers))
    qkv, gate_up = "model.layers.{}.self_attn.qkv_proj", "model.layers.{}.mlp.gate_up_proj"
    q, kv, wide = c.q_size, c.kv_size, c.intermediate_size
    names = {
        "attn_q": Part(qkv, RowPattern(0, q)),
        "attn_k": Part(qkv, RowPattern(q, kv)),
        "attn_v": Part(qkv, RowPattern(q + kv, kv)),
        "ffn_gate": Part(gate_up, RowPattern(0, wide)),
        "ffn_up": Part(gate_up, RowPattern(wide, wide)),
    }
    d = Decoder(files, c, names)
    x = d.embed()
    for i in range(c.num_layers):
        queries, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(queries), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i, activation))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
