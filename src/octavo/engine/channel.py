"""Typed messages over a local socket pair: 4 bytes little-endian length, then msgpack.

The wire format and the engine's end, `BlockingChannel`; the HTTP process has `async_channel`. Knows nothing of what a
message means. A socket pair is used because its end tells a death at once, however the other side died.
"""

from __future__ import annotations

import socket

import msgspec

from octavo.core.errors import OctavoError
from octavo.engine.messages import FromEngine, ToEngine

HEADER_BYTES = 4
RECEIVE_BYTES = 1 << 18

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)


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
