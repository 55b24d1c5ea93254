"""Tiny Llama models with random weights, written as GGUF files by the `gguf` package. Shared by tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from octavo.core.records import KVGroup
from octavo.models.decoder import kv_layout
from octavo.quantization.formats import FORMATS, WeightType
from octavo.tokenizer.token_table import TokenType, byte_alphabet
from tests.random_blocks import packed

EOS_TEXT = "<|endoftext|>"
CHAT_TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@dataclass(frozen=True)
class TinyLlama:
    """A model's dimensions. `types` says how a matrix is stored, by the last part of its name ("attn_q"); where it says
    nothing, `type` does, or float32 where rows are not whole blocks of it. Norms are float32.
    """

    hidden_size: int = 64
    intermediate_size: int = 96
    num_layers: int = 2
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    vocab_size: int = 300  # rows of the embedding; at least 257 beside the padding: the bytes and an end of text
    num_padding_ids: int = 0  # rows beyond the vocabulary
    context_length: int = 1024
    tied_embeddings: bool = True
    attention_bias: bool = False
    rotary_dim: int | None = None  # all of head_dim
    num_experts: int = 0  # of a mixture in the place of each MLP, as Mixtral has it
    experts_per_token: int = 2
    windows: tuple[int, ...] = ()  # of each layer, if not all attend to everything: one number, or 0 for all
    type: WeightType = WeightType.F32
    types: tuple[tuple[str, WeightType], ...] = ()
    seed: int = 0

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return kv_layout(self.windows or (0,) * self.num_layers, self.num_kv_heads, self.head_dim)[0]

    @property
    def eos_token_id(self) -> int:
        return self.vocab_size - self.num_padding_ids - 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """All tensors, in numpy's order of dimensions."""
        hidden, wide = self.hidden_size, self.intermediate_size
        q, kv = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.vocab_size, hidden)}
        for i in range(self.num_layers):
            layer: dict[str, tuple[int, ...]] = {
                "attn_norm.weight": (hidden,),
                "attn_q.weight": (q, hidden),
                "attn_k.weight": (kv, hidden),
                "attn_v.weight": (kv, hidden),
                "attn_output.weight": (hidden, q),
                "ffn_norm.weight": (hidden,),
            }
            e = self.num_experts
            layer |= (
                {
                    "ffn_gate_inp.weight": (e, hidden),
                    "ffn_gate_exps.weight": (e, wide, hidden),
                    "ffn_up_exps.weight": (e, wide, hidden),
                    "ffn_down_exps.weight": (e, hidden, wide),
                }
                if e
                else {
                    "ffn_gate.weight": (wide, hidden),
                    "ffn_up.weight": (wide, hidden),
                    "ffn_down.weight": (hidden, wide),
                }
            )
            if self.attention_bias:
                layer |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
            shapes |= {f"blk.{i}.{name}": shape for name, shape in layer.items()}
        shapes["output_norm.weight"] = (hidden,)
        if not self.tied_embeddings:
            shapes["output.weight"] = (self.vocab_size, hidden)
        return shapes

    def type_of(self, name: str, shape: tuple[int, ...]) -> WeightType:
        module = name.split(".")[-2]
        if len(shape) == 1 or module == "ffn_gate_inp":
            return WeightType.F32
        wanted = dict(self.types).get(module.removesuffix("_exps"), self.type)
        return wanted if shape[-1] % FORMATS[wanted].block_length == 0 else WeightType.F32


def write_tiny_llama(path: Path, spec: TinyLlama) -> Path:
    """Write the model, with a byte-level vocabulary of no merges. The same spec gives the same file."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.hidden_size)
    writer.add_block_count(spec.num_layers)
    writer.add_feed_forward_length(spec.intermediate_size)
    writer.add_head_count(spec.num_heads)
    writer.add_head_count_kv(spec.num_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_rope_dimension_count(spec.rotary_dim or spec.head_dim)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    if spec.num_experts:
        writer.add_expert_count(spec.num_experts)
        writer.add_expert_used_count(spec.experts_per_token)
    if any(spec.windows):
        writer.add_sliding_window(max(spec.windows))
        kinds = ["sliding_attention" if window else "full_attention" for window in spec.windows]
        writer.add_array("llama.layer_types", kinds)  # GGUF has no such entry; ours reads it under config.json's name
    _add_vocabulary(writer, spec)
    for name, values in random_tensors(spec).items():
        kind = spec.type_of(name, values.shape)
        rng = np.random.default_rng([spec.seed, *name.encode()])
        writer.add_tensor(name, packed(values, kind, rng), raw_dtype=gguf.GGMLQuantizationType(kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def random_tensors(spec: TinyLlama) -> Mapping[str, NDArray[np.float32]]:
    """Weights before quantization, scaled so that activations stay near 1 and logits are spread."""
    rng = np.random.default_rng(spec.seed)
    tensors = {}
    for name, shape in spec.shapes().items():
        values = rng.normal(size=shape)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values *= 0.2
        else:
            values *= 2 / np.sqrt(shape[-1])
        tensors[name] = values.astype(np.float32)
    return tensors


def _add_vocabulary(writer: gguf.GGUFWriter, spec: TinyLlama) -> None:
    """The bytes, then pairs of letters that no merge can make, then the end of text."""
    alphabet = byte_alphabet()
    num_pairs = spec.eos_token_id - len(alphabet)
    assert num_pairs >= 0, f"{spec.eos_token_id + 1} tokens are too few for {len(alphabet)} bytes and an end of text"
    letters = "abcdefghijklmnopqrstuvwxyz"
    pairs = [a + b for a in letters for b in letters][:num_pairs]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*alphabet, *pairs, EOS_TEXT])
    writer.add_token_types([TokenType.NORMAL] * spec.eos_token_id + [TokenType.CONTROL])
    writer.add_token_merges([])
    writer.add_eos_token_id(spec.eos_token_id)
    writer.add_chat_template(CHAT_TEMPLATE)
