"""A line that shows how far the packing of weights is, for whoever is looking at a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TextIO

PATIENCE_SECONDS = 1.0  # what is done sooner needs no line
REFRESH_SECONDS = 0.1
WIDTH = 30


def packing_progress(to: TextIO) -> Callable[[float], None]:
    """Shows how far packing is, in one line that is written anew, if it takes long and somebody is looking."""
    begin = shown = time.monotonic()

    def report(share: float) -> None:
        nonlocal shown
        now = time.monotonic()
        if not to.isatty() or now - begin < PATIENCE_SECONDS:
            return
        if share < 1 and now - shown > REFRESH_SECONDS:
            shown = now
            filled = round(share * WIDTH)
            print(
                f"\rpacking weights [{'#' * filled}{'.' * (WIDTH - filled)}] {share:4.0%}", end="", file=to, flush=True
            )
        elif share == 1:
            print(f"\r{'':60}\r", end="", file=to, flush=True)

    return report
