"""What decoder-only transformers have in common: their weights' names and the usual operations.

An architecture file composes these; what only one family has stands in that family's file. Weights have GGUF's names
in the graph, whatever the checkpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from octavo.core.errors import ModelFileError
from octavo.core.records import KVGroup
from octavo.core.tensor_source import RowPattern, TensorSource
from octavo.graph.builder import GraphBuilder
from octavo.graph.schema import (
    Activate,
    Activation,
    Add,
    Attention,
    CombineExperts,
    Dispatch,
    Embed,
    ExpertLinear,
    GatedActivation,
    LayerNorm,
    Linear,
    PositionEmbed,
    RmsNorm,
    Rope,
    RopeTable,
    Route,
    Routing,
    Scale,
    SelectRows,
    Softcap,
    Tensor,
    Weight,
)
from octavo.models.config import DecoderConfig, settings
from octavo.models.files import Model, ModelFiles
from octavo.models.rope import RopeFrequencies
from octavo.models.settings import Settings

MAX_KV_GROUPS = 8
MAX_EXPERTS = 4096  # far above any model's


@dataclass(frozen=True, slots=True)
class Part:
    """Where a weight is not a stored matrix: rows of one that holds several, or one stored as [in, out]."""

    name: str
    rows: RowPattern | None = None
    transposed: bool = False


Names = Mapping[str, str | Part]

# What the rotation's frequencies have been made of, and frequencies that old checkpoints store beside their settings
DERIVED = (r"rope_(freqs|factors_long|factors_short)\.weight", r".+\.rotary_emb\.inv_freq")

# Hugging Face's names of GGUF's; {} is the layer, {e} the expert. A family says what differs.
HF_NAMES: dict[str, str] = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "model.layers.{}.input_layernorm",
    "attn_q": "model.layers.{}.self_attn.q_proj",
    "attn_k": "model.layers.{}.self_attn.k_proj",
    "attn_v": "model.layers.{}.self_attn.v_proj",
    "attn_output": "model.layers.{}.self_attn.o_proj",
    "attn_q_norm": "model.layers.{}.self_attn.q_norm",
    "attn_k_norm": "model.layers.{}.self_attn.k_norm",
    "ffn_norm": "model.layers.{}.post_attention_layernorm",
    "ffn_gate": "model.layers.{}.mlp.gate_proj",
    "ffn_up": "model.layers.{}.mlp.up_proj",
    "ffn_down": "model.layers.{}.mlp.down_proj",
    "ffn_gate_inp": "model.layers.{}.mlp.gate",
    "ffn_gate_exps": "model.layers.{}.mlp.experts.{e}.gate_proj",
    "ffn_up_exps": "model.layers.{}.mlp.experts.{e}.up_proj",
    "ffn_down_exps": "model.layers.{}.mlp.experts.{e}.down_proj",
}


# Hugging Face's names of activations
ACTIVATIONS = {
    "silu": Activation.SILU,
    "swish": Activation.SILU,
    "gelu": Activation.GELU,
    "gelu_new": Activation.GELU_TANH,
    "gelu_fast": Activation.GELU_TANH,
    "gelu_pytorch_tanh": Activation.GELU_TANH,
    "relu": Activation.RELU,
}


def read_activation(read: Settings, key: str, default: str) -> Activation:
    """default: what the family's GGUF means, too, for it has no such key."""
    return ACTIVATIONS[read.one_of(key, choices=tuple(ACTIVATIONS), default=default)]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: how many, how many a token goes to, how wide each is, and how they are weighed."""

    num_experts: int
    top_k: int
    intermediate_size: int
    routing: Routing = Routing.SOFTMAX_THEN_TOP_K
    renormalize: bool = False
    scale: float = 1.0

    @classmethod
    def read(
        cls,
        files: ModelFiles,
        c: DecoderConfig,
        routing: Routing = Routing.SOFTMAX_THEN_TOP_K,
        *,
        renormalized_in_gguf: bool = False,
    ) -> Experts:
        """renormalized_in_gguf: what llama.cpp does for the family, for its files do not say."""
        read = settings(files)
        read.refuse_unless("expert_gating_func", 1)  # softmax
        read.refuse_unless("expert_weights_scale", 0.0, 1.0)
        count = read.positive_int("num_experts", "num_local_experts", "expert_count", at_most=MAX_EXPERTS)
        top_k = read.positive_int("num_experts_per_tok", "expert_used_count", at_most=count)
        wide = read.positive_int("moe_intermediate_size", "expert_feed_forward_length", default=c.intermediate_size)
        renormalize = read.flag(
            "norm_topk_prob", "expert_weights_norm", default=renormalized_in_gguf and files.kind == "gguf"
        )
        return cls(count, top_k, wide, routing, renormalize)


@dataclass(frozen=True, slots=True)
class KVPlace:
    group: int
    layer: int


def kv_layout(windows: Sequence[int], num_kv_heads: int, head_dim: int) -> tuple[tuple[KVGroup, ...], list[KVPlace]]:
    """The KV groups for layers with these windows, and each layer's place.

    Groups share one pool whose blocks have room for the layers of the largest group, so layers of each window are cut
    into groups of nearly equal size, close to the number of layers of the rarest window.
    """
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    size = max(min(map(len, by_window.values())), math.ceil(len(windows) / MAX_KV_GROUPS))
    groups: list[KVGroup] = []
    places: dict[int, KVPlace] = {}
    for window, layers in by_window.items():
        num_groups = math.ceil(len(layers) / size)
        for i in range(num_groups):
            members = layers[i * len(layers) // num_groups : (i + 1) * len(layers) // num_groups]
            places |= {layer: KVPlace(len(groups), at) for at, layer in enumerate(members)}
            kind: Literal["full", "sliding"] = "sliding" if window else "full"
            name = kind if num_groups == 1 else f"{kind} {i}"
            groups.append(KVGroup(name, len(members), num_kv_heads, head_dim, kind, window))
    return tuple(groups), [places[layer] for layer in range(len(windows))]


class Decoder:
    """Builds a graph. Layers' weights are named "blk.3.attn_q"; a bias is used wherever the checkpoint has one."""

    def __init__(
        self, files: ModelFiles, c: DecoderConfig, hf_names: Names | None = None, hf_norm_offset: float = 0.0
    ) -> None:
        """hf_names: what differs from HF_NAMES. hf_norm_offset: what the family's RMS norms leave out of their weights
        in safetensors (GGUF has it in).
        """
        # A window as long as the context is none, and its layers can lie with those that attend to all.
        windows = tuple(window if window < c.max_position_embeddings else 0 for window in c.windows)
        self.c = c = replace(c, windows=windows)
        self.g = GraphBuilder()
        self._files = files
        self._hf_names = {**HF_NAMES, **(hf_names or {})}
        self._norm_offset = hf_norm_offset if files.kind == "hf" else 0.0
        self._sources: dict[str, TensorSource] = {}
        self._groups, self._places = kv_layout(c.windows, c.num_kv_heads, c.head_dim)
        self._tables: dict[RopeFrequencies, Tensor] = {}

    # ---- weights ----

    def weight(
        self,
        name: str,
        shape: tuple[int, ...],
        kind: str = "weight",
        *,
        add: float = 0.0,
        stored: tuple[int, ...] | None = None,
    ) -> Weight:
        """Declare `name`.`kind` and note where it lies. add and stored: TensorSource's add and shape.

        Raises ModelFileError if it is missing: at once, or a few wrong numbers in a small file would become millions of
        names.
        """
        full = f"{name}.{kind}"
        source = self._locate(name, kind)
        if len(shape) == 3 and "{e}" in source.names[0]:
            source = replace(source, names=tuple(source.names[0].replace("{e}", str(e)) for e in range(shape[0])))
        missing = next((one for one in source.names if one not in self._files.shapes), None)
        if missing is not None:
            where = "" if missing == full else f" (for {full})"
            raise ModelFileError(
                f"tensor {missing}{where} is missing; {list(shape if len(source.names) == 1 else shape[1:])} is needed"
            )
        self._sources[full] = replace(source, add=add, shape=stored)
        return Weight(full, shape)

    def has(self, name: str, kind: str = "weight") -> bool:
        return self._locate(name, kind).names[0].replace("{e}", "0") in self._files.shapes

    def _locate(self, name: str, kind: str) -> TensorSource:
        place: str | Part
        if self._files.kind == "hf":
            layer, module = _split_layer(name)
            place = self._hf_names.get(module, module)
            if isinstance(place, Part):
                place = replace(place, name=place.name.replace("{}", layer, 1))
            else:
                place = place.replace("{}", layer, 1)
        else:
            place = self._fused_in_gguf(name)
        if isinstance(place, Part):
            return TensorSource((f"{place.name}.{kind}",), place.rows, place.transposed and kind == "weight")
        return TensorSource((f"{place}.{kind}",))

    def _fused_in_gguf(self, name: str) -> str | Part:
        """Some families' files have q, k and v in one matrix, or gate and up. Files of before April 2024 have a matrix
        for each expert.
        """
        c, (layer, module) = self.c, _split_layer(name)
        q, kv, wide = c.q_size, c.kv_size, c.intermediate_size
        rows = {"attn_q": (0, q), "attn_k": (q, kv), "attn_v": (q + kv, kv)}.get(module)
        if rows is not None and f"blk.{layer}.attn_qkv.weight" in self._files.shapes:
            return Part(f"blk.{layer}.attn_qkv", RowPattern(*rows))
        rows = {"ffn_gate": (0, wide), "ffn_up": (wide, wide)}.get(module)
        up = self._files.shapes.get(f"blk.{layer}.ffn_up.weight", (0,))
        if rows is not None and up[0] == 2 * wide and f"blk.{layer}.ffn_gate.weight" not in self._files.shapes:
            return Part(f"blk.{layer}.ffn_up", RowPattern(*rows))
        if module.endswith("_exps") and f"{name}.weight" not in self._files.shapes:
            return name.replace("_exps", ".{e}")
        return name

    # ---- operations ----

    def embed(self, width: int = 0) -> Tensor:
        """width: the config's hidden_size if 0."""
        return self.g(Embed(self.weight("token_embd", (self.c.vocab_size, width or self.c.hidden_size))))

    def position_embed(self) -> Tensor:
        """Learned positions."""
        return self.g(PositionEmbed(self.weight("position_embd", (self.c.max_position_embeddings, self.c.hidden_size))))

    def linear(self, x: Tensor, name: str, out_features: int) -> Tensor:
        bias = self.weight(name, (out_features,), "bias") if self.has(name, "bias") else None
        return self.g(Linear(x, (self.weight(name, (out_features, x.width)),), (bias,)))

    def rms_norm(self, x: Tensor, name: str, groups: int = 1) -> Tensor:
        """With `groups`, one weight of the width of a group serves all of them."""
        weight = self.weight(name, (x.width // groups,), add=self._norm_offset)
        return self.g(RmsNorm(x, weight, self.c.norm_eps, groups))

    def layer_norm(self, x: Tensor, name: str, groups: int | None = None) -> Tensor:
        """With `groups`, each has its own part of the weight, which is stored as [groups, width / groups]."""
        stored = None if groups is None else (groups, x.width // groups)
        bias = self.weight(name, (x.width,), "bias", stored=stored) if self.has(name, "bias") else None
        weight = self.weight(name, (x.width,), stored=stored)
        return self.g(LayerNorm(x, weight, bias, self.c.norm_eps, groups or 1))

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.g(Add(x, y))

    def scale(self, x: Tensor, factor: float) -> Tensor:
        return x if factor == 1.0 else self.g(Scale(x, factor))

    def softcap(self, x: Tensor, cap: float | None) -> Tensor:
        return x if cap is None else self.g(Softcap(x, cap))

    def qkv(self, x: Tensor, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        c, blk = self.c, f"blk.{layer}"
        q = self.linear(x, f"{blk}.attn_q", c.q_size)
        return q, self.linear(x, f"{blk}.attn_k", c.kv_size), self.linear(x, f"{blk}.attn_v", c.kv_size)

    def head_norms(self, q: Tensor, k: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Each head of q and of k normalized alone; the heads of either share one weight."""
        q = self.rms_norm(q, f"blk.{layer}.attn_q_norm", groups=self.c.num_heads)
        return q, self.rms_norm(k, f"blk.{layer}.attn_k_norm", groups=self.c.num_kv_heads)

    def rope(self, x: Tensor, rope: RopeFrequencies | None = None) -> Tensor:
        """Rotated by the model's frequencies, or by others."""
        rope = rope or self.c.rope
        if rope not in self._tables:
            self._tables[rope] = self.g(RopeTable(rope.frequencies, rope.magnitude))
        return self.g(Rope(x, self._tables[rope], self.c.head_dim, self.c.interleaved))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, layer: int, *, scale: float | None = None, softcap: float = 0.0
    ) -> Tensor:
        """scale: 1 / sqrt(head_dim) if it is not given. The layer's window is the config's."""
        c, place = self.c, self._places[layer]
        return self.g(
            Attention(
                q, k, v, rope=None, rope_interleaved=False, group=place.group, layer=place.layer, num_heads=c.num_heads,
                num_kv_heads=c.num_kv_heads, head_dim=c.head_dim, scale=scale or 1 / math.sqrt(c.head_dim),
                window=c.windows[layer], softcap=softcap,
            )
        )  # fmt: skip

    def mlp(self, x: Tensor, layer: int, activation: Activation) -> Tensor:
        h = self.linear(x, f"blk.{layer}.ffn_up", self.c.intermediate_size)
        return self.linear(self.g(Activate(h, activation)), f"blk.{layer}.ffn_down", self.c.hidden_size)

    def gated_mlp(
        self, x: Tensor, layer: int, activation: Activation = Activation.SILU, *, width: int = 0, suffix: str = ""
    ) -> Tensor:
        """width: the config's intermediate_size if 0. suffix: of the weights' names ("_shexp")."""
        blk, width = f"blk.{layer}", width or self.c.intermediate_size
        gate = self.linear(x, f"{blk}.ffn_gate{suffix}", width)
        up = self.linear(x, f"{blk}.ffn_up{suffix}", width)
        h = self.g(GatedActivation(gate, up, activation))
        return self.linear(h, f"{blk}.ffn_down{suffix}", self.c.hidden_size)

    def experts(self, x: Tensor, layer: int, e: Experts, activation: Activation = Activation.SILU) -> Tensor:
        """A mixture of gated MLPs."""
        blk, shape = f"blk.{layer}", (e.num_experts, e.intermediate_size, x.width)
        scores = self.linear(x, f"{blk}.ffn_gate_inp", e.num_experts)
        routes = self.g(Route(scores, e.top_k, e.routing, e.renormalize, e.scale))
        rows = self.g(Dispatch(x, routes))
        gate, up = self.weight(f"{blk}.ffn_gate_exps", shape), self.weight(f"{blk}.ffn_up_exps", shape)
        down = self.weight(f"{blk}.ffn_down_exps", (e.num_experts, x.width, e.intermediate_size))
        gated, h = (self.g(ExpertLinear(rows, routes, weight)) for weight in (gate, up))
        h = self.g(GatedActivation(gated, h, activation))
        return self.g(CombineExperts(self.g(ExpertLinear(h, routes, down)), routes))

    def select(self, x: Tensor) -> Tensor:
        """The rows whose logits are wanted."""
        return self.g(SelectRows(x))

    def head(self, x: Tensor) -> Tensor:
        """Logits."""
        name = "token_embd" if self.c.tied_embeddings or not self.has("output") else "output"
        return self.linear(x, name, self.c.vocab_size)

    def model(self, logits: Tensor, unused: Sequence[str] = ()) -> Model:
        """unused: regular expressions of stored tensors that may be left out."""
        c = self.c
        tied = [re.escape(self._locate("output", "weight").names[0])] if c.tied_embeddings else []
        graph = self.g.build({"logits": logits}, self._groups)
        return Model(graph, self._sources, c.vocab_size, c.max_position_embeddings, (*unused, *tied, *DERIVED))


def _split_layer(name: str) -> tuple[str, str]:
    """("3", "attn_q") of "blk.3.attn_q"; ("", "output") of "output"."""
    match = re.fullmatch(r"blk\.(\d+)\.(.+)", name)
    return (match[1], match[2]) if match else ("", name)
