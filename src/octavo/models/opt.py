"""OPT (Zhang et al. 2022): LayerNorm before each block or (350M) after it, learned positions in a table that begins two
rows late, a plain MLP; 350M's embeddings are narrower than its layers.
"""

from __future__ import annotations

from octavo.core.tensor_source import RowPattern
from octavo.models.config import DecoderConfig, settings
from octavo.models.decoder import Decoder, Names, Part, read_activation
from octavo.models.files import Model, ModelFiles

POSITIONS_BEGIN = 2


def opt(files: ModelFiles) -> Model:
    read = settings(files)
    read.refuse_unless("layer_norm_elementwise_affine", True)
    activation = read_activation(read, "activation_function", "relu")
    c = DecoderConfig.read(files, default_eps=1e-5, tied_by_default=True, rotates=False)
    norm_first = read.flag("do_layer_norm_before", default=True)
    norm_last = norm_first and not read.flag("_remove_final_layer_norm", default=False)
    narrow = read.positive_int("word_embed_proj_dim", default=c.hidden_size)
    d = Decoder(files, c, _names(c, "model." if "model.decoder.embed_tokens.weight" in files.shapes else ""))
    x = d.embed(narrow)
    x = x if narrow == c.hidden_size else d.linear(x, "project_in", c.hidden_size)
    x = d.add(x, d.position_embed())
    for i in range(c.num_layers):
        q, k, v = d.qkv(d.layer_norm(x, f"blk.{i}.attn_norm") if norm_first else x, i)
        x = d.add(x, d.linear(d.attention(q, k, v, i), f"blk.{i}.attn_output", c.hidden_size))
        x = x if norm_first else d.layer_norm(x, f"blk.{i}.attn_norm")
        x = d.add(x, d.mlp(d.layer_norm(x, f"blk.{i}.ffn_norm") if norm_first else x, i, activation))
        x = x if norm_first else d.layer_norm(x, f"blk.{i}.ffn_norm")
    x = d.layer_norm(d.select(x), "output_norm") if norm_last else d.select(x)
    return d.model(d.head(x if narrow == c.hidden_size else d.linear(x, "project_out", narrow)))


def _names(c: DecoderConfig, prefix: str) -> Names:
    """prefix: files of the bare model have none."""
    stem = f"{prefix}decoder"
    layer = f"{stem}.layers.{{}}"
    return {
        "token_embd": f"{stem}.embed_tokens",
        "position_embd": Part(f"{stem}.embed_positions", RowPattern(POSITIONS_BEGIN, c.max_position_embeddings)),
        "project_in": f"{stem}.project_in",
        "project_out": f"{stem}.project_out",
        "output_norm": f"{stem}.final_layer_norm",
        "attn_norm": f"{layer}.self_attn_layer_norm",
        "attn_q": f"{layer}.self_attn.q_proj",
        "attn_k": f"{layer}.self_attn.k_proj",
        "attn_v": f"{layer}.self_attn.v_proj",
        "attn_output": f"{layer}.self_attn.out_proj",
        "ffn_norm": f"{layer}.final_layer_norm",
        "ffn_up": f"{layer}.fc1",
        "ffn_down": f"{layer}.fc2",
    }
