"""A tensor as a safetensors file has it: bytes, a type by its name there, and a shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.quantization.formats import WeightType
from octavo.quantization.stored_tensor import StoredTensor

ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4, "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
FLOAT_TYPES = {"F32": WeightType.F32, "F16": WeightType.F16, "BF16": WeightType.BF16}
_INTEGER_TYPES = {"U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "I64": "<i8"}


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A scalar counts as a vector of one. data: a read-only view of the file, [num_bytes]."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    data: NDArray[np.uint8]

    def integers(self) -> NDArray[Any]:
        """The numbers of an integer tensor, [*shape]. Raises ModelFileError for another type."""
        code = _INTEGER_TYPES.get(self.dtype)
        if code is None:
            raise ModelFileError(f"tensor {self.name} has the type {self.dtype} where integers are needed")
        return self.data.view(code).reshape(self.shape)

    def stored(self) -> StoredTensor:
        """The tensor as a plain weight. Raises ModelFileError for a type that is not a float of 16 or 32 bits."""
        kind = FLOAT_TYPES.get(self.dtype)
        if kind is None:
            supported = ", ".join(FLOAT_TYPES)
            raise ModelFileError(
                f"tensor {self.name} has the type {self.dtype}; a plain weight must be one of {supported}: convert it"
            )
        data = self.data
        return StoredTensor(self.shape, kind, lambda: data)
