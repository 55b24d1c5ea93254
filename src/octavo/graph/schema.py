"""The operations, each declared once: fields, meaning and shape rule.

Everything else follows from these declarations: the builder checks shapes with `results`, the native reader of
operation records is generated from the fields (csrc/generate_op_records.py), and the reference and the kernels have
one function an operation. The module stands alone (standard library only) so that the build can load it.

A `Tensor` is [rows, width] where rows are the step's tokens or the selected ones among them, or a fixed number of
copies of each (a token's row for each of the experts it was sent to). Values are real numbers here; how a backend
stores them (float32, bfloat16, int8 blocks) is the backend's business.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace


class Rows(enum.Enum):
    TOKENS = 0  # one row a token of the step
    SELECTED = 1  # one row a sequence that samples in this step


@dataclass(frozen=True, slots=True)
class Tensor:
    id: int
    width: int
    rows: Rows
    copies: int = 1  # rows for each of the step's


@dataclass(frozen=True, slots=True)
class Weight:
    """A named parameter. shape: [out_features, in_features], [width], or [experts, out_features, in_features]."""

    name: str
    shape: tuple[int, ...]


class Activation(enum.Enum):
    SILU = 0  # x * sigmoid(x)
    GELU = 1  # x * Phi(x), by the error function
    GELU_TANH = 2  # its approximation by tanh (Hendrycks and Gimpel 2016)
    RELU = 3


class Routing(enum.Enum):
    """From an expert router's scores to weights: which comes first, the softmax or the choice of the best."""

    SOFTMAX_THEN_TOP_K = 0
    TOP_K_THEN_SOFTMAX = 1


Result = tuple[Rows, int] | tuple[Rows, int, int]  # rows, width, copies (1)


def check(ok: bool, op: object, want: str) -> None:
    if not ok:
        raise ValueError(f"shape: {want}: {op}")


def rows_of(x: Tensor, width: int) -> Result:
    """As many rows as x has, of another width."""
    return x.rows, width, x.copies


def alike(x: Tensor, y: Tensor) -> bool:
    return (x.rows, x.width, x.copies) == (y.rows, y.width, y.copies)


