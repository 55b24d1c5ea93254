"""Llama (Touvron et al. 2023): RMS norms before each block, rotary positions, grouped queries, gated SiLU.

Weight names are GGUF's; its converter has already ordered q and k for interleaved rotation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.core.records import KVGroup
from octavo.graph.builder import Graph, GraphBuilder
from octavo.graph.schema import (
    Activation,
    Add,
    Attention,
    Embed,
    GatedActivation,
    Linear,
    RmsNorm,
    Rope,
    RopeTable,
    SelectRows,
    Tensor,
    Weight,
)
from octavo.models.metadata import MetadataReader

MAX_HEAD_DIM = 4096  # far above any model's: a damaged file must not become gigabytes of rotation frequencies


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_position_embeddings: int
    tied_embeddings: bool
    attention_bias: bool

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> LlamaConfig:
        """Raises ModelFileError for a missing, malformed or unsupported entry."""
        read = MetadataReader(metadata, "llama")
        heads = read.positive_int("attention.head_count")
        hidden = read.positive_int("embedding_length")
        head_dim = read.positive_int("attention.key_length", default=hidden // heads, at_most=MAX_HEAD_DIM)
        rotary_dim = read.positive_int("rope.dimension_count", default=head_dim, at_most=head_dim)
        if rotary_dim % 2:
            raise ModelFileError(f"llama.rope.dimension_count is {rotary_dim}; pairs are rotated, it must be even")
        read.refuse_unless("attention.value_length", head_dim)
        read.refuse_unless("rope.scaling.type", "none")
        read.refuse_unless("rope.scaling.factor", 1.0)
        read.refuse_unless("rope.scale_linear", 1.0)  # what older files call the factor
        read.refuse_unless("expert_count", 0)
        read.refuse_tensor("rope_freqs.weight", tensor_shapes, "Llama 3's rope scaling")
        return cls(
            vocab_size=read.vocab_size(tensor_shapes),
            hidden_size=hidden,
            intermediate_size=read.positive_int("feed_forward_length"),
            num_layers=read.positive_int("block_count", at_most=len(tensor_shapes)),
            num_heads=heads,
            num_kv_heads=read.positive_int("attention.head_count_kv", default=heads),
            head_dim=head_dim,
            rotary_dim=rotary_dim,
            rope_theta=read.positive_float("rope.freq_base", default=10000.0),
            rms_norm_eps=read.positive_float("attention.layer_norm_rms_epsilon"),
            max_position_embeddings=read.positive_int("context_length"),
            tied_embeddings="output.weight" not in tensor_shapes,
            attention_bias="blk.0.attn_q.bias" in tensor_shapes,
        )


def llama(c: LlamaConfig) -> Graph:
    g = GraphBuilder()

    def linear(x: Tensor, name: str, out_features: int, bias: bool = False) -> Tensor:
        b = Weight(f"{name}.bias", (out_features,)) if bias else None
        return g(Linear(x, (Weight(f"{name}.weight", (out_features, x.width)),), (b,)))

    def norm(x: Tensor, name: str) -> Tensor:
        return g(RmsNorm(x, Weight(f"{name}.weight", (x.width,)), c.rms_norm_eps))

    embedding = Weight("token_embd.weight", (c.vocab_size, c.hidden_size))
    x = g(Embed(embedding))
    table = g(RopeTable(tuple(c.rope_theta ** (-2 * i / c.rotary_dim) for i in range(c.rotary_dim // 2))))
    for i in range(c.num_layers):
        h = norm(x, f"blk.{i}.attn_norm")
        q = linear(h, f"blk.{i}.attn_q", c.num_heads * c.head_dim, c.attention_bias)
        k = linear(h, f"blk.{i}.attn_k", c.num_kv_heads * c.head_dim, c.attention_bias)
        v = linear(h, f"blk.{i}.attn_v", c.num_kv_heads * c.head_dim, c.attention_bias)
        q = g(Rope(q, table, c.head_dim, interleaved=True))
        k = g(Rope(k, table, c.head_dim, interleaved=True))
        a = g(
            Attention(
                q, k, v, rope=None, rope_interleaved=False, group=0, layer=i, num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, scale=1 / math.sqrt(c.head_dim),
            )
        )  # fmt: skip
        x = g(Add(x, linear(a, f"blk.{i}.attn_output", c.hidden_size)))
        h = norm(x, f"blk.{i}.ffn_norm")
        gate = linear(h, f"blk.{i}.ffn_gate", c.intermediate_size)
        up = linear(h, f"blk.{i}.ffn_up", c.intermediate_size)
        h = g(GatedActivation(gate, up, Activation.SILU))
        x = g(Add(x, linear(h, f"blk.{i}.ffn_down", c.hidden_size)))
    x = norm(g(SelectRows(x)), "output_norm")
    head = embedding if c.tied_embeddings else Weight("output.weight", (c.vocab_size, c.hidden_size))
    logits = g(Linear(x, (head,), (None,)))
    return g.build({"logits": logits}, (KVGroup("full", c.num_layers, c.num_kv_heads, c.head_dim),))
