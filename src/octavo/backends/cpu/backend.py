"""A model on this machine's CPU: packs weights, says what memory it needs, allocates the cache, runs steps.

Knows graphs and weights; knows nothing of requests, schedules or tokens' meaning.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu import _native
from octavo.backends.cpu.lowering import lower
from octavo.core.errors import ConfigError
from octavo.graph import schema
from octavo.graph.builder import Graph
from octavo.graph.schema import Attention, Embed
from octavo.weights.checkpoint import StoredTensor

KV_TYPES = {"float32": 0, "float16": 1, "bfloat16": 2}


def instruction_sets() -> list[str]:
    """What this machine can run of what was built, best first."""
    return _native.instruction_sets()


def available_threads() -> int:
    """CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def create_executor(
    isa: str | None = None, threads: int | None = None, pulse: memoryview | None = None
) -> _native.Executor:
    """pulse: a counter, uint64 [1], that moves on while kernels run.

    Raises ConfigError for an instruction set that this build or machine lacks, or more threads than it gives.
    """
    built_from = int.from_bytes(hashlib.sha256(Path(schema.__file__).read_bytes()).digest()[:7], "big")
    if built_from != _native.SCHEMA_DIGEST:
        raise ConfigError("the native module was built from another operation schema: run `pip install .` again")
    if isa is not None and isa not in instruction_sets():
        raise ConfigError(f"instruction set {isa!r} is not available here; available: {', '.join(instruction_sets())}")
    threads = threads or available_threads()
    try:
        return _native.Executor(isa or "", threads, None if pulse is None else np.frombuffer(pulse, np.uint64))
    except (RuntimeError, MemoryError) as e:
        raise ConfigError(f"the system does not give {threads:,} threads ({e}): choose a smaller --threads") from e


class CpuModel:
    """A lowered graph and its weights.

    Made in three steps, so that the sizes are known before any memory is taken: the constructor lowers the graph,
    `pack` copies the weights into the kernels' layout (the tensors are not needed after that), and `allocate` makes the
    cache.
    max_tokens, max_sequences: the most rows of each kind that a step may have.
    """

    def __init__(
        self,
        graph: Graph,
        tensors: Mapping[str, StoredTensor],
        executor: _native.Executor,
        *,
        float_activations: bool = False,
        max_tokens: int,
        max_sequences: int,
    ) -> None:
        self._executor = executor
        self._max_tokens, self._max_sequences = max_tokens, max_sequences
        types = {name: tensors[name].type for name in graph.weights}
        self.lowered = lower(
            graph,
            types,
            float_activations=float_activations,
            max_tokens=max_tokens,
            max_sequences=max_sequences,
        )
        self._stored: list[StoredTensor] = [tensors[w.name] for w in self.lowered.weights]
        self.weight_bytes = sum(map(_packed_bytes, self._stored))
        self._weights: _native.WeightStore | None = None

    def pack(self, report: Callable[[float], None] = lambda share: None) -> None:
        """Copy the weights into the kernels' layout. report: called with the share of all bytes that is done."""
        assert self._weights is None, "packed already"
        with _reserving(f"{self.weight_bytes:,} bytes of weights"):
            self._weights = _native.WeightStore(self._executor, self.weight_bytes)
        done = 0
        for t in self._stored:
            if len(t.shape) == 1:
                self._weights.add_vector(t.values().reshape(-1))
            else:
                scales = np.zeros(0, np.float32) if t.row_scales is None else t.row_scales().reshape(-1)
                rows = np.ascontiguousarray(t.load()).reshape(-1)
                self._weights.add_matrix(int(t.type), *_matrices(t), rows, scales)
            done += _packed_bytes(t)
            report(done / self.weight_bytes)
        self._stored = []

    @property
    def workspace_bytes(self) -> int:
        """Memory for intermediates, beyond weights and cache."""
        ops = [node.op for node in self.lowered.graph.nodes]
        attentions = [op for op in ops if isinstance(op, Attention)]
        return self.lowered.arena_bytes + _native.extra_bytes(
            self._executor.threads,
            vocab_size=max((op.weight.shape[0] for op in ops if isinstance(op, Embed)), default=0),
            num_heads=max((op.num_heads for op in attentions), default=0),
            head_dim=max((op.head_dim for op in attentions), default=0),
        )

    def block_bytes(self, block_size: int, kv_dtype: str) -> int:
        """What one block of the pool costs; it has room for as many layers as the largest KV group has."""
        return self._kv_shape(1, block_size, kv_dtype).block_bytes

    def allocate(self, num_blocks: int, block_size: int, kv_dtype: str) -> CpuProgram:
        """The paged cache and a program that computes with it, once the weights are packed."""
        assert self._weights is not None, "pack() comes first"
        low = self.lowered
        with _reserving(f"{num_blocks:,} cache blocks and {self.workspace_bytes:,} bytes of workspace"):
            pool = _native.KVPool(self._kv_shape(num_blocks, block_size, kv_dtype), len(low.graph.kv_groups))
            program = _native.Program(
                self._executor,
                self._weights,
                pool,
                low.records,
                low.tensors,
                low.arena_bytes,
                self._max_tokens,
                self._max_sequences,
            )
        return CpuProgram(program, pool, {name: t.id for name, t in low.graph.outputs.items()})

    def _kv_shape(self, num_blocks: int, block_size: int, kv_dtype: str) -> _native.KVShape:
        groups = self.lowered.graph.kv_groups
        num_layers = max(g.num_layers for g in groups)
        kind, first = KV_TYPES[kv_dtype], groups[0]
        return _native.KVShape(kind, num_layers, num_blocks, block_size, first.num_kv_heads, first.head_dim)


