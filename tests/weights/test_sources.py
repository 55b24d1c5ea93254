from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import pytest

from octavo.core.errors import ModelFileError
from octavo.core.tensor_source import RowPattern, TensorSource
from octavo.quantization.formats import WeightType
from octavo.weights.checkpoint import StoredTensor
from octavo.weights.sources import resolve


@dataclass
class FakeCheckpoint:
    """Stored tensors by name; `loaded` lists what was read, in order."""

    tensors: Mapping[str, StoredTensor]
    path: Path = Path("fake")
    kind: Literal["gguf", "hf"] = "hf"
    quantized_by: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    loaded: list[str] = field(default_factory=list)

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: t.shape for name, t in self.tensors.items()}

    def tensor(self, name: str) -> StoredTensor:
        stored = self.tensors[name]

        def load() -> np.ndarray:
            self.loaded.append(name)
            return stored.load()

        return replace(stored, load=load)

    def release_pages(self) -> None: ...
    def close(self) -> None: ...


def stored(values: np.ndarray, kind: WeightType = WeightType.F32, scales: np.ndarray | None = None) -> StoredTensor:
    data = gguf.quantize(values.astype(np.float32), gguf.GGMLQuantizationType(kind)).view(np.uint8).reshape(-1)
    return StoredTensor(values.shape, kind, lambda: data, None if scales is None else lambda: scales)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


KINDS = [WeightType.F32, WeightType.F16, WeightType.BF16, WeightType.Q8_0, WeightType.Q4_0]
PATTERNS = [RowPattern(0, 4), RowPattern(5, 7), RowPattern(2, 2, 3, 4), RowPattern(0, 1, 12, 1)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", PATTERNS)
def test_rows_of_a_packed_matrix_are_taken_without_unpacking(kind: WeightType, rows: RowPattern) -> None:
    whole = stored(random(12, 64), kind)
    got = resolve(FakeCheckpoint({"w": whole}), TensorSource(("w",), rows))
    chosen = [rows.start + i * rows.stride + j for i in range(rows.count) for j in range(rows.length)]
    assert (got.type, got.shape) == (kind, (len(chosen), 64))
    np.testing.assert_array_equal(got.values(), whole.values()[chosen])


def test_rows_bring_their_scales_along_and_apply_to_every_matrix_of_a_stack() -> None:
    scales = random(36, seed=1)
    whole = stored(random(3, 12, 64), WeightType.Q8_0, scales)
    got = resolve(FakeCheckpoint({"w": whole}), TensorSource(("w",), RowPattern(1, 2, 2, 6)))
    assert got.shape == (3, 4, 64)
    np.testing.assert_array_equal(got.values(), whole.values()[:, [1, 2, 7, 8]])


def test_rows_of_a_vector_are_its_elements() -> None:
    got = resolve(FakeCheckpoint({"b": stored(np.arange(12))}), TensorSource(("b",), RowPattern(1, 2, 2, 6)))
    assert got.values().tolist() == [1, 2, 7, 8]


@pytest.mark.parametrize("kind", [WeightType.F32, WeightType.F16, WeightType.BF16])
def test_a_transposed_matrix_is_turned_before_its_rows_are_taken(kind: WeightType) -> None:
    whole = stored(random(8, 12), kind)
    got = resolve(FakeCheckpoint({"w": whole}), TensorSource(("w",), RowPattern(4, 4), transposed=True))
    assert (got.type, got.shape) == (kind, (4, 8))
    np.testing.assert_array_equal(got.values(), whole.values().T[4:8])


def test_blocks_cannot_be_turned() -> None:
    checkpoint = FakeCheckpoint({"w": stored(random(32, 32), WeightType.Q8_0)})
    with pytest.raises(ModelFileError, match="Q8_0 blocks, which cannot be turned"):
        resolve(checkpoint, TensorSource(("w",), transposed=True))


@pytest.mark.parametrize("kind", [WeightType.F32, WeightType.BF16])
def test_what_is_added_to_a_vector_is_added_in_float32(kind: WeightType) -> None:
    whole = stored(random(9), kind)
    got = resolve(FakeCheckpoint({"n": whole}), TensorSource(("n",), add=1.0))
    assert got.type == WeightType.F32
    np.testing.assert_array_equal(got.values(), whole.values() + np.float32(1))
    with pytest.raises(ModelFileError, match="a vector is needed"):
        resolve(FakeCheckpoint({"n": stored(random(2, 2))}), TensorSource(("n",), add=1.0))


def test_experts_are_stacked_when_loaded_and_not_before() -> None:
    parts = {f"e{i}": stored(random(4, 32, seed=i), WeightType.Q8_0, random(4, seed=9 + i)) for i in range(3)}
    checkpoint = FakeCheckpoint(parts)
    got = resolve(checkpoint, TensorSource(tuple(parts), RowPattern(1, 2)))
    assert got.shape == (3, 2, 32)
    assert checkpoint.loaded == []
    np.testing.assert_array_equal(got.values(), np.stack([t.values()[1:3] for t in parts.values()]))
    assert checkpoint.loaded == ["e0", "e1", "e2"]


def test_experts_that_are_stored_differently_are_refused() -> None:
    checkpoint = FakeCheckpoint({"a": stored(random(4, 32)), "b": stored(random(4, 32), WeightType.Q8_0)})
    with pytest.raises(ModelFileError, match=r"b is Q8_0 \[4, 32\] but a is F32"):
        resolve(checkpoint, TensorSource(("a", "b")))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (TensorSource(("gone",)), "fake lacks the tensor gone"),
        (TensorSource(("w",), RowPattern(0, 5)), "w has 4 rows, of which 0 to 5"),
        (TensorSource(("w",), RowPattern(0, 2, 2, 3)), "w has 4 rows, of which 0 to 5"),
        (TensorSource(("w",), RowPattern(0, 0)), "w has 4 rows"),
        (TensorSource(("v",), RowPattern(0, 4)), "no part can be taken"),
    ],
)
def test_what_the_checkpoint_cannot_give_is_refused(source: TensorSource, message: str) -> None:
    checkpoint = FakeCheckpoint({"w": stored(random(4, 8)), "v": stored(random(32), WeightType.Q8_0)})
    with pytest.raises(ModelFileError, match=message):
        resolve(checkpoint, source)
