"""Llama (Touvron et al. 2023) and Mistral (Jiang et al. 2023): RMS norms before each block, rotary positions, grouped
queries, gated SiLU; Mistral's first version attends to a window. A GGUF of Mixtral also calls itself llama.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder
from octavo.models.files import Model, ModelFiles
from octavo.models.mixtral import mixtral


def llama(files: ModelFiles) -> Model:
    read = settings(files)
    if read.whole("expert_count", default=0):
        return mixtral(files)
    c = DecoderConfig.read(files, interleaved_in_gguf=True)
    c = replace(c, windows=(read.whole("sliding_window", "attention.sliding_window", default=0),) * c.num_layers)
    d = Decoder(files, c)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.rms_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(d.rms_norm(x, f"blk.{i}.ffn_norm"), i))
    return d.model(d.head(d.rms_norm(d.select(x), "output_norm")))
