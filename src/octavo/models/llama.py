"""Llama (Touvron et al. 2023), Mistral (Jiang et al. 2023) and Ministral: RMS norms before each block, rotary
positions, grouped queries, gated SiLU. Mistral's first version attends to a window, Ministral does in some layers. A
GGUF of Mixtral also calls itself llama.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import DecoderConfig, layer_windows, settings, with_defaults
from octavo.models.decoder import Decoder
from octavo.models.files import Model, ModelFiles
from octavo.models.mixtral import mixtral


def llama(files: ModelFiles) -> Model:
    if files.config.get("model_type") in ("mistral", "ministral"):
        files = with_defaults(files, sliding_window=4096)
    read = settings(files)
    if read.whole("expert_count", default=0):
        return mixtral(files)
    read.refuse_unless("hidden_act", "silu")
    c = DecoderConfig.read(files, interleaved_in_gguf=True)
    return llama_graph(files, replace(c, windows=layer_windows(read, c.num_layers)))


def llama_graph(files: ModelFiles, c: DecoderConfig) -> Model:
    d = Decoder(files, c)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
