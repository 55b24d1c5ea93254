"""Typed messages over a local socket pair: 4 bytes little-endian length, then msgpack.

Two ends with one wire format: `BlockingChannel` for the engine process, `AsyncChannel` for the HTTP process. Neither
knows what a message means. A socket pair is used because its end tells a death at once, however the other side died.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

import msgspec

from octavo.core.errors import OctavoError
from octavo.engine.messages import FromEngine, ToEngine

HEADER_BYTES = 4
RECEIVE_BYTES = 1 << 18

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


class ChannelClosedError(OctavoError):
    """The other process closed its end or died."""


def encode_frame(message: ToEngine | FromEngine) -> bytes:
    payload = _encoder.encode(message)
    return len(payload).to_bytes(HEADER_BYTES, "little") + payload


class FrameBuffer:
    """Cuts a byte stream into frames; bytes of an unfinished frame wait for the rest."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads that `data` completes, in order."""
        buffer = self._buffer
        buffer += data
        payloads = []
        start = 0
        while len(buffer) - start >= HEADER_BYTES:
            body = start + HEADER_BYTES
            end = body + int.from_bytes(buffer[start:body], "little")
            if end > len(buffer):
                break
            payloads.append(bytes(buffer[body:end]))
            start = end
        del buffer[:start]
        return payloads


class BlockingChannel:
    """The engine's end: it polls between steps and sleeps in the kernel when there is nothing to do."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self._socket = sock
        self._frames = FrameBuffer()

    def receive(self, wait: bool) -> list[ToEngine]:
        """Everything that has arrived; with `wait`, at least one message. Raises ChannelClosedError."""
        messages: list[ToEngine] = []
        while True:
            try:
                data = self._socket.recv(RECEIVE_BYTES, 0 if wait and not messages else socket.MSG_DONTWAIT)
            except BlockingIOError:
                return messages
            except OSError as error:
                raise ChannelClosedError(f"the channel broke: {error}") from error
            if not data:
                raise ChannelClosedError("the other process closed the channel")
            messages.extend(_to_engine.decode(payload) for payload in self._frames.feed(data))

    def send(self, message: FromEngine) -> None:
        """Waits while the reader is far behind. Raises ChannelClosedError."""
        try:
            self._socket.sendall(encode_frame(message))
        except OSError as error:
            raise ChannelClosedError(f"the channel broke: {error}") from error


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
