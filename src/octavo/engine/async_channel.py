"""The HTTP process's end of the channel, for asyncio.

In a file of its own, so that neither the engine process nor the start of the command line waits for asyncio's import.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec

from octavo.engine.channel import FrameBuffer, encode_frame
from octavo.engine.messages import FromEngine, ToEngine

_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class AsyncChannel(asyncio.Protocol):
    """The HTTP process's end: `on_message` is called for each message, `on_closed` once when the engine is gone.

    `send` never blocks: what the socket does not take at once waits in memory.
    """

    def __init__(self, on_message: Callable[[FromEngine], None], on_closed: Callable[[], None]) -> None:
        self._on_message = on_message
        self._on_closed = on_closed
        self._frames = FrameBuffer()
        self._transport: asyncio.WriteTransport | None = None

    @classmethod
    async def open(
        cls, sock: socket.socket, on_message: Callable[[FromEngine], None], on_closed: Callable[[], None]
    ) -> AsyncChannel:
        channel = cls(on_message, on_closed)
        await asyncio.get_running_loop().create_connection(lambda: channel, sock=sock)
        return channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.WriteTransport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        for payload in self._frames.feed(data):
            self._on_message(_from_engine.decode(payload))

    def connection_lost(self, exc: Exception | None) -> None:
        self._on_closed()

    def send(self, message: ToEngine) -> None:
        assert self._transport is not None
        self._transport.write(encode_frame(message))

    def close(self) -> None:
        """Sends what is still waiting, then closes."""
        assert self._transport is not None
        self._transport.close()
