"""Models that are on this machine or can be fetched to it: what `octavo pull` and `octavo models` ask for."""

from __future__ import annotations

from pathlib import Path

from octavo.weights import hub
from octavo.weights.builtin import BUILTIN_PACKAGE, find_builtin_model
from octavo.weights.hub import CachedModel


def pull(name: str, revision: str | None, download_dir: str | None) -> Path:
    """Download the hub's model `name` unless it is here, with progress bars; where it is. Raises as hub.fetch does."""
    return hub.fetch(name, revision, download_dir)


def local_models(download_dir: str | None) -> list[CachedModel]:
    """The built-in model, if it is installed, and those in the hub's cache."""
    builtin = find_builtin_model()
    first = [] if builtin is None else [CachedModel(f"{BUILTIN_PACKAGE} (built in)", (), builtin.stat().st_size, 1)]
    return [*first, *hub.cached_models(download_dir)]
