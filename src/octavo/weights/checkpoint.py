"""A model on disk, whatever its files: settings, shapes, and tensors that are read when somebody needs them.

Knows neither GGUF nor safetensors; `gguf.py` and `safetensors.py` make these.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Protocol

from octavo.quantization.stored_tensor import StoredTensor as StoredTensor  # backends know it from here


class Checkpoint(Protocol):
    """kind: whose names settings and tensors have. config: GGUF metadata, or config.json. shapes: of every tensor by
    name, as numbers (a matrix that is stored packed counts as the [out_features, in_features] that it stands for).
    quantized_by: the method by which its maker has packed it, by its own name, or None.
    warnings: what a user should know of how the files were read, whole sentences.
    """

    path: Path
    kind: Literal["gguf", "hf"]
    quantized_by: str | None
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    warnings: list[str]

    def tensor(self, name: str) -> StoredTensor: ...
    def release_pages(self) -> None: ...
    def close(self) -> None: ...
