"""GPT-2 (Radford et al. 2019): LayerNorm, learned positions, a plain MLP; matrices are stored as [in, out]."""

from __future__ import annotations

import math

from octavo.core.tensor_source import RowPattern
from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder, Names, Part, read_activation
from octavo.models.files import Model, ModelFiles

CAUSAL_MASKS = (r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",)


def gpt2(files: ModelFiles) -> Model:
    read = settings(files)
    read.refuse_unless("add_cross_attention", False)
    activation = read_activation(read, "activation_function", "gelu_new")
    c = DecoderConfig.read(files, default_eps=1e-5, tied_by_default=True, rotates=False)
    scale = 1 / math.sqrt(c.head_dim) if read.flag("scale_attn_weights", default=True) else 1.0
    by_layer = read.flag("scale_attn_by_inverse_layer_idx", default=False)
    d = Decoder(files, c, _names("transformer." if "transformer.wte.weight" in files.shapes else "", c))
    x = d.add(d.embed(), d.position_embed())
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.layer_norm(x, f"blk.{i}.attn_norm"), i)
        a = d.attention(q, k, v, i, scale=scale / (i + 1) if by_layer else scale)
        x = d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size))
        x = d.add(x, d.mlp(d.layer_norm(x, f"blk.{i}.ffn_norm"), i, activation))
    return d.model(d.head(d.layer_norm(d.select(x), "output_norm")), CAUSAL_MASKS)


def _names(prefix: str, c: DecoderConfig) -> Names:
    """prefix: files of the bare model have none."""
    layer, width = f"{prefix}h.{{}}", c.hidden_size
    return {
        "token_embd": f"{prefix}wte",
        "position_embd": f"{prefix}wpe",
        "output_norm": f"{prefix}ln_f",
        "attn_norm": f"{layer}.ln_1",
        "attn_q": Part(f"{layer}.attn.c_attn", RowPattern(0, width), transposed=True),
        "attn_k": Part(f"{layer}.attn.c_attn", RowPattern(width, width), transposed=True),
        "attn_v": Part(f"{layer}.attn.c_attn", RowPattern(2 * width, width), transposed=True),
        "attn_output": Part(f"{layer}.attn.c_proj", transposed=True),
        "ffn_norm": f"{layer}.ln_2",
        "ffn_up": Part(f"{layer}.mlp.c_fc", transposed=True),
        "ffn_down": Part(f"{layer}.mlp.c_proj", transposed=True),
    }
