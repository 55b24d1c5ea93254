"""How a server comes to its end: asked once it lets what runs finish, for some time; asked twice it does not wait.

Knows the engine's supervisor; nothing of signals or of HTTP. Light, for it is there before the HTTP libraries are.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.engine.supervisor import EngineSupervisor

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.02  # between two looks at what still runs, while draining only


class Stopping:
    """asked: the server shall end. at_once: without waiting for anybody."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        """What a signal calls."""
        if self.asked.is_set():
            self.at_once.set()
        self.asked.set()

    async def drain(self, engine: EngineSupervisor, seconds: float) -> float:
        """Wait to be asked; then no request is taken any more, and those that run have `seconds` to end.

        Returns the seconds that are left.
        """
        await self.asked.wait()
        engine.refuse_new()
        now = asyncio.get_running_loop().time
        deadline = now() + seconds
        if seconds > 0 and engine.num_requests:
            logger.info(
                "stopping: %d running requests have %g s to end; a second signal does not wait",
                engine.num_requests,
                seconds,
            )
        while engine.num_requests and not self.at_once.is_set() and now() < deadline:
            with suppress(TimeoutError):
                await asyncio.wait_for(self.at_once.wait(), LOOK_SECONDS)
        if engine.num_requests:
            logger.info("stopping: %d running requests are aborted", engine.num_requests)
        return 0.0 if self.at_once.is_set() else max(0.0, deadline - now())
