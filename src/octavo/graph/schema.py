"""The operations, each declared once: fields, meaning and shape rule.

Everything else follows from these declarations: the builder checks shapes with `results`, the native reader of
operation records is generated from the fields (csrc/generate_op_records.py), and the reference and the kernels have
one function an operation. The module stands alone (standard library only) so that the build can load it.

A `Tensor` is [rows, width] where rows are the step's tokens or the selected ones among them. Values are real numbers
here; how a backend stores them (float32, bfloat16, int8 blocks) is the backend's business.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from dataclasses import dataclass


class Rows(enum.Enum):
    TOKENS = 0  # one row a token of the step
    SELECTED = 1  # one row a sequence that samples in this step


@dataclass(frozen=True, slots=True)
class Tensor:
    id: int
    width: int
    rows: Rows


@dataclass(frozen=True, slots=True)
class Weight:
    """A named parameter of a checkpoint. shape: [out_features, in_features] for matrices, [width] for vectors."""

    name: str
    shape: tuple[int, ...]


class Activation(enum.Enum):
    SILU = 0


Result = tuple[Rows, int]


def check(ok: bool, op: object, want: str) -> None:
    if not ok:
        raise ValueError(f"shape: {want}: {op}")


@dataclass(frozen=True, slots=True)
class Op(ABC):
    @abstractmethod
    def results(self) -> tuple[Result, ...]:
        """(rows, width) of each output. Raises ValueError if the inputs do not fit each other."""


@dataclass(frozen=True, slots=True)
class Embed(Op):
    """Row `token_ids[i]` of the embedding matrix."""

    weight: Weight  # [vocab_size, width]

    def results(self) -> tuple[Result, ...]:
        return ((Rows.TOKENS, self.weight.shape[1]),)


@dataclass(frozen=True, slots=True)
class RmsNorm(Op):
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019)."""

    x: Tensor
    weight: Weight  # [width]
    eps: float

    def results(self) -> tuple[Result, ...]:
        check(self.weight.shape == (self.x.width,), self, "weight is [width]")
        return ((self.x.rows, self.x.width),)


@dataclass(frozen=True, slots=True)
class AddRmsNorm(Op):
    """Outputs (x + y, rms_norm(x + y)). Fused from Add and RmsNorm; the sum takes the place of x in memory."""

    x: Tensor
    y: Tensor
    weight: Weight  # [width]
    eps: float

    def results(self) -> tuple[Result, ...]:
        check(self.x.width == self.y.width and self.x.rows == self.y.rows, self, "x and y are alike")
        check(self.weight.shape == (self.x.width,), self, "weight is [width]")
        return ((self.x.rows, self.x.width), (self.x.rows, self.x.width))


@dataclass(frozen=True, slots=True)
class Add(Op):
    x: Tensor
    y: Tensor

    def results(self) -> tuple[Result, ...]:
        check(self.x.width == self.y.width and self.x.rows == self.y.rows, self, "x and y are alike")
        return ((self.x.rows, self.x.width),)


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
        return tuple((self.x.rows, w.shape[0]) for w in self.weights)


@dataclass(frozen=True, slots=True)
class GatedActivation(Op):
    """activation(gate) * up (Shazeer 2020)."""

    gate: Tensor
    up: Tensor
    activation: Activation

    def results(self) -> tuple[Result, ...]:
        check(self.gate.width == self.up.width and self.gate.rows == self.up.rows, self, "gate and up are alike")
        return ((self.gate.rows, self.gate.width),)


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
        return ((self.x.rows, self.gate.shape[0]),)


@dataclass(frozen=True, slots=True)
class RopeTable(Op):
    """cos and sin of position * frequencies[i], once a step: [cos(f0) .. cos(fn), sin(f0) .. sin(fn)]."""

    frequencies: tuple[float, ...]  # radians a position, one for each rotated pair

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
        return ((self.x.rows, self.x.width),)


@dataclass(frozen=True, slots=True)
class Attention(Op):
    """Write this step's K and V into the paged cache, then attend causally through the block tables.

    Grouped-query: query head h reads KV head h // (num_heads // num_kv_heads). `layer` counts within the KV group.
    rope: the table by which q and k are rotated first (fused from Rope), or None.
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

    def results(self) -> tuple[Result, ...]:
        check(self.num_heads % self.num_kv_heads == 0, self, "num_heads is a multiple of num_kv_heads")
        check(self.q.width == self.num_heads * self.head_dim, self, "q is [tokens, num_heads * head_dim]")
        kv = self.num_kv_heads * self.head_dim
        check(self.k.width == kv and self.v.width == kv, self, "k and v are [tokens, num_kv_heads * head_dim]")
        check(self.rope is None or self.rope.width <= self.head_dim, self, "no more rotated dimensions than head_dim")
        return ((Rows.TOKENS, self.q.width),)


@dataclass(frozen=True, slots=True)
class SelectRows(Op):
    """The rows of the tokens that are followed by a sample in this step."""

    x: Tensor

    def results(self) -> tuple[Result, ...]:
        check(self.x.rows is Rows.TOKENS, self, "x has one row a token")
        return ((Rows.SELECTED, self.x.width),)


@dataclass(frozen=True, slots=True)
class Cast(Op):
    """The same values in another storage; inserted by a backend where one tensor is wanted in two."""

    x: Tensor

    def results(self) -> tuple[Result, ...]:
        return ((self.x.rows, self.x.width),)


OPERATIONS: tuple[type[Op], ...] = (
    Embed,
    RmsNorm,
    AddRmsNorm,
    Add,
    Linear,
    GatedActivation,
    GatedLinear,
    RopeTable,
    Rope,
    Attention,
    SelectRows,
    Cast,
)
