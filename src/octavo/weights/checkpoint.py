"""A model on disk, whatever its files: settings, shapes, and tensors that are read when somebody needs them.

Knows neither GGUF nor safetensors; `gguf.py` and `safetensors.py` make these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from octavo.quantization.formats import WeightType, dequantize


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as its file has it, or as it becomes while it is read.

    shape: slowest dimension first. load: its bytes in the form of `type` (quantization.formats), rows one after the
    other; called when the tensor is packed, and not before, so that one tensor at a time is in memory.
    row_scales: float32, one for each row (all dimensions but the last), by which its values are multiplied; or None.
    """

    shape: tuple[int, ...]
    type: WeightType
    load: Callable[[], NDArray[np.uint8]]
    row_scales: Callable[[], NDArray[np.float32]] | None = None

    def values(self) -> NDArray[np.float32]:
        """The numbers that the tensor stands for, of `shape`."""
        values = dequantize(self.load(), self.type, self.shape)
        if self.row_scales is None:
            return values
        return values * self.row_scales().reshape(*self.shape[:-1], 1)


class Checkpoint(Protocol):
    """kind: whose names settings and tensors have. config: GGUF metadata, or config.json. shapes: of every tensor by
    name, as numbers (a matrix that is stored packed counts as the [out_features, in_features] that it stands for).
    warnings: what a user should know of how the files were read, whole sentences.
    """

    path: Path
    kind: Literal["gguf", "hf"]
    config: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    warnings: list[str]

    def tensor(self, name: str) -> StoredTensor: ...
    def release_pages(self) -> None: ...
    def close(self) -> None: ...
