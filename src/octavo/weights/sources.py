"""A model's weight as its architecture wants it, out of a checkpoint's tensors: rows, stacks, the other way round.

Everything is done on the stored bytes and while they are loaded; packed blocks are never unpacked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import ModelFileError
from octavo.core.tensor_source import RowPattern, TensorSource
from octavo.quantization.formats import WeightType, row_bytes
from octavo.quantization.stored_tensor import StoredTensor
from octavo.weights.checkpoint import Checkpoint

_ITEM_TYPES = {WeightType.F32: "<u4", WeightType.F16: "<u2", WeightType.BF16: "<u2"}


def resolve(checkpoint: Checkpoint, source: TensorSource) -> StoredTensor:
    """The tensor that `source` describes. Raises ModelFileError if the checkpoint has not what it takes."""
    parts = [_one(_tensor(checkpoint, name), source, name) for name in source.names]
    return parts[0] if len(parts) == 1 else _stacked(parts, source.names)


def _tensor(checkpoint: Checkpoint, name: str) -> StoredTensor:
    if name not in checkpoint.shapes:
        raise ModelFileError(f"{checkpoint.path} lacks the tensor {name}: this model needs it")
    return checkpoint.tensor(name)


def _one(tensor: StoredTensor, source: TensorSource, name: str) -> StoredTensor:
    if source.transposed:
        tensor = _transposed(tensor, name)
    if source.rows is not None:
        tensor = _rows(tensor, source.rows, name)
    return tensor if source.add == 0 else _plus(tensor, source.add, name)


def _transposed(t: StoredTensor, name: str) -> StoredTensor:
    """The last two dimensions exchanged; a vector has only one and stays as it is."""
    if len(t.shape) == 1:
        return t
    item = _ITEM_TYPES.get(t.type)
    if item is None or t.row_scales is not None:
        raise ModelFileError(
            f"tensor {name} is stored as [in_features, out_features] in {t.type.name} blocks, which cannot be turned: "
            "take a float checkpoint of this model"
        )

    def load() -> NDArray[np.uint8]:
        turned = np.ascontiguousarray(t.load().view(item).reshape(t.shape).swapaxes(-1, -2))
        return turned.reshape(-1).view(np.uint8)

    return StoredTensor((*t.shape[:-2], t.shape[-1], t.shape[-2]), t.type, load)


def _rows(t: StoredTensor, rows: RowPattern, name: str) -> StoredTensor:
    """Rows of a matrix or of each matrix of a stack; a vector's elements are its rows of one."""
    shape = t.shape if len(t.shape) > 1 else (*t.shape, 1)
    if len(t.shape) == 1 and t.type not in _ITEM_TYPES:
        raise ModelFileError(f"tensor {name} is a vector in {t.type.name} blocks, of which no part can be taken")
    *stack, there, width = shape
    if rows.start < 0 or rows.end > there or rows.num_rows < 1:
        raise ModelFileError(f"tensor {name} has {there:,} rows, of which {rows.start:,} to {rows.end:,} are needed")
    starts = rows.start + rows.stride * np.arange(rows.count)
    # One run stays a view of the file.
    chosen = slice(rows.start, rows.end) if rows.count == 1 else (starts[:, None] + np.arange(rows.length)).reshape(-1)

    def pick(load: Callable[[], NDArray[np.uint8]], bytes_per_row: int) -> NDArray[np.uint8]:
        table = load().reshape(-1, there, bytes_per_row)
        return np.ascontiguousarray(table[:, chosen]).reshape(-1)

    def pick_scales(load: Callable[[], NDArray[np.float32]]) -> NDArray[np.float32]:
        return np.ascontiguousarray(load().reshape(-1, there)[:, chosen]).reshape(-1)

    new_shape = (*stack, rows.num_rows, width) if len(t.shape) > 1 else (rows.num_rows,)
    return StoredTensor(
        new_shape,
        t.type,
        partial(pick, t.load, row_bytes(t.type, width)),
        None if t.row_scales is None else partial(pick_scales, t.row_scales),
    )


def _plus(t: StoredTensor, add: float, name: str) -> StoredTensor:
    if len(t.shape) != 1:
        raise ModelFileError(f"tensor {name} has shape {list(t.shape)}; a vector is needed")
    return StoredTensor(
        t.shape, WeightType.F32, lambda: (t.values() + np.float32(add)).astype("<f4").view(np.uint8).reshape(-1)
    )


def _stacked(parts: list[StoredTensor], names: tuple[str, ...]) -> StoredTensor:
    first = parts[0]
    for part, name in zip(parts, names, strict=True):
        if (part.shape, part.type, part.row_scales is None) != (first.shape, first.type, first.row_scales is None):
            raise ModelFileError(
                f"tensor {name} is {part.type.name} {list(part.shape)} but {names[0]} is {first.type.name} "
                f"{list(first.shape)}: all experts of a layer must be stored alike"
            )
    num_bytes = prod(first.shape[:-1]) * row_bytes(first.type, first.shape[-1])

    def load() -> NDArray[np.uint8]:
        stack = np.empty((len(parts), num_bytes), np.uint8)
        for place, part in zip(stack, parts, strict=True):
            place[:] = part.load().reshape(-1)
        return stack.reshape(-1)

    def row_scales() -> NDArray[np.float32]:
        return np.concatenate([part.row_scales().reshape(-1) for part in parts if part.row_scales is not None])

    shape = (len(parts), *first.shape)
    return StoredTensor(shape, first.type, load, None if first.row_scales is None else row_scales)
