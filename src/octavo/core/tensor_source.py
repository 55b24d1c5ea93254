"""Where a model's weight lies in its checkpoint: what an architecture says and a loader does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RowPattern:
    """Rows of a stored matrix (of each expert's, where there are several), or elements of a vector.

    `count` runs of `length` rows, the first at `start`, each `stride` after the one before. One run is a slice; several
    take q out of a matrix in which each head has its q, k and v side by side.
    """

    start: int
    length: int
    count: int = 1
    stride: int = 0

    @property
    def num_rows(self) -> int:
        return self.length * self.count

    @property
    def end(self) -> int:
        """After the last row."""
        return self.start + (self.count - 1) * self.stride + self.length


@dataclass(frozen=True, slots=True)
class TensorSource:
    """names: one stored tensor, or one for each expert, to be stacked along a new first dimension.

    rows: which rows of it, None for all. transposed: the file has [in_features, out_features]. add: what is added to
    each value (norms that keep their weight less one). shape: the stored one, where the same values in the same order
    have another shape in the graph.
    """

    names: tuple[str, ...]
    rows: RowPattern | None = None
    transposed: bool = False
    add: float = 0.0
    shape: tuple[int, ...] | None = None
