"""`octavo complete`, and how the pieces of an answer are shown while they come."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Generator
from contextlib import closing, suppress

from octavo.cli.options import add_engine_flags
from octavo.cli.text_models import Piece, add_sampling_flags, text_model
from octavo.core.errors import OctavoError

COMPLETE_MAX_TOKENS = 128
DIM, PLAIN = "\033[2m", "\033[0m"


def add_complete_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", metavar="PROMPT")
    add_sampling_flags(parser, max_tokens=COMPLETE_MAX_TOKENS)
    add_engine_flags(parser)


def complete(args: argparse.Namespace) -> int:
    """Print one continuation."""
    model, params = text_model(args)
    with closing(model):
        show(model.stream(args.prompt, params))
    return 0


def show(pieces: Generator[Piece]) -> str:
    """Print pieces as they come until they end or ctrl-C; the answer that was printed, without the reasoning."""
    dim, plain = (DIM, PLAIN) if sys.stdout.isatty() else ("", "")
    shown: list[str] = []
    reasoning = begun = False
    try:
        with suppress(KeyboardInterrupt), closing(pieces):
            for text, is_reasoning in pieces:
                if is_reasoning != reasoning:
                    print(dim if is_reasoning else f"{plain}\n\n", end="")
                    reasoning = is_reasoning
                if not is_reasoning:
                    shown.append(text)
                print(text, end="", flush=True)
                begun = True
    except OctavoError:
        if begun:
            print(plain if reasoning else "")
        raise
    print(plain if reasoning else "")
    return "".join(shown)
