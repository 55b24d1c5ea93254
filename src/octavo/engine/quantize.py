"""Writes a model file in another weight format: what `octavo quantize` asks for. Knows no terminal."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from pathlib import Path

from octavo.core.errors import ConfigError
from octavo.quantization.formats import FLOATS
from octavo.quantization.stored_tensor import StoredTensor
from octavo.weights.gguf import GGUFFile
from octavo.weights.gguf_quantize import mix_of, quantize_gguf
from octavo.weights.open_checkpoint import open_checkpoint


@dataclass(frozen=True, slots=True)
class Quantized:
    """What was written. again: formats of the source that were rounded once more."""

    num_bytes: int
    bits_per_weight: float
    again: list[str]


def quantize_model(
    source: str, target: str, type_name: str, *, force: bool, wrote: Callable[[str, str, float], None]
) -> Quantized:
    """Write the GGUF model `source` to `target` as `type_name`.

    force: over a file that is there. wrote: called after each tensor with its name, its format and the share of all
    weights that is done. Raises ConfigError for what the user can name otherwise, ModelFileError for the files.
    """
    mix = mix_of(type_name)
    path = Path(os.path.expanduser(target))
    if os.path.isdir(path):  # unlike Path.is_dir, also of what cannot be a name
        raise ConfigError(f"{target!r} is a folder: give the path of the file to write, such as {path / 'model.gguf'}")
    if os.path.exists(path) and not os.path.isfile(path):  # written over, a device would be a file from then on
        raise ConfigError(f"{target!r} is no regular file: give the path of the file to write")
    if os.path.exists(path) and not force:
        raise ConfigError(f"{target!r} is there already: choose another name, or write over it with --force")
    checkpoint = open_checkpoint(Path(os.path.expanduser(source)))
    if not isinstance(checkpoint, GGUFFile):
        checkpoint.close()
        raise ConfigError(
            f"IN must be a GGUF, and {source!r} is a Hugging Face folder: convert it to an f16 GGUF first, or serve it "
            "with --quantization, which packs its weights while they load"
        )
    if os.path.exists(path) and any(os.path.samefile(path, part) for part in checkpoint.paths):
        checkpoint.close()
        raise ConfigError(f"OUT {target!r} is a file of IN {source!r}, which would be lost: choose another name")
    total = sum(map(prod, checkpoint.shapes.values()))
    done = 0

    def report(name: str, tensor: StoredTensor) -> None:
        nonlocal done
        done += prod(tensor.shape)
        wrote(name, tensor.type.name, done / total)

    try:
        types = quantize_gguf(checkpoint, path, mix, report)
        again = {t.type for name, t in checkpoint.tensors.items() if t.type not in (*FLOATS, types[name])}
    finally:
        checkpoint.close()
    num_bytes = path.stat().st_size
    packed = mix.base not in FLOATS
    return Quantized(num_bytes, 8 * num_bytes / max(total, 1), [kind.name for kind in sorted(again)] if packed else [])
