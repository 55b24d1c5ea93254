"""What an architecture sees of a checkpoint: settings, shapes, and a few small tables. Knows no file format."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.core.tensor_source import TensorSource
from octavo.graph.builder import Graph


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """kind: whose names settings and tensors have: GGUF metadata, or Hugging Face's config.json.

    read_values: the numbers of a small tensor (a table of rope factors). wanted_length: the user's --max-model-len.
    """

    kind: Literal["gguf", "hf"]
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    read_values: Callable[[str], Sequence[float]]
    wanted_length: int | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A graph, and for each of its weights by name where it lies in the checkpoint.

    unused: names of stored tensors that the graph needs nothing of, as regular expressions.
    """

    graph: Graph
    sources: Mapping[str, TensorSource]
    vocab_size: int
    max_position_embeddings: int
    unused: tuple[str, ...] = ()
