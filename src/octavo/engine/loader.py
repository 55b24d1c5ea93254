"""From a checkpoint to a model's graph and the tensors it is to be packed with. Knows neither memory nor requests."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from octavo.core.errors import shorten
from octavo.models.files import Model, ModelFiles
from octavo.models.registry import build_model
from octavo.weights.checkpoint import Checkpoint, StoredTensor
from octavo.weights.sources import resolve


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """tensors: of every weight of the graph, by name, not yet read."""

    model: Model
    tensors: Mapping[str, StoredTensor]


def load_model(
    checkpoint: Checkpoint, wanted_length: int | None = None, overrides: Mapping[str, Any] = MappingProxyType({})
) -> LoadedModel:
    """wanted_length: tokens that the user wants to run, None for all. overrides: settings that replace those of the
    checkpoint, objects within objects key by key. Raises ModelFileError.
    """

    def read_values(name: str) -> Sequence[float]:
        return checkpoint.tensor(name).values().reshape(-1).tolist()

    config = overridden(checkpoint.config, overrides)
    files = ModelFiles(checkpoint.kind, config, checkpoint.shapes, read_values, wanted_length)
    model = build_model(files)
    tensors = {  # a stored tensor can lack a first dimension of 1
        name: replace(resolve(checkpoint, model.sources[name]), shape=weight.shape)
        for name, weight in model.graph.weights.items()
    }
    return LoadedModel(model, tensors)


def unknown_overrides(checkpoint: Checkpoint, overrides: Mapping[str, Any]) -> list[str]:
    """A sentence for each override of a setting that the checkpoint has not: right for one that may be left out, but
    nothing says so if it is misspelt.
    """
    missing = [key for key in overrides if key not in checkpoint.config]
    return [
        f"--hf-overrides sets {shorten(key)!r}, which this model's settings do not have"
        + "".join(f"; they have {near!r}" for near in difflib.get_close_matches(key, checkpoint.config, n=1))
        for key in missing
    ]


def overridden(settings: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(settings)
    for key, value in overrides.items():
        old = merged.get(key)
        merged[key] = overridden(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return merged
