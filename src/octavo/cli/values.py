"""What a flag's value can be, as argparse's types: numbers as people write them, JSON objects."""

from __future__ import annotations

import argparse
import json
import re
from typing import Any

from octavo.core.config import ALL_THAT_FITS, MAX_INT
from octavo.core.errors import shorten

_SUFFIXES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def human_int(text: str) -> int:
    """4096, 4k (4000) or 4K (4096), also 1.5G; vLLM reads these the same way."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number like 4096, 4k (4000) or 4K (4096)")
    value = float(match[1]) * _SUFFIXES[match[2]]
    if value > MAX_INT:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_INT:,}")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def length(text: str) -> int:
    """A number of tokens, or "auto" or -1 for all that fit."""
    return ALL_THAT_FITS if text in ("auto", str(ALL_THAT_FITS)) else human_int(text)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a JSON object")
    return value


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a number like 0.9") from None


def whole_number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a whole number") from None
