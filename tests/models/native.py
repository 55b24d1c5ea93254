"""Runs a checkpoint's graph step by step, without engine, scheduler or sampler: tokens in, logits out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from octavo.backends.cpu.backend import CpuModel, create_executor
from octavo.engine.loader import load_model
from octavo.weights.open_checkpoint import open_checkpoint


class NativeModel:
    """One sequence at a time. `kv_dtype`, `float_activations`, `isa`, `threads` as the engine has them."""

    def __init__(
        self,
        path: Path,
        *,
        isa: str | None = None,
        kv_dtype: str = "float32",
        float_activations: bool = True,
        threads: int = 2,
        max_tokens: int = 128,
        context: int = 2560,
    ) -> None:
        checkpoint = open_checkpoint(path)
        loaded = load_model(checkpoint, context)
        model = CpuModel(
            loaded.model.graph,
            loaded.tensors,
            create_executor(isa, threads),
            float_activations=float_activations,
            max_tokens=max_tokens,
            max_sequences=max_tokens,
        )
        model.pack()
        checkpoint.close()
        self.max_tokens = max_tokens
        groups, blocks = len(loaded.model.graph.kv_groups), context // 16
        self._program = model.allocate(groups * blocks, 16, kv_dtype)
        self._program.pool.fill(0xFF)
        places = np.random.default_rng(0).permutation(groups * blocks).astype(np.int32)
        self._tables = list(places.reshape(groups, 1, blocks))  # each group its own blocks of the one pool
        self.length = 0

    def logits(self, tokens: NDArray[np.int32] | list[int], chunks: list[int] | None = None) -> NDArray[np.float32]:
        """Appends tokens to the sequence, in the given chunks; [len(tokens), vocab_size]."""
        tokens = np.asarray(tokens, np.int32)
        out = []
        for count in chunks or [self.max_tokens] * -(-len(tokens) // self.max_tokens):
            part, tokens = tokens[:count], tokens[count:]
            rows = np.arange(len(part), dtype=np.int32)
            span, first = np.array([0, len(part)], np.int32), np.array([self.length], np.int32)
            self._program.run(np.ascontiguousarray(part), span, first, self._tables, rows)
            out.append(self._program.read("logits"))
            self.length += len(part)
        return np.concatenate(out)
