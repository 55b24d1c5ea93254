"""A response that is made without a client waiting: its task, and its events for whoever comes to read them.

Knows nothing of what the events say.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

GROWTH_BYTES = 64 << 10  # of a log, after which its job tells


class EventLog:
    """Frames of a stream, kept so that any number of readers get all of them, when they come and when they began."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._frames: list[bytes] = []
        self._ended = False
        self._news = asyncio.Event()

    def add(self, frame: bytes) -> None:
        self._frames.append(frame)
        self.num_bytes += len(frame)
        self._tell()

    def end(self) -> None:
        self._ended = True
        self._tell()

    async def read(self, first: int = 0) -> AsyncIterator[bytes]:
        """Frames from number `first`, to the end."""
        while True:
            news = self._news
            while first < len(self._frames):
                yield self._frames[first]
                first += 1
            if self._ended:
                return
            await news.wait()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


class Job:
    """Reads `frames` to their end in a task of its own, and into the log if there is one.

    snapshot: the response as it stands, encoded. abort: makes the frames end soon. grew: called now and then while the
    log grows.
    """

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        snapshot: Callable[[], bytes],
        abort: Callable[[], None],
        log: EventLog | None,
        grew: Callable[[], None] = lambda: None,
    ) -> None:
        self.snapshot = snapshot
        self._log = log
        self._frames = frames
        self._abort = abort
        self._grew = grew
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def cancel(self) -> None:
        """Until it has ended."""
        self._abort()
        if self._task is not None:
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        told = 0
        try:
            async for frame in self._frames:
                if self._log is not None:
                    self._log.add(frame)
                    if self._log.num_bytes - told > GROWTH_BYTES:
                        told = self._log.num_bytes
                        self._grew()
        finally:
            if self._log is not None:
                self._log.end()
