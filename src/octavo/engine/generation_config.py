"""What a model's makers recommend for sampling and where a reply ends: generation_config.json, and what users override.

Names and rules are vLLM's. Knows neither requests nor the engine.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, InvalidRequestError, ModelFileError, shorten
from octavo.core.records import SamplingParams

FILE_NAME = "generation_config.json"
MAX_BYTES = 1 << 20
# generation_config.json's names of SamplingParams' fields.
FIELDS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """sampling: fields of SamplingParams that a request which does not set them gets. eos_token_ids: which end a reply,
    beside those that the tokenizer knows.
    """

    sampling: Mapping[str, Any]
    eos_token_ids: frozenset[int] = frozenset()

    def params(self) -> SamplingParams:
        return SamplingParams(**self.sampling)


def load_generation_defaults(config: EngineConfig) -> GenerationDefaults:
    """--generation-config says where from: "auto" (beside the model), "vllm" (none), or a folder or file; what
    --override-generation-config has wins. Raises ConfigError, ModelFileError.
    """
    path = _path(config)
    values = {} if path is None else _read(path)
    values |= {name: value for name, value in config.override_generation_config.items() if value is not None}
    where = "--override-generation-config" if config.override_generation_config else str(path)
    sampling = {FIELDS[name]: value for name, value in values.items() if name in FIELDS and value is not None}
    try:
        SamplingParams(**sampling)
    except InvalidRequestError as error:
        raise ConfigError(f"{where}: {error}; leave it out with --generation-config vllm") from error
    ids = values.get("eos_token_id")
    ids = [] if ids is None else ids if isinstance(ids, list) else [ids]
    if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
        raise ConfigError(f"{where}: eos_token_id is {shorten(repr(ids))}; it must be one or several token ids")
    unknown = [name for name in config.override_generation_config if name not in (*FIELDS, "eos_token_id")]
    if unknown:
        known = ", ".join((*FIELDS, "eos_token_id"))
        raise ConfigError(f"--override-generation-config has {shorten(repr(unknown[0]))}; it can have {known}")
    return GenerationDefaults(sampling, frozenset(ids))


def _path(config: EngineConfig) -> Path | None:
    if config.generation_config == "vllm":
        return None
    if config.generation_config != "auto":
        named = Path(os.path.expanduser(config.generation_config))
        path = named / FILE_NAME if os.path.isdir(named) else named
        if not os.path.isfile(path):
            raise ConfigError(
                f'--generation-config is {str(named)!r}; it must be "auto", "vllm", a file or a folder with {FILE_NAME}'
            )
        return path
    assert config.model is not None, "the model has been located"
    path = Path(config.model) / FILE_NAME
    return path if path.is_symlink() or path.exists() else None


def _read(path: Path) -> dict[str, Any]:
    try:
        if not path.is_file():  # a pipe would be read for ever
            raise ModelFileError(
                f"{path} is no regular file, or a link to nothing: mend it, or use --generation-config vllm"
            )
        if path.stat().st_size > MAX_BYTES:
            raise ModelFileError(f"{path} has more than {MAX_BYTES:,} bytes: it is damaged")
        values = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise ModelFileError(f"cannot read {path} ({error}): mend it, or use --generation-config vllm") from error
    if not isinstance(values, dict):
        raise ModelFileError(f"{path} is not a JSON object: mend it, or use --generation-config vllm")
    return values
