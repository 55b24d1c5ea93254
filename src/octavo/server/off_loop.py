"""Work on what is long or large, away from the event loop. Knows what takes long, and how much memory that takes for a
moment, not what is done.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

THREAD_CHARACTERS = 8192  # text longer than this is tokenized in a thread: some milliseconds
TRIM_CHARACTERS = 128 << 10  # some 25 MB

THREAD_VALUES = 2000  # a conversation of more is brought into another form in a thread: some milliseconds

T = TypeVar("T")


async def aside(work: Callable[[], T], *, takes_long: bool) -> T:
    """What `work()` returns or raises; the event loop stays free if that takes long."""
    return await asyncio.to_thread(work) if takes_long else work()


async def off_loop(work: Callable[[], T], num_characters: int) -> T:
    """What `work()` returns or raises; it runs in a thread if so many characters take long.

    The tokenizer needs some 190 bytes a character. glibc keeps what a thread has freed for that thread: after a few
    texts of two million characters a gigabyte. So it is told to give that back.
    """
    if num_characters <= THREAD_CHARACTERS:
        return work()
    try:
        return await asyncio.to_thread(work)
    finally:
        if num_characters > TRIM_CHARACTERS:
            await asyncio.to_thread(_malloc_trim(), 0)


def is_large(*values: Any) -> bool:
    """Whether what JSON holds has so many values, or so much text, that work on it is for a thread."""
    waiting, left = list(values), THREAD_VALUES
    while waiting and left > len(waiting):
        value = waiting.pop()
        left -= 1
        match value:
            case dict():
                waiting += value.values()
            case list():
                waiting += value
            case str():
                left -= len(value) // 1000
    return left <= len(waiting)


@cache
def _malloc_trim() -> Callable[[int], object]:
    """glibc's function; one that does nothing where the C library has none."""
    return getattr(ctypes.CDLL(None), "malloc_trim", lambda keep: None)
