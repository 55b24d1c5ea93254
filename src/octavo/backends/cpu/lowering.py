"""From a graph to what the native executor reads: fused operations, a storage for each tensor, an arena, records.

Knows weight types, not weight values.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.core.errors import ConfigError, ModelFileError
from octavo.graph.builder import Graph, Node
from octavo.graph.passes import fuse, map_tensors, plan_arena
from octavo.graph.schema import (
    OPERATIONS,
    AddRmsNorm,
    Attention,
    Cast,
    ExpertGatedLinear,
    ExpertLinear,
    GatedLinear,
    Linear,
    Route,
    Rows,
    Scale,
    Softcap,
    Tensor,
    Weight,
)
from octavo.quantization.formats import WeightType

MAX_HEAD_DIM = 256
MAX_ROW_WIDTH = 1 << 17  # float32 values in a thread's scratch memory
MAX_ROUTES = 1 << 24  # of a step: their numbers stand in float32 rows
BLOCK = 32  # values that share a scale in int8 storages


class Storage(enum.IntEnum):
    """How a tensor's row lies in the arena; csrc/program.h draws it."""

    FLOAT32 = 0
    BFLOAT16 = 1
    INT8_BLOCKS = 2
    INT8_TWICE = 3  # 16 bits: where the product is a graph output, that is, logits


NATURAL_STORAGE = {
    WeightType.F32: Storage.FLOAT32,
    WeightType.F16: Storage.FLOAT32,
    WeightType.BF16: Storage.BFLOAT16,
    WeightType.FP8_E4M3: Storage.BFLOAT16,
    WeightType.FP8_E4M3_BLOCK: Storage.BFLOAT16,
    **dict.fromkeys(
        (
            WeightType.Q4_0,
            WeightType.Q4_1,
            WeightType.Q5_0,
            WeightType.Q5_1,
            WeightType.Q8_0,
            WeightType.Q2_K,
            WeightType.Q3_K,
            WeightType.Q4_K,
            WeightType.Q5_K,
            WeightType.Q6_K,
            WeightType.IQ4_NL,
            WeightType.IQ4_XS,
            WeightType.INT8,
            WeightType.U4,
            WeightType.U8,
        ),
        Storage.INT8_BLOCKS,
    ),
}


@dataclass(frozen=True, slots=True)
class Lowered:
    """weights: in the order of their ids, the order in which a step reads them."""

    graph: Graph
    weights: tuple[Weight, ...]
    records: NDArray[np.int64]
    tensors: NDArray[np.int64]  # [num_tensors, 5]: offset, width, rows, copies, storage
    arena_bytes: int


def lower(
    graph: Graph,
    weight_types: Mapping[str, WeightType],
    *,
    float_activations: bool,
    max_tokens: int,
    max_sequences: int,
) -> Lowered:
    """max_tokens, max_sequences: rows a step can have of each kind. Raises ModelFileError for what has no
    kernel, ConfigError for more rows than it can count.
    """

    def wanted_by(weight: Weight) -> Storage:
        kind = weight_types[weight.name]
        if kind not in NATURAL_STORAGE:
            names = ", ".join(t.name for t in NATURAL_STORAGE)
            raise ModelFileError(f"tensor {weight.name} is {kind.name}; the CPU backend has {names}")
        return Storage.FLOAT32 if float_activations else NATURAL_STORAGE[kind]

    graph = fuse(
        graph,
        may_pair=lambda a, b: weight_types[a.name] == weight_types[b.name],
        may_share_input=lambda a, b: wanted_by(a) == wanted_by(b),
    )
    _check_limits(graph, max_tokens)
    graph, storage = _choose_storages(graph, wanted_by)
    num_rows = {Rows.TOKENS: max_tokens, Rows.SELECTED: max_sequences}
    arena = plan_arena(graph, lambda t: num_rows[t.rows] * t.copies * _native.row_bytes(storage[t.id], t.width))
    weights = tuple(graph.weights.values())
    weight_ids = {w: i for i, w in enumerate(weights)}
    tensors = np.zeros((1 + max(t.id for n in graph.nodes for t in n.outputs), 5), np.int64)
    for node in graph.nodes:
        for t in node.outputs:
            tensors[t.id] = (arena.offsets[t.id], t.width, t.rows.value, t.copies, storage[t.id])
    records = [word for node in graph.nodes for word in _encode(node, weight_ids)]
    return Lowered(graph, weights, np.array(records, np.int64), tensors, arena.num_bytes)


