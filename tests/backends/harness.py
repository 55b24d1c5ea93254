"""Runs small graphs on the native backend and on the float64 reference, side by side."""

from __future__ import annotations

from dataclasses import dataclass, field

import gguf
import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu.backend import CpuModel, CpuProgram, create_executor, instruction_sets
from octavo.backends.cpu.lowering import NATURAL_STORAGE, Storage
from octavo.core.records import KVGroup
from octavo.graph.builder import Graph, GraphBuilder
from octavo.graph.reference import Reference, ReferenceBatch
from octavo.graph.schema import Embed, Tensor, Weight
from octavo.quantization.formats import WeightType
from octavo.weights.checkpoint import StoredTensor
from tests.random_blocks import random_blocks

ISAS = instruction_sets()
ALL_TYPES = tuple(NATURAL_STORAGE)
QUANTIZED = tuple(kind for kind in ALL_TYPES if NATURAL_STORAGE[kind] == Storage.INT8_BLOCKS)
MAX_TOKENS, MAX_SEQUENCES = 64, 64
NO_KV = (KVGroup("full", 1, 1, 32),)


def stored(values: NDArray[np.float64], kind: WeightType = WeightType.F32) -> StoredTensor:
    """Float types keep the values. The others have random blocks of about their size, and row scales where the type
    leaves the size to them; `values` is then no more than a shape and a seed.
    """
    if kind in (WeightType.F32, WeightType.F16, WeightType.BF16):
        data = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType(int(kind))).view(np.uint8).reshape(-1)
        return StoredTensor(values.shape, kind, lambda: data)
    rng = np.random.default_rng(np.abs(values).astype(np.float32).view(np.uint32).reshape(-1)[:8])
    blocks = random_blocks(kind, values.shape, rng, float(values.std()))
    if kind not in (WeightType.INT8, WeightType.FP8_E4M3):
        return StoredTensor(values.shape, kind, lambda: blocks)
    scales = rng.uniform(0.5, 1.5, values.shape[:-1]).astype(np.float32) * np.float32(values.std() / 75)
    return StoredTensor(values.shape, kind, lambda: blocks, lambda: scales)


@dataclass
class Bench:
    """A graph under construction with its weights; `inputs` become rows by an embedding of token ids 0, 1, 2 ..."""

    g: GraphBuilder = field(default_factory=GraphBuilder)
    tensors: dict[str, StoredTensor] = field(default_factory=dict)

    def weight(self, name: str, values: NDArray[np.float64], kind: WeightType = WeightType.F32) -> Weight:
        self.tensors[name] = stored(values, kind)
        return Weight(name, values.shape)

    def rows(self, name: str, values: NDArray[np.float64]) -> Tensor:
        return self.g(Embed(self.weight(name, values)))

    def build(self, out: Tensor, groups: tuple[KVGroup, ...] = NO_KV) -> Pair:
        return Pair(self.g.build({"out": out}, groups), self.tensors)


@dataclass
class Pair:
    graph: Graph
    tensors: dict[str, StoredTensor]

    def native(
        self,
        isa: str,
        *,
        threads: int = 2,
        float_activations: bool = True,
        num_blocks: int = 1,
        block_size: int = 16,
        kv_dtype: str = "float32",
    ) -> Native:
        model = CpuModel(
            self.graph,
            self.tensors,
            create_executor(isa, threads),
            float_activations=float_activations,
            max_tokens=MAX_TOKENS,
            max_sequences=MAX_SEQUENCES,
        )
        model.pack()
        return Native(model, model.allocate(num_blocks, block_size, kv_dtype))

    def reference(self) -> Reference:
        return Reference(self.graph, {name: t.values().astype(np.float64) for name, t in self.tensors.items()})

    def expected(self, rows: int, selected: tuple[int, ...] = ()) -> NDArray[np.float64]:
        """The output for one sequence of `rows` tokens 0, 1, 2 ..."""
        batch = ReferenceBatch(np.arange(rows), (("a", rows),), selected)
        return self.reference().run(batch)[self.graph.outputs["out"].id]


class Native:
    def __init__(self, model: CpuModel, program: CpuProgram) -> None:
        self.model, self.program = model, program
        program.pool.fill(0xFF)
        program.native.fill_workspace(0xFF)

    def step(
        self,
        token_ids: NDArray[np.int64],
        counts: list[int],
        first_positions: list[int] | None = None,
        tables: NDArray[np.int32] | list[NDArray[np.int32]] | None = None,
        selected: tuple[int, ...] = (),
    ) -> NDArray[np.float32]:
        first_row = np.cumsum([0, *counts], dtype=np.int32)
        first = np.array(first_positions or [0] * len(counts), np.int32)
        if tables is None:
            tables = np.zeros((len(counts), 64), np.int32)
        tables = tables if isinstance(tables, list) else [tables]  # of each KV group
        self.program.run(token_ids.astype(np.int32), first_row, first, tables, np.array(selected, np.int32))
        return self.program.read("out")

    def rows(self, n: int, selected: tuple[int, ...] = ()) -> NDArray[np.float32]:
        """The output for one sequence of n tokens 0, 1, 2 ..."""
        return self.step(np.arange(n), [n], selected=selected)


def relative_error(got: NDArray[np.float32], want: NDArray[np.float64]) -> float:
    assert got.shape == want.shape
    assert np.isfinite(got).all()
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))
