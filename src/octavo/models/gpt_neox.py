"""GPT-NeoX (Black et al. 2022) and Pythia (Biderman et al. 2023): LayerNorm, attention and MLP side by side, each on a
norm of its own, part of each head rotated; each head's q, k and v are neighbours in one stored matrix.
"""

from __future__ import annotations

from octavo.core.tensor_source import RowPattern
from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder, Names, Part, read_activation
from octavo.models.files import Model, ModelFiles

CAUSAL_MASKS = (r"gpt_neox\.layers\.\d+\.attention\.(masked_)?bias",)


def gpt_neox(files: ModelFiles) -> Model:
    read = settings(files)
    activation = read_activation(read, "hidden_act", "gelu")
    c = DecoderConfig.read(files, default_eps=1e-5, rotary_share=0.25)
    parallel = read.flag("use_parallel_residual", default=True)
    d = Decoder(files, c, _names(c))
    x = d.embed()
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.layer_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.linear(d.attention(d.rope(q), d.rope(k), v, i), f"blk.{i}.attn_output", c.hidden_size)
        after = d.add(x, a)
        h = d.mlp(d.layer_norm(x if parallel else after, f"blk.{i}.ffn_norm"), i, activation)
        x = d.add(after, h)
    return d.model(d.head(d.layer_norm(d.select(x), "output_norm")), CAUSAL_MASKS)


def _names(c: DecoderConfig) -> Names:
    layer, n = "gpt_neox.layers.{}", c.head_dim
    q, k, v = (Part(f"{layer}.attention.query_key_value", RowPattern(i * n, n, c.num_heads, 3 * n)) for i in range(3))
    return {
        "token_embd": "gpt_neox.embed_in",
        "output_norm": "gpt_neox.final_layer_norm",
        "output": "embed_out",
        "attn_norm": f"{layer}.input_layernorm",
        "attn_q": q,
        "attn_k": k,
        "attn_v": v,
        "attn_output": f"{layer}.attention.dense",
        "ffn_norm": f"{layer}.post_attention_layernorm",
        "ffn_up": f"{layer}.mlp.dense_h_to_4h",
        "ffn_down": f"{layer}.mlp.dense_4h_to_h",
    }
