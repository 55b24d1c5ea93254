"""Runs the application on an open socket until it shall stop, and ends cleanly. Knows uvicorn, nothing of routes."""

from __future__ import annotations

import asyncio
import gc
import math
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp

from octavo.engine.supervisor import EngineSupervisor
from octavo.server.connection import Connection
from octavo.server.settings import ServerSettings
from octavo.server.sockets import BACKLOG, connections_with_files
from octavo.server.stopping import Stopping

FLUSH_SECONDS = 1  # for replies to reach their clients after the last token, at least


class _Server(uvicorn.Server):
    """uvicorn that leaves signals to us, makes our connections, and sleeps until it is told to close."""

    def __init__(self, config: uvicorn.Config, settings: ServerSettings, tls: ssl.SSLContext | None) -> None:
        super().__init__(config)
        self.closing = asyncio.Event()
        self._settings = settings
        self._tls = tls

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        most = connections_with_files(self._settings.limit_concurrency)

        def connect() -> Connection:
            return Connection(self.config, self.server_state, loop, self._settings, most)

        timeout = self._settings.client_timeout if self._tls is not None else None
        self.servers = [
            await loop.create_server(connect, sock=sock, ssl=self._tls, backlog=BACKLOG, ssl_handshake_timeout=timeout)
            for sock in sockets or []
        ]
        self.started = True

    async def main_loop(self) -> None:
        # uvicorn's own loop wakes ten times a second; an idle server shall use no CPU.
        await self.on_tick(0)
        await self.closing.wait()


async def run_until(
    stopping: Stopping,
    app: ASGIApp,
    engine: EngineSupervisor,
    sock: socket.socket,
    settings: ServerSettings,
    tls: ssl.SSLContext | None = None,
) -> None:
    """Serve `app` on `sock`, which is bound and listening, until asked to stop; then drain, abort the rest, and end.

    The socket stays open while we drain, so that a load balancer can read that it shall send nothing more.
    """
    config = uvicorn.Config(
        app,
        loop="asyncio",
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        date_header=False,  # made by the loop that we do not run
        server_header=False,
        proxy_headers=False,  # any client could write them, and the log shall say who is there
    )
    server = _Server(config, settings, tls)

    async def stop() -> None:
        seconds_left = await stopping.drain(engine, settings.shutdown_timeout)
        engine.abort_all()
        config.timeout_graceful_shutdown = max(FLUSH_SECONDS, math.ceil(seconds_left))
        server.closing.set()
        await stopping.at_once.wait()
        server.force_exit = True

    # What is there by now is there to stay. Left out of the collector's rounds, a large body is read in a third of the
    # time, and no round of them all holds up the streams.
    gc.freeze()
    stop_task = asyncio.create_task(stop())
    try:
        await server.serve([sock])
    finally:
        stop_task.cancel()
