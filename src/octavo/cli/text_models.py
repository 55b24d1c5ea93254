"""The model that a terminal command talks to: one in this process, or one behind a running server; and its settings."""

from __future__ import annotations

import argparse
import dataclasses
import os
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from octavo.cli.options import engine_config, given_settings
from octavo.cli.values import human_int
from octavo.core.errors import ConfigError
from octavo.core.records import SamplingParams
from octavo.engine.generation_config import load_generation_defaults

if TYPE_CHECKING:
    from octavo.llm import LLM

TEMPERATURE = 0.7  # small models ramble at 1

Message = Mapping[str, Any]


class Piece(NamedTuple):
    """A piece of an answer, or of the reasoning before it."""

    text: str
    is_reasoning: bool = False


class TextModel(Protocol):
    """What the commands need. Closing an iterator stops the generation."""

    @property
    def name(self) -> str: ...
    def stream(self, prompt: str, sampling_params: SamplingParams) -> Generator[Piece]: ...
    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams) -> Generator[Piece]: ...
    def close(self) -> None: ...


class LocalModel:
    """The offline `LLM` as a TextModel. It separates no reasoning."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @property
    def name(self) -> str:
        return self._llm.info.served_model_name

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Generator[Piece]:
        return _pieces(self._llm.stream(prompt, sampling_params))

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams) -> Generator[Piece]:
        return _pieces(self._llm.stream_chat(messages, sampling_params))

    def close(self) -> None:
        self._llm.close()


def _pieces(texts: Generator[str]) -> Generator[Piece]:
    with closing(texts):
        for text in texts:
            yield Piece(text)


def add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("text")
    limit = "all that fits" if max_tokens is None else str(max_tokens)
    group.add_argument("--url", metavar="URL", help="ask this running server, as http://127.0.0.1:8000")
    group.add_argument("--model-name", metavar="NAME", help="the model to ask that server for; default: its first one")
    group.add_argument("--api-key", metavar="KEY", help="of that server, if it asks for one (OCTAVO_API_KEY)")
    group.add_argument("--max-tokens", type=human_int, default=max_tokens, help=f"length of an answer ({limit})")
    group.add_argument("--temperature", type=float, help=f"0 is greedy (the model's, or {TEMPERATURE})")
    group.add_argument("--top-p", type=float, help="sample from the likeliest tokens of this total (the model's, or 1)")


def text_model(args: argparse.Namespace) -> tuple[TextModel, SamplingParams]:
    """The model that the flags name, and how to sample from it. Raises ConfigError, ModelFileError."""
    if args.url is not None:
        if args.model_argument is not None or given_settings(args):
            raise ConfigError(
                "--url asks a running server, which has its settings: leave out the model and engine flags"
            )
        from octavo.cli.remote import RemoteModel

        key = args.api_key or os.environ.get("OCTAVO_API_KEY")
        return RemoteModel(args.url, key, args.model_name), _sampling_params(args, {})
    for flag, value in (("--api-key", args.api_key), ("--model-name", args.model_name)):
        if value is not None:
            raise ConfigError(f"{flag} is of a running server: name it with --url, or leave {flag} out")
    from octavo.llm import LLM

    config = engine_config(args)
    params = _sampling_params(args, load_generation_defaults(config).sampling)
    llm = LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    return LocalModel(llm), params


def _sampling_params(args: argparse.Namespace, recommended: Mapping[str, Any]) -> SamplingParams:
    asked = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    given = {name: value for name, value in asked.items() if value is not None}
    return SamplingParams(**{"temperature": TEMPERATURE, "max_tokens": None, **recommended, **given})
