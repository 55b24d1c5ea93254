"""Which tensors of a Hugging Face checkpoint are plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from octavo.core.errors import ModelFileError
from octavo.weights.checkpoint import StoredTensor
from octavo.weights.safetensors import RawTensor


@dataclass(frozen=True, slots=True)
class Contents:
    """tensors: what makes each tensor, by name. shapes: of each. warnings: whole sentences for the user."""

    tensors: Mapping[str, Callable[[], StoredTensor]]
    shapes: Mapping[str, tuple[int, ...]]
    warnings: list[str] = field(default_factory=list)


def plain_and_packed(config: Mapping[str, Any], raw: Mapping[str, RawTensor]) -> Contents:
    """The contents of a checkpoint with this config.json and these stored tensors. Raises ModelFileError."""
    if config.get("quantization_config") is not None:
        raise ModelFileError("the checkpoint is quantized, which is not supported yet: take a plain one or a GGUF")
    return Contents({name: t.stored for name, t in raw.items()}, {name: t.shape for name, t in raw.items()})
