"""Rewriting passes over a `Graph`: each takes a graph and returns an equivalent one with fewer, larger operations.

`fuse` is what backends use. `plan_arena` gives every intermediate its place in one buffer by liveness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from octavo.graph.builder import Graph, Node
from octavo.graph.schema import (
    Activation,
    Add,
    AddRmsNorm,
    Attention,
    ExpertGatedLinear,
    ExpertLinear,
    GatedActivation,
    GatedLinear,
    Linear,
    Op,
    RmsNorm,
    Rope,
    SelectRows,
    Tensor,
    Weight,
)

MayShare = Callable[[Weight, Weight], bool]


def fuse(graph: Graph, may_pair: MayShare = lambda a, b: True, may_share_input: MayShare = lambda a, b: True) -> Graph:
    """All passes. What a backend can run decides: `may_pair` whether two weights can be the halves of one GatedLinear,
    `may_share_input` whether they can be parts of one Linear.
    """
    graph = fuse_gated_linear(graph, may_pair)
    graph = fuse_shared_input_linears(graph, may_share_input)
    graph = fuse_rope(graph)
    return fuse_add_norm(graph)


def fuse_gated_linear(graph: Graph, may_pair: MayShare) -> Graph:
    """Linear, Linear, GatedActivation -> GatedLinear, and the same with the linears of experts."""
    producer, uses = _producers(graph), _uses(graph)
    replaced: dict[int, Node | None] = {}
    for i, node in enumerate(graph.nodes):
        if not isinstance(node.op, GatedActivation):
            continue
        gi, ui = producer[node.op.gate.id], producer[node.op.up.id]
        gate, up = graph.nodes[gi].op, graph.nodes[ui].op
        if uses[node.op.gate.id] != 1 or uses[node.op.up.id] != 1:
            continue
        fused = _gated(gate, up, node.op.activation, may_pair)
        if fused is not None:
            replaced |= {gi: None, ui: None, i: Node(fused, node.outputs)}
    return _rebuild(graph, replaced)


def _gated(gate: Op, up: Op, activation: Activation, may_pair: MayShare) -> Op | None:
    match gate, up:
        case Linear(x, (g,), (None,)), Linear(other, (u,), (None,)) if x == other and may_pair(g, u):
            return GatedLinear(x, g, u, activation)
        case ExpertLinear(x, routes, g), ExpertLinear(other, _, u) if x == other and may_pair(g, u):
            return ExpertGatedLinear(x, routes, g, u, activation)
    return None


def fuse_shared_input_linears(graph: Graph, may_share: MayShare) -> Graph:
    """Neighbouring Linear nodes with one input become one with several weights (QKV): one pass over the threads."""
    nodes: list[Node] = []
    for node in graph.nodes:
        op, last = node.op, nodes[-1].op if nodes else None
        if (
            isinstance(op, Linear)
            and isinstance(last, Linear)
            and op.x == last.x
            and may_share(last.weights[0], op.weights[0])
        ):
            both = Linear(op.x, last.weights + op.weights, last.biases + op.biases)
            nodes[-1] = Node(both, nodes[-1].outputs + node.outputs)
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def fuse_rope(graph: Graph) -> Graph:
    """Rope on q and on k, Attention -> Attention with a rope table: q rotated in place, k on its way to the cache."""
    producer, uses = _producers(graph), _uses(graph)
    replaced: dict[int, Node | None] = {}
    for i, node in enumerate(graph.nodes):
        op = node.op
        if not isinstance(op, Attention) or op.rope is not None:
            continue
        qi, ki = producer[op.q.id], producer[op.k.id]
        q, k = graph.nodes[qi].op, graph.nodes[ki].op
        if not (isinstance(q, Rope) and isinstance(k, Rope)) or any(uses[t.id] != 1 for t in (op.q, op.k, q.x)):
            continue
        if q.table == k.table and q.interleaved == k.interleaved and q.head_dim == k.head_dim == op.head_dim:
            fused = replace(op, q=q.x, k=k.x, rope=q.table, rope_interleaved=q.interleaved)
            replaced |= {qi: None, ki: None, i: Node(fused, node.outputs)}
    return _rebuild(graph, replaced)


def fuse_add_norm(graph: Graph) -> Graph:
    """Add, RmsNorm of the sum -> AddRmsNorm. The addend that dies there lends its memory to the sum."""
    consumers: dict[int, list[int]] = {}
    for i, node in enumerate(graph.nodes):
        for t in node.inputs:
            consumers.setdefault(t.id, []).append(i)
    replaced: dict[int, Node | None] = {}
    for i, node in enumerate(graph.nodes):
        if not isinstance(node.op, Add):
            continue
        (total,) = node.outputs
        norms = [j for j in consumers.get(total.id, []) if _normalizes_whole_rows(graph.nodes[j].op)]
        x_dies = max(consumers[node.op.x.id]) == i
        if norms and x_dies and node.op.x.id not in {t.id for t in graph.outputs.values()}:
            norm = graph.nodes[norms[0]]
            assert isinstance(norm.op, RmsNorm)
            op = AddRmsNorm(node.op.x, node.op.y, norm.op.weight, norm.op.eps)
            replaced |= {i: Node(op, (total, norm.outputs[0])), norms[0]: None}
    return _rebuild(graph, replaced)


@dataclass(frozen=True, slots=True)
class Arena:
    offsets: Mapping[int, int]  # tensor id -> byte offset
    num_bytes: int


def plan_arena(graph: Graph, size_of: Callable[[Tensor], int], alignment: int = 64) -> Arena:
    """First-fit placement by liveness: tensors whose lives overlap never share memory.

    A node's outputs never overlap its inputs, except that AddRmsNorm writes its sum over x. Graph outputs live on, and
    so does what rows are selected from, so that others can be selected later.
    """
    last_use = {t.id: i for i, node in enumerate(graph.nodes) for t in node.inputs}
    end = len(graph.nodes)
    last_use |= {t.id: end for t in graph.outputs.values()}
    last_use |= {node.op.x.id: end for node in graph.nodes if isinstance(node.op, SelectRows)}
    live: list[tuple[int, int, int]] = []  # (offset, size, dies after node)
    offsets: dict[int, int] = {}
    total = 0
    for i, node in enumerate(graph.nodes):
        live = [block for block in live if block[2] >= i]
        outputs = node.outputs
        if isinstance(node.op, AddRmsNorm):
            offsets[outputs[0].id] = offsets[node.op.x.id]
            live.append((offsets[node.op.x.id], size_of(outputs[0]), last_use.get(outputs[0].id, i)))
            outputs = outputs[1:]
        for t in outputs:
            size = -(-size_of(t) // alignment) * alignment
            at = 0
            for offset, taken, _ in sorted(live):
                if at + size <= offset:
                    break
                at = max(at, -(-(offset + taken) // alignment) * alignment)
            offsets[t.id] = at
            live.append((at, size, last_use.get(t.id, i)))
            total = max(total, at + size)
    return Arena(offsets, total)


def map_tensors(op: Op, mapping: Mapping[Tensor, Tensor]) -> Op:
    """The same operation reading other tensors."""
    changed: dict[str, Any] = {}
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, Tensor) and value in mapping:
            changed[f.name] = mapping[value]
    return replace(op, **changed) if changed else op


def _producers(graph: Graph) -> dict[int, int]:
    return {t.id: i for i, node in enumerate(graph.nodes) for t in node.outputs}


def _normalizes_whole_rows(op: Op) -> bool:
    return isinstance(op, RmsNorm) and op.groups == 1


def _uses(graph: Graph) -> Counter[int]:
    return Counter(t.id for node in graph.nodes for t in node.inputs) + Counter(t.id for t in graph.outputs.values())


def _rebuild(graph: Graph, replaced: Mapping[int, Node | None]) -> Graph:
    nodes = (replaced.get(i, node) for i, node in enumerate(graph.nodes))
    return replace(graph, nodes=tuple(n for n in nodes if n is not None))
