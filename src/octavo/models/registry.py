"""Which architectures there are. A new one is a file beside this, one line here and a parity test."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.graph.builder import Graph
from octavo.models.llama import LlamaConfig, llama


@dataclass(frozen=True, slots=True)
class Model:
    architecture: str
    graph: Graph
    vocab_size: int
    max_position_embeddings: int


def _llama(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> Model:
    c = LlamaConfig.from_gguf(metadata, shapes)
    return Model("llama", llama(c), c.vocab_size, c.max_position_embeddings)


ARCHITECTURES: dict[str, Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]]], Model]] = {
    "llama": _llama,
}


def build_model(metadata: Mapping[str, Any], tensor_shapes: Mapping[str, tuple[int, ...]]) -> Model:
    """The graph of a GGUF file from its metadata and tensor shapes. Raises ModelFileError."""
    name = metadata.get("general.architecture")
    build = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if build is None:
        raise ModelFileError(f"architecture {name!r} is not supported; supported: {', '.join(ARCHITECTURES)}")
    try:
        model = build(metadata, tensor_shapes)
    except (ValueError, OverflowError) as e:
        raise ModelFileError(f"the file's dimensions do not fit each other: {e}") from e
    for w in model.graph.weights.values():
        shape = tensor_shapes.get(w.name)
        if shape != w.shape:
            found = "is missing" if shape is None else f"has shape {list(shape)}"
            raise ModelFileError(f"tensor {w.name} {found}; {list(w.shape)} is needed")
    unknown = [name for name in tensor_shapes if name not in model.graph.weights]
    if unknown:  # to leave one out would be to compute another model
        raise ModelFileError(
            f"the file has {len(unknown)} tensors that octavo's {name} does not know, the first is {unknown[0]}: "
            "this variant of the architecture is not supported yet"
        )
    return model
