"""Which families there are. A new one is a file beside this, a line here and a parity test."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.errors import ModelFileError
from octavo.core.tensor_source import TensorSource
from octavo.models.files import Model, ModelFiles
from octavo.models.llama import llama
from octavo.models.mixtral import mixtral


@dataclass(frozen=True, slots=True)
class Family:
    """name: for people. gguf: values of general.architecture. hf: values of config.json's model_type."""

    name: str
    build: Callable[[ModelFiles], Model]
    gguf: tuple[str, ...] = ()
    hf: tuple[str, ...] = ()


FAMILIES = (
    Family("Llama, Mistral", llama, gguf=("llama",), hf=("llama", "mistral")),
    Family("Mixtral", mixtral, hf=("mixtral",)),
)


def architecture_of(files: ModelFiles) -> object:
    return files.config.get("general.architecture" if files.kind == "gguf" else "model_type")


def build_model(files: ModelFiles) -> Model:
    """The graph of a checkpoint from its settings and tensor shapes. Raises ModelFileError."""
    name = architecture_of(files)
    by_name = {key: f for f in FAMILIES for key in (f.gguf if files.kind == "gguf" else f.hf)}
    if not isinstance(name, str) or name not in by_name:
        key = "general.architecture" if files.kind == "gguf" else "model_type"
        raise ModelFileError(f"{key} is {name!r}, which is not supported; supported: {', '.join(sorted(by_name))}")
    try:
        model = by_name[name].build(files)
        weights = model.graph.weights
    except (ValueError, OverflowError) as e:
        raise ModelFileError(f"the model's dimensions do not fit each other: {e}") from e
    for weight_name, weight in weights.items():
        _check_source(files, weight_name, weight.shape, model.sources[weight_name])
    used = {stored for source in model.sources.values() for stored in source.names}
    may_be_left_out = re.compile("|".join(model.unused) or "(?!)")
    unknown = [stored for stored in files.shapes if stored not in used and not may_be_left_out.fullmatch(stored)]
    if unknown:  # to leave one out would be to compute another model
        raise ModelFileError(
            f"the model has {len(unknown)} tensors that octavo's {name} does not know, the first is {unknown[0]}: "
            "this variant of the architecture is not supported yet"
        )
    return model


def _check_source(files: ModelFiles, name: str, shape: tuple[int, ...], source: TensorSource) -> None:
    """That what lies at a source is what the graph needs."""
    for stored in source.names:
        found = files.shapes.get(stored)
        needed = shape if len(source.names) == 1 else shape[1:]
        rows_at = -2 if len(needed) > 1 else -1
        if source.transposed:
            needed = (*needed[:-2], needed[-1], needed[-2])
            rows_at = -1
        if found is not None and source.rows is not None and len(found) == len(needed):
            whole = list(needed)
            whole[rows_at] = found[rows_at]
            if source.rows.num_rows == needed[rows_at] and source.rows.end <= found[rows_at]:
                needed = tuple(whole)
        if found != needed:
            what = "is missing" if found is None else f"has shape {list(found)}"
            where = "" if stored == name else f" (for {name})"
            raise ModelFileError(f"tensor {stored}{where} {what}; {list(needed)} is needed")
