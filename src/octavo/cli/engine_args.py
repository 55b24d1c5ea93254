"""EngineArgs: an engine's options in Python as vLLM's class of this name has them, from keywords or a command line."""

from __future__ import annotations

import argparse
import logging
import os
from dataclasses import dataclass, fields
from typing import Any, Self, TypeVar

from octavo.cli.options import add_engine_flags
from octavo.cli.parser import add_vllm_flag
from octavo.core.config import EngineConfig
from octavo.core.vllm_flags import checked_options, vllm_flags
from octavo.engine.model_location import locate_model

logger = logging.getLogger(__name__)

AnyParser = TypeVar("AnyParser", bound=argparse.ArgumentParser)


@dataclass(frozen=True, slots=True, init=False)
class EngineArgs(EngineConfig):
    """Fields are those of EngineConfig. Other options of vLLM are accepted where they ask for nothing, and logged as a
    warning where they mean nothing here. Frozen: `dataclasses.replace` makes another.

    Raises ConfigError for a name that neither has (with the nearest one), and for what is not supported.
    """

    def __init__(self, model: str | os.PathLike[str] | None = None, **options: Any) -> None:
        given, notes = checked_options("EngineArgs", options)
        EngineConfig.__init__(self, None if model is None else os.fspath(model), **given)
        for note in notes:
            logger.warning("octavo: %s", note)

    @staticmethod
    def add_cli_args(parser: AnyParser) -> AnyParser:
        """Adds the engine's flags, and those of vLLM's that `from_cli_args` then judges, to any parser."""
        add_engine_flags(parser, positional=False)
        for name, flag in vllm_flags().items():
            if f"--{name}" not in parser._option_string_actions:
                add_vllm_flag(parser, flag)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> Self:
        """From what such a parser made; what else is in it is not looked at. Raises as the class does."""
        names = {*(field.name for field in fields(EngineConfig)), *(flag.dest for flag in vllm_flags().values())}
        return cls(**{name: value for name, value in vars(args).items() if name in names})

    def create_engine_config(self) -> EngineConfig:
        """What an engine is made from: the model found, or downloaded. Raises ConfigError, ModelFileError."""
        return locate_model(EngineConfig(**{field.name: getattr(self, field.name) for field in fields(EngineConfig)}))