def _check_limits(graph: Graph, max_tokens: int) -> None:
    if len({(g.num_kv_heads, g.head_dim) for g in graph.kv_groups}) > 1:
        heads = ", ".join(f"{g.name} {g.num_kv_heads} x {g.head_dim}" for g in graph.kv_groups)
        raise ModelFileError(f"layers differ in KV heads ({heads}); one pool of cache blocks needs them alike")
    for node in graph.nodes:
        if isinstance(node.op, Attention) and node.op.head_dim > MAX_HEAD_DIM:
            raise ModelFileError(f"head size is {node.op.head_dim}; at most {MAX_HEAD_DIM} is supported")
        if isinstance(node.op, Route) and max_tokens * node.op.top_k > MAX_ROUTES:
            raise ConfigError(
                f"--max-num-batched-tokens is {max_tokens:,} and each token goes to {node.op.top_k} experts; at most "
                f"{MAX_ROUTES:,} rows of experts are possible in a step: choose a smaller --max-num-batched-tokens"
            )
        for t in node.outputs:
            if t.rows is Rows.TOKENS and t.width > MAX_ROW_WIDTH:
                raise ModelFileError(f"a token's row has {t.width:,} values; at most {MAX_ROW_WIDTH:,} are supported")


def _choose_storages(graph: Graph, wanted_by: Callable[[Weight], Storage]) -> tuple[Graph, dict[int, Storage]]:
    """What every reader of a tensor wants decides its storage; where they differ, it is float32 and casts follow."""

    results = set(graph.outputs.values())
    for node in reversed(graph.nodes):  # logits may be scaled and capped on their way out
        if isinstance(node.op, Scale | Softcap) and results.intersection(node.outputs):
            results.add(node.op.x)

    def wanted_input(node: Node, t: Tensor) -> Storage:
        match node.op:
            case Linear(weights=(weight, *_)):
                storage = wanted_by(weight)
                is_last = not results.isdisjoint(node.outputs)
                return Storage.INT8_TWICE if is_last and storage == Storage.INT8_BLOCKS else storage
            case GatedLinear(gate=weight):
                return wanted_by(weight)
            case ExpertLinear(x=x, weight=weight) | ExpertGatedLinear(x=x, gate=weight) if t == x:
                return wanted_by(weight)
        return Storage.FLOAT32

    wants: dict[int, set[Storage]] = {}
    for node in graph.nodes:
        for t in node.inputs:
            wants.setdefault(t.id, set()).add(wanted_input(node, t))
    for t in graph.outputs.values():
        wants.setdefault(t.id, set()).add(Storage.FLOAT32)

    next_id = 1 + max(t.id for node in graph.nodes for t in node.outputs)
    storage: dict[int, Storage] = {}
    casts: dict[tuple[Tensor, Storage], Tensor] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        wanted_inputs = [(t, wanted_input(node, t)) for t in node.inputs]
        replaced = {t: casts[t, want] for t, want in wanted_inputs if (t, want) in casts}
        nodes.append(Node(map_tensors(node.op, replaced), node.outputs))
        for t in node.outputs:
            wanted = wants.get(t.id, {Storage.FLOAT32})
            if len(wanted) == 1 and _can_produce(node, t, next(iter(wanted))):
                storage[t.id] = next(iter(wanted))
                continue
            storage[t.id] = Storage.FLOAT32
            for other in sorted(wanted - {Storage.FLOAT32}):
                cast = replace(t, id=next_id)
                next_id += 1
                casts[t, other] = cast
                storage[cast.id] = other
                nodes.append(Node(Cast(t), (cast,)))
    return replace(graph, nodes=tuple(nodes)), storage


def _can_produce(node: Node, t: Tensor, storage: Storage) -> bool:
    """Attention writes head by head, so a head must be whole blocks. AddRmsNorm's sum lies where its addend lay."""
    op = node.op
    if isinstance(op, AddRmsNorm) and t == node.outputs[0]:
        return storage == Storage.FLOAT32
    in_blocks = storage in (Storage.INT8_BLOCKS, Storage.INT8_TWICE)
    return not (isinstance(op, Attention) and in_blocks and op.head_dim % BLOCK)


def _encode(node: Node, weight_ids: Mapping[Weight, int]) -> list[int]:
    """The form that csrc/generate_op_records.py describes."""

    def words(value: object) -> list[int]:
        match value:
            case None:
                return [-1]
            case Tensor():
                return [value.id]
            case Weight():
                return [weight_ids[value]]
            case enum.Enum():
                return [int(value.value)]
            case bool() | int():
                return [int(value)]
            case float():
                return [int(struct.unpack("<q", struct.pack("<d", value))[0])]
            case tuple():
                return [len(value), *(word for item in value for word in words(item))]
        raise TypeError(f"{type(node.op).__name__}: cannot encode {value!r}")

    encoded = [OPERATIONS.index(type(node.op))]
    for f in fields(node.op):
        value = getattr(node.op, f.name)
        encoded += words(float(value) if f.type == "float" else value)  # a whole number will do for a float
    return encoded + words(node.outputs)
