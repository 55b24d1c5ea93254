"""A tensor in one of the weight formats, read only when somebody needs it. Knows no files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

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
