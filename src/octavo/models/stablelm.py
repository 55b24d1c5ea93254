"""StableLM (Bellagente et al. 2024): Llama with LayerNorm and a rotation of a quarter of each head; attention and MLP
may work side by side on one norm.
"""

from __future__ import annotations

from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder, read_activation
from octavo.models.files import Model, ModelFiles


def stablelm(files: ModelFiles) -> Model:
    read = settings(files)
    read.refuse_unless("qk_layernorm", False)
    activation = read_activation(read, "hidden_act", "silu")
    c = DecoderConfig.read(files, default_eps=1e-5, rotary_share=0.25)
    d = Decoder(files, c)
    if files.kind == "hf":
        parallel = read.flag("use_parallel_residual", default=False)
    else:  # some files' flag is wrong; layers whose blocks work side by side have no second norm
        parallel = not d.has("blk.0.ffn_norm")
    x = d.embed()
    for i in range(c.num_layers):
        h = d.layer_norm(x, f"blk.{i}.attn_norm")
        q, k, v = d.qkv(h, i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.gated_mlp(h if parallel else d.layer_norm(x, f"blk.{i}.ffn_norm"), i, activation))
    return d.model(d.head(d.layer_norm(d.select(x), "output_norm")))
