"""Typed reading of an architecture's GGUF metadata, with errors that name the key, the value and what is wanted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from octavo.core.errors import ModelFileError


class MetadataReader:
    """Reads `<architecture>.<key>` entries."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self._metadata = metadata
        self._prefix = architecture + "."

    def positive_int(self, key: str, default: int | None = None, at_most: int = 2**31 - 1) -> int:
        value = self._get(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 0 < value <= at_most:
            raise ModelFileError(f"{self._prefix}{key} is {value!r}; it must be a whole number from 1 to {at_most:,}")
        return value

    def positive_float(self, key: str, default: float | None = None) -> float:
        value = self._get(key, default)
        if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < math.inf:
            raise ModelFileError(f"{self._prefix}{key} is {value!r}; it must be a positive number")
        return float(value)

    def refuse_unless(self, key: str, supported: object) -> None:
        """An optional entry that, if present, must have the one value that is supported."""
        value = self._metadata.get(self._prefix + key, supported)
        if value != supported:
            raise ModelFileError(f"{self._prefix}{key} is {value!r}; only {supported!r} is supported yet")

    def refuse_tensor(self, name: str, tensor_shapes: Mapping[str, tuple[int, ...]], feature: str) -> None:
        if name in tensor_shapes:
            raise ModelFileError(f"the file has a tensor {name}: {feature} is not supported yet")

    def vocab_size(self, tensor_shapes: Mapping[str, tuple[int, ...]]) -> int:
        """Rows of the embedding matrix: one for each token of the file's vocabulary, and perhaps padding."""
        shape = tensor_shapes.get("token_embd.weight")
        if shape is None or len(shape) != 2:
            raise ModelFileError(f"token_embd.weight is {shape}; a matrix [vocab_size, hidden_size] is needed")
        tokens = self._metadata.get("tokenizer.ggml.tokens")
        if isinstance(tokens, list) and len(tokens) > shape[0]:
            raise ModelFileError(
                f"the vocabulary has {len(tokens):,} tokens, but token_embd.weight has {shape[0]:,} rows: "
                "convert the model again"
            )
        return shape[0]

    def _get(self, key: str, default: Any) -> Any:
        value = self._metadata.get(self._prefix + key, default)
        if value is None:
            raise ModelFileError(f"the file lacks {self._prefix}{key}")
        return value
