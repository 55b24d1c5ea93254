"""Falcon (Almazrouei et al. 2023): LayerNorm, few key heads, attention and MLP side by side, on one norm (7B, 11B) or
on two (40B, 180B). Each key head's queries, key and value are neighbours in one stored matrix.
"""

from __future__ import annotations

from dataclasses import replace

from octavo.core.tensor_source import RowPattern
from octavo.models.config import DecoderConfig, settings, with_defaults
from octavo.models.decoder import Decoder, Names, Part, read_activation
from octavo.models.files import Model, ModelFiles


def falcon(files: ModelFiles) -> Model:
    files = with_defaults(files, max_position_embeddings=2048)
    read = settings(files)
    read.refuse_unless("alibi", False)
    activation = read_activation(read, "activation", "gelu")
    c = DecoderConfig.read(files, default_eps=1e-5, tied_by_default=True)
    if files.kind == "hf" and not read.flag("new_decoder_architecture", default=False):
        read.refuse_unless("parallel_attn", True)
        c = replace(c, num_kv_heads=1 if read.flag("multi_query", default=True) else c.num_heads)
    d = Decoder(files, c, _names(files, c))
    attention_norm = "attn_norm_2" if d.has("blk.0.attn_norm_2") else "attn_norm"
    x = d.embed()
    for i in range(c.num_layers):
        mlp_in = d.layer_norm(x, f"blk.{i}.attn_norm")
        attention_in = d.layer_norm(x, f"blk.{i}.{attention_norm}") if attention_norm != "attn_norm" else mlp_in
        q, k, v = d.qkv(attention_in, i)
        a = d.attention(d.rope(q), d.rope(k), v, i)
        x = d.add(d.add(x, d.linear(a, f"blk.{i}.attn_output", c.hidden_size)), d.mlp(mlp_in, i, activation))
    return d.model(d.head(d.layer_norm(d.select(x), "output_norm")))


def _names(files: ModelFiles, c: DecoderConfig) -> Names:
    layer, n, kv = "transformer.h.{}", c.head_dim, c.num_kv_heads
    queries = c.num_heads // kv  # of a key head
    stored, stride = f"{layer}.self_attention.query_key_value", (queries + 2) * n
    two_norms = "transformer.h.0.ln_mlp.weight" in files.shapes
    return {
        "token_embd": "transformer.word_embeddings",
        "output_norm": "transformer.ln_f",
        "attn_norm": f"{layer}.ln_mlp" if two_norms else f"{layer}.input_layernorm",
        "attn_norm_2": f"{layer}.ln_attn",
        "attn_q": Part(stored, RowPattern(0, queries * n, kv, stride)),
        "attn_k": Part(stored, RowPattern(queries * n, n, kv, stride)),
        "attn_v": Part(stored, RowPattern((queries + 1) * n, n, kv, stride)),
        "attn_output": f"{layer}.self_attention.dense",
        "ffn_up": f"{layer}.mlp.dense_h_to_4h",
        "ffn_down": f"{layer}.mlp.dense_4h_to_h",
    }
