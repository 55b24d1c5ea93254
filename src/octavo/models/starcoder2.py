"""StarCoder2 (Lozhkov et al. 2024): Llama with LayerNorm, a plain MLP, biases everywhere, and windows in the smaller
models.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.models.config import DecoderConfig, layer_windows, settings
from octavo.models.decoder import Decoder, read_activation
from octavo.models.files import Model, ModelFiles

HF_NAMES = {"ffn_up": "model.layers.{}.mlp.c_fc", "ffn_down": "model.layers.{}.mlp.c_proj"}


def starcoder2(files: ModelFiles) -> Model:
    read = settings(files)
    activation = read_activation(read, "hidden_act", "gelu_pytorch_tanh")
    c = DecoderConfig.read(files, default_eps=1e-5, tied_by_default=True)
    c = replace(c, windows=layer_windows(read, c.num_layers))
    d = Decoder(files, c, HF_NAMES)
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.layer_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.mlp(d.layer_norm(x, f"blk.{i}.ffn_norm"), i, activation))
    return d.model(d.head(d.layer_norm(d.select(x), "output_norm")))