class CpuProgram:
    """Runs steps. All arrays are C-contiguous; int32 unless said."""

    def __init__(self, program: _native.Program, pool: _native.KVPool, outputs: Mapping[str, int]) -> None:
        self.native, self.pool, self._outputs = program, pool, outputs

    def run(
        self,
        token_ids: NDArray[np.int32],
        first_row: NDArray[np.int32],
        first_position: NDArray[np.int32],
        block_tables: Sequence[NDArray[np.int32]],
        selected_rows: NDArray[np.int32],
    ) -> None:
        """One step.

        token_ids: [tokens]. Sequence s owns rows first_row[s]..first_row[s+1] at positions from first_position[s].
        block_tables: for each KV group, [sequences, >= blocks]. selected_rows: the rows whose logits are wanted.
        """
        self.native.run(token_ids, first_row, first_position, list(block_tables), selected_rows)

    def read(self, output: str) -> NDArray[np.float32]:
        """A named output of the last step, [rows, width]."""
        return self.native.read(self._outputs[output])

    def sample(self, rows: int, /, *arrays: NDArray[Any]) -> None:
        """Samples from the first `rows` rows of the logits: runner.sampler.NativeSample."""
        self.native.sample(self._outputs["logits"], rows, *arrays)

    def select(self, rows: NDArray[np.int32]) -> None:
        """The logits of other rows of the last step, instead of those selected before."""
        self.native.select(rows)

    def score(self, rows: int, /, *arrays: NDArray[Any]) -> None:
        """Scores given tokens by the first `rows` rows of the logits: runner.prompt_scorer.NativeScore."""
        self.native.score(self._outputs["logits"], rows, *arrays)

    def copy_blocks(self, source: NDArray[np.int32], destination: NDArray[np.int32]) -> None:
        self.pool.copy_blocks(source, destination)


@contextmanager
def _reserving(what: str) -> Iterator[None]:
    try:
        yield
    except MemoryError as e:
        raise ConfigError(
            f"the system does not give memory for {what}: choose a smaller --kv-cache-memory-bytes, "
            "--max-num-batched-tokens or model, or raise the limits of this process (ulimit -v)"
        ) from e


def _packed_bytes(t: StoredTensor) -> int:
    if len(t.shape) == 1:
        return _native.vector_bytes(t.shape[0])
    experts, n, k = _matrices(t)
    scales = 0 if t.row_scales is None else _native.vector_bytes(experts * n)
    return experts * _native.matrix_bytes(int(t.type), n, k) + scales


def _matrices(t: StoredTensor) -> tuple[int, int, int]:
    """(experts, out_features, in_features)"""
    *experts, n, k = t.shape
    return (experts[0] if experts else 1), n, k
