"""Builds a `Graph` operation by operation, checking shapes on the way. Knows no model and no backend."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields

from octavo.core.records import KVGroup
from octavo.graph.schema import Op, Tensor, Weight


@dataclass(frozen=True, slots=True)
class Node:
    op: Op
    outputs: tuple[Tensor, ...]

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        return tuple(v for v in _flat_fields(self.op) if isinstance(v, Tensor))

    @property
    def weights(self) -> tuple[Weight, ...]:
        return tuple(v for v in _flat_fields(self.op) if isinstance(v, Weight))


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in execution order; `outputs` by name (logits: [selected, vocab_size])."""

    nodes: tuple[Node, ...]
    outputs: dict[str, Tensor]
    kv_groups: tuple[KVGroup, ...]

    @property
    def weights(self) -> dict[str, Weight]:
        """All weights by name. Raises ValueError if one name is declared with two shapes."""
        found: dict[str, Weight] = {}
        for node in self.nodes:
            for w in node.weights:
                if found.setdefault(w.name, w) != w:
                    raise ValueError(f"weight {w.name} is declared as {found[w.name].shape} and as {w.shape}")
        return found

    def __str__(self) -> str:
        lines = []
        for node in self.nodes:
            outs = ", ".join(f"%{t.id}[{t.rows.name.lower()}, {t.width}]" for t in node.outputs)
            args = ", ".join(f"{f.name}={_show(getattr(node.op, f.name))}" for f in fields(node.op))
            lines.append(f"{outs} = {type(node.op).__name__}({args})")
        return "\n".join(lines)


class GraphBuilder:
    """`g(op)` adds an operation and returns its output."""

    def __init__(self) -> None:
        self._nodes: list[Node] = []
        self._num_tensors = 0

    def outputs_of(self, op: Op) -> tuple[Tensor, ...]:
        outs = []
        for rows, width, *copies in op.results():
            outs.append(Tensor(self._num_tensors, width, rows, *copies))
            self._num_tensors += 1
        self._nodes.append(Node(op, tuple(outs)))
        return tuple(outs)

    def __call__(self, op: Op) -> Tensor:
        (out,) = self.outputs_of(op)
        return out

    def build(self, outputs: dict[str, Tensor], kv_groups: tuple[KVGroup, ...]) -> Graph:
        return Graph(tuple(self._nodes), outputs, kv_groups)


def _flat_fields(op: Op) -> Iterator[object]:
    for f in fields(op):
        value = getattr(op, f.name)
        if isinstance(value, tuple):
            yield from value
        else:
            yield value


def _show(value: object) -> str:
    if isinstance(value, Tensor):
        return f"%{value.id}"
    if isinstance(value, Weight):
        return value.name
    if isinstance(value, tuple):
        return "(" + ", ".join(map(_show, value[:4])) + (", ...)" if len(value) > 4 else ")")
    return str(value)
