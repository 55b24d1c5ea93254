"""Runs the application on an open socket until a signal, and ends cleanly. Knows uvicorn, and nothing of routes."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from octavo.engine.client import EngineClient

DRAIN_SECONDS = 1  # for replies to reach their clients after the last token


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us and sleeps until it is told to stop."""

    def __init__(self, config: uvicorn.Config, stop: asyncio.Event) -> None:
        super().__init__(config)
        self._stop = stop

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def main_loop(self) -> None:
        # uvicorn's own loop wakes ten times a second; an idle server shall use no CPU.
        await self.on_tick(0)
        await self._stop.wait()


async def run_until(stop: asyncio.Event, app: ASGIApp, client: EngineClient, sock: socket.socket) -> None:
    """Serve `app` on `sock`, which is bound and listening, until `stop` is set; then abort what runs and end."""
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="httptools",
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        date_header=False,  # made by the loop that we do not run
        server_header=False,
        timeout_graceful_shutdown=DRAIN_SECONDS,
    )

    async def abort_at_stop() -> None:
        await stop.wait()
        client.abort_all()

    aborting = asyncio.create_task(abort_at_stop())
    try:
        await _Server(config, stop).serve([sock])
    finally:
        aborting.cancel()
