"""What every operation means: a few lines of numpy in float64 each. Slow on purpose; kernels are compared with it.

Knows no storage, no blocks and no threads: a sequence's keys and values are plain arrays here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import singledispatchmethod

import numpy as np
from numpy.typing import NDArray

from octavo.graph.builder import Graph
from octavo.graph.schema import (
    Activate,
    Activation,
    Add,
    AddRmsNorm,
    Attention,
    Cast,
    CombineExperts,
    Dispatch,
    Embed,
    ExpertGatedLinear,
    ExpertLinear,
    GatedActivation,
    GatedLinear,
    GateRows,
    LayerNorm,
    Linear,
    Op,
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

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ReferenceBatch:
    """token_ids: [tokens]. sequences: (name, rows), rows in order; first position is what the sequence has cached."""

    token_ids: NDArray[np.int64]
    sequences: tuple[tuple[str, int], ...]
    selected_rows: tuple[int, ...]


@dataclass
class Reference:
    """Interprets a graph. `weights` by name, as float64 of their declared shapes."""

    graph: Graph
    weights: Mapping[str, Array]
    # (sequence, group, layer) -> keys, values: [kv_heads, n, head_dim]
    cache: dict[tuple[str, int, int], tuple[Array, Array]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)

    def run(self, batch: ReferenceBatch) -> dict[int, Array]:
        """All tensors of the step by id, each [rows, width]; the caches grow by the step's tokens."""
        self._batch = batch
        self._positions: NDArray[np.int64] = np.concatenate(
            [self.lengths.get(name, 0) + np.arange(rows) for name, rows in batch.sequences]
        )
        self._values: dict[int, Array] = {}
        for node in self.graph.nodes:
            results = self._compute(node.op)
            for tensor, value in zip(node.outputs, results if isinstance(results, tuple) else (results,), strict=True):
                self._values[tensor.id] = value
        for name, rows in batch.sequences:
            self.lengths[name] = self.lengths.get(name, 0) + rows
        return self._values

    def _get(self, tensor: Tensor) -> Array:
        return self._values[tensor.id]

    def _weight(self, weight: Weight) -> Array:
        return self.weights[weight.name]

    @singledispatchmethod
    def _compute(self, op: Op) -> Array | tuple[Array, ...]:
        raise TypeError(f"no reference for {type(op).__name__}")

    @_compute.register
    def _(self, op: Embed) -> Array:
        return self._weight(op.weight)[self._batch.token_ids]

    @_compute.register
    def _(self, op: PositionEmbed) -> Array:
        return self._weight(op.weight)[self._positions]

    @_compute.register
    def _(self, op: RmsNorm) -> Array:
        return rms_norm(self._get(op.x), self._weight(op.weight), op.eps, op.groups)

    @_compute.register
    def _(self, op: LayerNorm) -> Array:
        x = self._get(op.x).reshape(-1, op.groups, op.x.width // op.groups)
        centered = x - x.mean(axis=2, keepdims=True)
        normed = centered / np.sqrt(np.mean(centered**2, axis=2, keepdims=True) + op.eps)
        bias = np.zeros(op.weight.shape) if op.bias is None else self._weight(op.bias)
        repeats = op.x.width // op.weight.shape[0]
        rows: Array = normed.reshape(-1, op.x.width) * np.tile(self._weight(op.weight), repeats)
        return rows + np.tile(bias, repeats)

    @_compute.register
    def _(self, op: AddRmsNorm) -> tuple[Array, Array]:
        total = self._get(op.x) + self._get(op.y)
        return total, rms_norm(total, self._weight(op.weight), op.eps)

    @_compute.register
    def _(self, op: Add) -> Array:
        return self._get(op.x) + self._get(op.y)

    @_compute.register
    def _(self, op: Scale) -> Array:
        return self._get(op.x) * op.factor

    @_compute.register
    def _(self, op: Softcap) -> Array:
        return softcap(self._get(op.x), op.cap)

    @_compute.register
    def _(self, op: Activate) -> Array:
        return activate(op.activation, self._get(op.x))

    @_compute.register
    def _(self, op: GateRows) -> Array:
        gate: Array = 1 / (1 + np.exp(-self._get(op.gate)))
        return self._get(op.x) * gate

    @_compute.register
    def _(self, op: Linear) -> tuple[Array, ...]:
        x = self._get(op.x)
        return tuple(
            x @ self._weight(w).T + (0 if b is None else self._weight(b))
            for w, b in zip(op.weights, op.biases, strict=True)
        )

    @_compute.register
    def _(self, op: GatedActivation) -> Array:
        return activate(op.activation, self._get(op.gate)) * self._get(op.up)

    @_compute.register
    def _(self, op: GatedLinear) -> Array:
        x = self._get(op.x)
        return activate(op.activation, x @ self._weight(op.gate).T) * (x @ self._weight(op.up).T)

    @_compute.register
    def _(self, op: RopeTable) -> Array:
        angles = self._positions[:, None] * np.array(op.frequencies)
        table: Array = op.magnitude * np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
        return table

    @_compute.register
    def _(self, op: Rope) -> Array:
        return rotate(self._get(op.x), self._get(op.table), op.head_dim, op.interleaved)

    @_compute.register
    def _(self, op: Attention) -> Array:
        q, k, v = self._get(op.q), self._get(op.k), self._get(op.v)
        if op.rope is not None:
            q = rotate(q, self._get(op.rope), op.head_dim, op.rope_interleaved)
            k = rotate(k, self._get(op.rope), op.head_dim, op.rope_interleaved)
        out = np.empty_like(q)
        begin = 0
        for name, rows in self._batch.sequences:
            part = slice(begin, begin + rows)
            begin += rows
            heads_q = q[part].reshape(rows, op.num_heads, op.head_dim).transpose(1, 0, 2)
            new_k = k[part].reshape(rows, op.num_kv_heads, op.head_dim).transpose(1, 0, 2)
            new_v = v[part].reshape(rows, op.num_kv_heads, op.head_dim).transpose(1, 0, 2)
            place = (name, op.group, op.layer)
            if place in self.cache:
                new_k = np.concatenate([self.cache[place][0], new_k], axis=1)
                new_v = np.concatenate([self.cache[place][1], new_v], axis=1)
            self.cache[place] = (new_k, new_v)
            queries_a_head = op.num_heads // op.num_kv_heads
            scores = op.scale * heads_q @ np.repeat(new_k, queries_a_head, axis=0).transpose(0, 2, 1)
            if op.softcap:
                scores = softcap(scores, op.softcap)
            behind = self._positions[part][:, None] - np.arange(new_k.shape[1])[None, :]
            hidden = (behind < 0) | ((behind >= op.window) if op.window else False)
            weights = softmax(np.where(hidden, -np.inf, scores))
            attended = weights @ np.repeat(new_v, queries_a_head, axis=0)
            out[part] = attended.transpose(1, 0, 2).reshape(rows, -1)
        return out

    @_compute.register
    def _(self, op: Route) -> Array:
        scores = self._get(op.scores)
        ids = np.argsort(-scores, axis=1, kind="stable")[:, : op.top_k]  # ties by lower id
        chosen = np.take_along_axis(scores, ids, axis=1)
        if op.routing is Routing.SOFTMAX_THEN_TOP_K:
            weights = np.take_along_axis(softmax(scores), ids, axis=1)
        else:
            weights = softmax(chosen)
        if op.renormalize:
            weights = weights / weights.sum(axis=1, keepdims=True)
        rows = np.empty(ids.size)
        rows[np.argsort(ids.reshape(-1), kind="stable")] = np.arange(ids.size)
        return np.concatenate([ids, weights * op.scale, rows.reshape(ids.shape)], axis=1)

    def _routes(self, routes: Tensor) -> tuple[Array, Array, Array]:
        """Of each token: ids, weights, rows of Dispatch; [tokens, top_k] each."""
        ids, weights, rows = np.split(self._get(routes), 3, axis=1)
        return ids, weights, rows

    def _expert_product(self, x: Tensor, routes: Tensor, weight: Weight) -> Array:
        ids, _, rows = self._routes(routes)
        out = np.empty((ids.size, weight.shape[1]))
        for expert, row in zip(ids.reshape(-1).astype(int), rows.reshape(-1).astype(int), strict=True):
            out[row] = self._weight(weight)[expert] @ self._get(x)[row]
        return out

    @_compute.register
    def _(self, op: Dispatch) -> Array:
        rows = self._routes(op.routes)[2].astype(int)
        out = np.empty((rows.size, op.x.width))
        out[rows] = self._get(op.x)[:, None]
        return out

    @_compute.register
    def _(self, op: ExpertLinear) -> Array:
        return self._expert_product(op.x, op.routes, op.weight)

    @_compute.register
    def _(self, op: ExpertGatedLinear) -> Array:
        gate = self._expert_product(op.x, op.routes, op.gate)
        return activate(op.activation, gate) * self._expert_product(op.x, op.routes, op.up)

    @_compute.register
    def _(self, op: CombineExperts) -> Array:
        _, weights, rows = self._routes(op.routes)
        total: Array = (weights[:, :, None] * self._get(op.x)[rows.astype(int)]).sum(axis=1)
        return total

    @_compute.register
    def _(self, op: SelectRows) -> Array:
        return self._get(op.x)[list(self._batch.selected_rows)]

    @_compute.register
    def _(self, op: Cast) -> Array:
        return self._get(op.x)


def rms_norm(x: Array, weight: Array, eps: float, groups: int = 1) -> Array:
    parts = x.reshape(len(x), groups, -1)
    normed = parts / np.sqrt(np.mean(parts * parts, axis=2, keepdims=True) + eps)
    scaled: Array = normed.reshape(x.shape) * np.tile(weight, x.shape[1] // len(weight))
    return scaled


def softcap(x: Array, cap: float) -> Array:
    capped: Array = cap * np.tanh(x / cap)
    return capped


def softmax(x: Array) -> Array:
    e: Array = np.exp(x - x.max(axis=-1, keepdims=True))
    total: Array = e.sum(axis=-1, keepdims=True)
    return e / total


def activate(activation: Activation, x: Array) -> Array:
    share: Array
    match activation:
        case Activation.SILU:
            share = 1 / (1 + np.exp(-x))
        case Activation.GELU:
            share = np.vectorize(math.erfc, otypes=[float])(-x / math.sqrt(2)) / 2
        case Activation.GELU_TANH:
            share = (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2
        case Activation.RELU:
            share = np.greater(x, 0).astype(np.float64)
    return x * share


def rotate(x: Array, table: Array, head_dim: int, interleaved: bool) -> Array:
    """x: [rows, heads * head_dim]; table: [rows, cos of pairs | sin of pairs]."""
    pairs = table.shape[1] // 2
    cos, sin = table[:, None, :pairs], table[:, None, pairs:]
    out = x.reshape(x.shape[0], -1, head_dim).copy()
    first = np.s_[..., 0 : 2 * pairs : 2] if interleaved else np.s_[..., :pairs]
    second = np.s_[..., 1 : 2 * pairs : 2] if interleaved else np.s_[..., pairs : 2 * pairs]
    a, b = out[first].copy(), out[second].copy()
    out[first], out[second] = a * cos - b * sin, a * sin + b * cos
    return out.reshape(x.shape)
