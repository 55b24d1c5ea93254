"""`octavo complete`, and how the pieces of an answer are shown while they come."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Generator
from contextlib import closing, suppress

from octavo.cli.options import add_engine_flags
from octavo.cli.text_models import Piece, add_sampling_flags, text_model
from octavo.core.errors import OctavoError

COMPLETE_MAX_TOKENS = 128
DIM, PLAIN = "\033[2m", "\033[0m"
# A model's words do not move the cursor, ring or set colours.
CONTROLS = {code: "\N{REPLACEMENT CHARACTER}" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t\r"}


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
    dim, plain = (DIM, PLAIN) if _has_styles() else ("", "")
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
                print(displayed(text), end="", flush=True)
                begun = True
    except OctavoError:
        if begun:
            print(plain if reasoning else "")
        raise
    print(plain if reasoning else "")
    return "".join(shown)


def displayed(text: str) -> str:
    """What standard output gets for a text: all of it in a file or a pipe, no control characters on a terminal."""
    return text.translate(CONTROLS) if sys.stdout.isatty() else text


def _has_styles() -> bool:
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
