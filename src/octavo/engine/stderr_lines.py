"""What an engine process says on its standard error, as lines of the parent's log. Knows nothing of what they mean."""

from __future__ import annotations

import asyncio
import logging
from typing import IO

logger = logging.getLogger("octavo.engine")

MAX_LINE_BYTES = 16 << 10  # what is longer becomes several lines


class StderrLines(asyncio.Protocol):
    """Logs each line as a warning: an engine that is well says nothing."""

    def __init__(self) -> None:
        self._rest = b""
        self.ended = asyncio.Event()

    @classmethod
    async def read(cls, pipe: IO[bytes]) -> StderrLines:
        """From now on until the pipe ends, which is closed then."""
        lines = cls()
        await asyncio.get_running_loop().connect_read_pipe(lambda: lines, pipe)
        return lines

    def data_received(self, data: bytes) -> None:
        *whole, self._rest = (self._rest + data).split(b"\n")
        for line in whole:
            self._log(line)
        if len(self._rest) > MAX_LINE_BYTES:
            self._flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._flush()
        self.ended.set()

    def _flush(self) -> None:
        self._log(self._rest)
        self._rest = b""

    def _log(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip()
        if text:
            logger.warning("%s", text)
