"""`octavo chat` and `octavo complete`: text in a terminal, from a model in this process or from a running server."""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Generator, Mapping
from contextlib import closing, suppress
from typing import Any, Protocol

from octavo.cli.options import add_engine_flags, engine_config, given_settings, human_int
from octavo.core.errors import ConfigError, InvalidRequestError
from octavo.core.records import SamplingParams
from octavo.engine.generation_config import load_generation_defaults

COMPLETE_MAX_TOKENS = 128
TEMPERATURE = 0.7  # small models ramble at 1
HELP = "ctrl-C stops an answer, /new forgets the conversation, ctrl-D ends."


class TextModel(Protocol):
    """What both commands need: the offline `LLM` and `RemoteModel` have it."""

    def stream(self, prompt: str, sampling_params: SamplingParams) -> Generator[str]: ...
    def stream_chat(self, messages: list[dict[str, str]], sampling_params: SamplingParams) -> Generator[str]: ...
    def close(self) -> None: ...


def add_chat_flags(parser: argparse.ArgumentParser) -> None:
    _add_sampling_flags(parser, max_tokens=None)
    parser.add_argument("--system", metavar="TEXT", help="a system message")
    add_engine_flags(parser)


def add_complete_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    _add_sampling_flags(parser, max_tokens=COMPLETE_MAX_TOKENS)
    add_engine_flags(parser)


def chat(args: argparse.Namespace) -> int:
    """Converse until the end of input."""
    model, params = _model(args)
    opening = [{"role": "system", "content": args.system}] if args.system else []
    with closing(model):
        print(HELP)
        messages = list(opening)
        while True:
            try:
                text = input("> ").strip()
            except EOFError:
                print()
                return 0
            except KeyboardInterrupt:
                print()
                continue
            if text == "/new":
                messages = list(opening)
            elif text:
                messages.append({"role": "user", "content": text})
                try:
                    answer = _show(model.stream_chat(messages, params))
                except InvalidRequestError as error:
                    messages.pop()
                    print(f"octavo: {error} (/new forgets the conversation)", file=sys.stderr)
                else:
                    messages.append({"role": "assistant", "content": answer})


def complete(args: argparse.Namespace) -> int:
    """Print one continuation."""
    model, params = _model(args)
    with closing(model):
        _show(model.stream(args.prompt, params))
    return 0


def _add_sampling_flags(parser: argparse.ArgumentParser, max_tokens: int | None) -> None:
    group = parser.add_argument_group("text")
    limit = "all that fits" if max_tokens is None else str(max_tokens)
    group.add_argument("--url", metavar="URL", help="ask this running server, as http://127.0.0.1:8000")
    group.add_argument("--api-key", metavar="KEY", help="of that server, if it asks for one (OCTAVO_API_KEY)")
    group.add_argument("--max-tokens", type=human_int, default=max_tokens, help=f"length of an answer ({limit})")
    group.add_argument("--temperature", type=float, help=f"0 is greedy (the model's, or {TEMPERATURE})")
    group.add_argument("--top-p", type=float, help="sample from the likeliest tokens of this total (the model's, or 1)")


def _sampling_params(args: argparse.Namespace, recommended: Mapping[str, Any]) -> SamplingParams:
    asked = {"temperature": args.temperature, "top_p": args.top_p, "max_tokens": args.max_tokens}
    given = {name: value for name, value in asked.items() if value is not None}
    return SamplingParams(**{"temperature": TEMPERATURE, "max_tokens": None, **recommended, **given})


def _model(args: argparse.Namespace) -> tuple[TextModel, SamplingParams]:
    """The model, and how to sample from it."""
    if args.url is not None:
        if args.model_argument is not None or given_settings(args):
            raise ConfigError(
                "--url asks a running server, which has its settings: leave out the model and engine flags"
            )
        from octavo.cli.remote import RemoteModel

        return RemoteModel(args.url, args.api_key or os.environ.get("OCTAVO_API_KEY")), _sampling_params(args, {})
    if args.api_key is not None:
        raise ConfigError("--api-key is of a running server: name it with --url, or leave the key out")
    from octavo.llm import LLM

    config = engine_config(args)
    params = _sampling_params(args, load_generation_defaults(config).sampling)
    return LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)}), params


def _show(pieces: Generator[str]) -> str:
    """Print pieces as they come until they end or ctrl-C; what was printed."""
    shown: list[str] = []
    with suppress(KeyboardInterrupt), closing(pieces):
        for piece in pieces:
            shown.append(piece)
            print(piece, end="", flush=True)
    print()
    return "".join(shown)