def check_norm(op: object, x: Tensor, weight: Weight, groups: int) -> None:
    check(groups >= 1 and x.width % groups == 0, op, "x is whole groups")
    check(weight.shape in ((x.width,), (x.width // groups,)), op, "weight is [width] or [width / groups]")


@dataclass(frozen=True, slots=True)
class Op(ABC):
    @abstractmethod
    def results(self) -> tuple[Result, ...]:
        """(rows, width[, copies]) of each output. Raises ValueError if the inputs do not fit each other."""


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """Row `token_ids[i]` of the embedding matrix."""

    weight: Weight  # [vocab_size, width]

    def results(self) -> tuple[Result, ...]:
        return ((Rows.TOKENS, self.weight.shape[1]),)


@dataclass(frozen=True, slots=True)
class PositionEmbed(Op):
    """Row `positions[i]` of a learned position embedding."""

    weight: Weight  # [max_positions, width]

    def results(self) -> tuple[Result, ...]:
        return ((Rows.TOKENS, self.weight.shape[1]),)


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019).

    With `groups`, each of so many equal parts of the row (the heads) is normalized alone; they share one weight, or
    each has its own part of it.
    """

    x: Tensor
    weight: Weight  # [width], or [width / groups]
    eps: float
    groups: int = 1

    def results(self) -> tuple[Result, ...]:
        check_norm(self, self.x, self.weight, self.groups)
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class LayerNorm(Op):
    """(x - mean(x)) / sqrt(variance(x) + eps) * weight + bias (Ba et al. 2016). `groups` as in RmsNorm."""

    x: Tensor
    weight: Weight  # [width], or [width / groups]
    bias: Weight | None  # like weight
    eps: float
    groups: int = 1

    def results(self) -> tuple[Result, ...]:
        check_norm(self, self.x, self.weight, self.groups)
        check(self.bias is None or self.bias.shape == self.weight.shape, self, "bias is like weight")
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class AddRmsNorm(Op):
    """Outputs (x + y, rms_norm(x + y)). Fused from Add and RmsNorm; the sum takes the place of x in memory."""

    x: Tensor
    y: Tensor
    weight: Weight  # [width]
    eps: float

    def results(self) -> tuple[Result, ...]:
        check(alike(self.x, self.y), self, "x and y are alike")
        check(self.weight.shape == (self.x.width,), self, "weight is [width]")
        return rows_of(self.x, self.x.width), rows_of(self.x, self.x.width)


@dataclass(frozen=True, slots=True)
class Add(Op):
    x: Tensor
    y: Tensor

    def results(self) -> tuple[Result, ...]:
        check(alike(self.x, self.y), self, "x and y are alike")
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class Scale(Op):
    """x * factor."""

    x: Tensor
    factor: float

    def results(self) -> tuple[Result, ...]:
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class Softcap(Op):
    """cap * tanh(x / cap) (Gemma 2)."""

    x: Tensor
    cap: float

    def results(self) -> tuple[Result, ...]:
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class Activate(Op):
    x: Tensor
    activation: Activation

    def results(self) -> tuple[Result, ...]:
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """x @ weight.T + bias, for one or several weights that share the input (QKV after fusion); one output each."""

    x: Tensor
    weights: tuple[Weight, ...]  # each [out_features, in_features]
    biases: tuple[Weight | None, ...]  # each [out_features] or None

    def results(self) -> tuple[Result, ...]:
        check(len(self.weights) == len(self.biases) > 0, self, "as many biases (or None) as weights")
        for w, b in zip(self.weights, self.biases, strict=True):
            check(w.shape[1] == self.x.width, self, "weight is [out_features, x.width]")
            check(b is None or b.shape == (w.shape[0],), self, "bias is [out_features]")
        return tuple(rows_of(self.x, w.shape[0]) for w in self.weights)


@dataclass(frozen=True, slots=True)
class GatedActivation(Op):
    """activation(gate) * up (Shazeer 2020)."""

    gate: Tensor
    up: Tensor
    activation: Activation

    def results(self) -> tuple[Result, ...]:
        check(alike(self.gate, self.up), self, "gate and up are alike")
        return (rows_of(self.gate, self.gate.width),)


@dataclass(frozen=True, slots=True)
class GatedLinear(Op):
    """activation(x @ gate.T) * (x @ up.T). Fused from two Linear and a GatedActivation."""

    x: Tensor
    gate: Weight  # [out_features, in_features]
    up: Weight  # [out_features, in_features]
    activation: Activation

    def results(self) -> tuple[Result, ...]:
        check(self.gate.shape == self.up.shape, self, "gate and up are alike")
        check(self.gate.shape[1] == self.x.width, self, "gate is [out_features, x.width]")
        return (rows_of(self.x, self.gate.shape[0]),)


@dataclass(frozen=True, slots=True)
class RopeTable(Op):
    """cos and sin of position * frequencies[i], once a step: [cos(f0) .. cos(fn), sin(f0) .. sin(fn)]."""

    frequencies: tuple[float, ...]  # radians a position, one for each rotated pair
    magnitude: float = 1.0  # by which all are multiplied (YaRN's attention factor)

    def results(self) -> tuple[Result, ...]:
        return ((Rows.TOKENS, 2 * len(self.frequencies)),)


@dataclass(frozen=True, slots=True)
class Rope(Op):
    """Rotary position embedding (Su et al. 2021) of each head; dimensions beyond the rotated pairs pass through.

    interleaved: pair i is dimensions (2i, 2i + 1), as in GGUF's Llama; else (i, i + pairs), as in GPT-NeoX.
    """

    x: Tensor  # [rows, heads * head_dim]
    table: Tensor
    head_dim: int
    interleaved: bool

    def results(self) -> tuple[Result, ...]:
        check(self.x.width % self.head_dim == 0, self, "x is whole heads")
        check(self.table.width <= self.head_dim, self, "no more rotated dimensions than head_dim")
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Write this step's K and V into the paged cache, then attend causally through the block tables.

    Grouped-query: query head h reads KV head h // (num_heads // num_kv_heads). `layer` counts within the KV group.
    rope: the table by which q and k are rotated first (fused from Rope), or None.
    window: the number of latest positions that a token attends to, its own included; 0: all.
    softcap: scores s become softcap * tanh(s / softcap) before the softmax; 0: none.
    """

    q: Tensor  # [tokens, num_heads * head_dim]
    k: Tensor  # [tokens, num_kv_heads * head_dim]
    v: Tensor  # [tokens, num_kv_heads * head_dim]
    rope: Tensor | None
    rope_interleaved: bool
    group: int
    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0

    def results(self) -> tuple[Result, ...]:
        check(self.num_heads % self.num_kv_heads == 0, self, "num_heads is a multiple of num_kv_heads")
        check(self.q.width == self.num_heads * self.head_dim, self, "q is [tokens, num_heads * head_dim]")
        kv = self.num_kv_heads * self.head_dim
        check(self.k.width == kv and self.v.width == kv, self, "k and v are [tokens, num_kv_heads * head_dim]")
        check(self.rope is None or self.rope.width <= self.head_dim, self, "no more rotated dimensions than head_dim")
        return ((Rows.TOKENS, self.q.width),)


@dataclass(frozen=True, slots=True)
class GateRows(Op):
    """x * sigmoid(gate), one gate a row (Qwen2-MoE's shared expert)."""

    x: Tensor
    gate: Tensor  # [rows, 1]

    def results(self) -> tuple[Result, ...]:
        check(alike(self.gate, replace(self.x, width=1)), self, "gate is [rows, 1]")
        return (rows_of(self.x, self.x.width),)


@dataclass(frozen=True, slots=True)
class Route(Op):
    """Choose the `top_k` best experts of each token by its scores, ties by lower id, and weigh them.

    A token's row of the result: the ids, best first; the weights; and, filled by the backend, where its copies lie
    among the rows of `Dispatch`, which are ordered by expert and, within one, by token.
    renormalize: the weights of a token are divided by their sum; then all are multiplied by `scale`.
    """

    scores: Tensor  # [tokens, num_experts]
    top_k: int
    routing: Routing
    renormalize: bool
    scale: float

    def results(self) -> tuple[Result, ...]:
        check(1 <= self.top_k <= self.scores.width, self, "top_k is at most the number of experts")
        check(self.scores.rows is Rows.TOKENS and self.scores.copies == 1, self, "scores has one row a token")
        return ((Rows.TOKENS, 3 * self.top_k),)


@dataclass(frozen=True, slots=True)
class Dispatch(Op):
    """A copy of each token's row for each expert it goes to, ordered by expert: [tokens * top_k, width]."""

    x: Tensor
    routes: Tensor

    def results(self) -> tuple[Result, ...]:
        check(self.x.rows is Rows.TOKENS and self.x.copies == 1, self, "x has one row a token")
        return ((Rows.TOKENS, self.x.width, self.routes.width // 3),)


@dataclass(frozen=True, slots=True)
class ExpertLinear(Op):
    """x @ weight[e].T for the rows of each expert e."""

    x: Tensor  # of Dispatch
    routes: Tensor
    weight: Weight  # [experts, out_features, in_features]

    def results(self) -> tuple[Result, ...]:
        check(self.x.copies * 3 == self.routes.width, self, "x has a row for each route")
        check(len(self.weight.shape) == 3 and self.weight.shape[2] == self.x.width, self, "weight is [e, out, x.width]")
        return (rows_of(self.x, self.weight.shape[1]),)


@dataclass(frozen=True, slots=True)
class ExpertGatedLinear(Op):
    """activation(x @ gate[e].T) * (x @ up[e].T) for the rows of each expert e."""

    x: Tensor  # of Dispatch
    routes: Tensor
    gate: Weight  # [experts, out_features, in_features]
    up: Weight  # [experts, out_features, in_features]
    activation: Activation

    def results(self) -> tuple[Result, ...]:
        check(self.x.copies * 3 == self.routes.width, self, "x has a row for each route")
        check(self.gate.shape == self.up.shape and len(self.gate.shape) == 3, self, "gate and up are alike")
        check(self.gate.shape[2] == self.x.width, self, "gate is [experts, out_features, x.width]")
        return (rows_of(self.x, self.gate.shape[1]),)


@dataclass(frozen=True, slots=True)
class CombineExperts(Op):
    """The sum of each token's rows, weighted as routed, best expert first: back to one row a token."""

    x: Tensor  # a row for each route
    routes: Tensor

    def results(self) -> tuple[Result, ...]:
        check(self.x.copies * 3 == self.routes.width, self, "x has a row for each route")
        return ((Rows.TOKENS, self.x.width),)


@dataclass(frozen=True, slots=True)
class SelectRows(Op):
    """The rows of the tokens that are followed by a sample in this step."""

    x: Tensor

    def results(self) -> tuple[Result, ...]:
        check(self.x.rows is Rows.TOKENS and self.x.copies == 1, self, "x has one row a token")
        return ((Rows.SELECTED, self.x.width),)


@dataclass(frozen=True, slots=True)
class Cast(Op):
    """The same values in another storage; inserted by a backend where one tensor is wanted in two."""

    x: Tensor

    def results(self) -> tuple[Result, ...]:
        return (rows_of(self.x, self.x.width),)


OPERATIONS: tuple[type[Op], ...] = (
    Embed,
    PositionEmbed,
    RmsNorm,
    LayerNorm,
    AddRmsNorm,
    Add,
    Scale,
    Softcap,
    Activate,
    Linear,
    GatedActivation,
    GatedLinear,
    RopeTable,
    Rope,
    Attention,
    GateRows,
    Route,
    Dispatch,
    ExpertLinear,
    ExpertGatedLinear,
    CombineExperts,
    SelectRows,
    Cast,
)
