"""One client's connection: uvicorn's HTTP protocol with bounds on what a client may send, and how long it may take.

A client that we wait for must get on: within each `client_timeout` it completes its head, or sends or takes another
MIN_PROGRESS bytes. What is refused here never reached a route. Knows nothing of routes.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio import TimerHandle
from collections import deque

import httptools
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from octavo.server.errors import ApiError
from octavo.server.gate import send_error
from octavo.server.service import MAX_DISCARDED_BYTES
from octavo.server.settings import ServerSettings

logger = logging.getLogger(__name__)

MIN_PROGRESS = 256 << 10  # bytes of a body, or of a reply, that a client moves in a timeout
MAX_PIPELINED = 16  # requests that a client may send before it has read the replies
LINGER_SECONDS = 2.0  # for a refused client to read why
MAX_LINGER_BYTES = 1 << 20


class Connection(HttpToolsProtocol):
    def __init__(
        self,
        config: uvicorn.Config,
        state: ServerState,
        loop: asyncio.AbstractEventLoop,
        settings: ServerSettings,
        max_connections: int,
    ) -> None:
        super().__init__(config, state, {}, loop)
        self._settings = settings
        self._max_connections = max_connections
        self._in_head = False
        self._head_bytes = 0  # of chunks that ended within a head
        self._body_bytes = 0  # of the request that is being received
        self._unanswered: deque[RequestResponseCycle] = deque()  # pipelined requests are answered in their order
        self._refusal: ApiError | None = None  # once set, what else comes is dropped
        self._dropped_bytes = 0
        # Since when we wait for a request, or for the rest of one; None while a whole one is being answered.
        self._waiting_since: float | None = None
        self._request_timer: TimerHandle | None = None
        self._reply_timer: TimerHandle | None = None
        self._linger_timer: TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting_since = self.loop.time()
        self._expect_request()
        if len(self.connections) > self._max_connections:
            self._make_room()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._request_timer, self._reply_timer, self._linger_timer, self.timeout_keep_alive_task):
            if timer is not None:
                timer.cancel()
        self._waiting_since = None
        for cycle in self._unanswered:  # uvicorn tells the newest only
            cycle.disconnected = True
            cycle.message_event.set()
        super().connection_lost(exc)

    # What the client sends

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None or self.transport.is_closing():
            self._drop(len(data))
            return
        self._unset_keepalive_if_required()
        if not self._is_answering:
            self._expect_request()
        was_in_head = self._in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError as error:
            fault = error.__context__ if isinstance(error.__context__, ApiError) else None
            self._refuse(fault or ApiError(400, f"this is not valid HTTP: {error}", code="invalid_http"))
        except httptools.HttpParserUpgrade:
            pass  # answered as plain HTTP/1.1
        if was_in_head and self._in_head:
            self._head_bytes += len(data)  # the parser holds a header that has no end yet
            if self._head_bytes > self._settings.max_header_bytes and self._refusal is None:
                self._refuse(self._too_large_head())

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_head = True
        self._head_bytes = self._body_bytes = 0
        self._expect_request()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > self._settings.max_headers:
            raise ApiError(
                431,
                f"the request has more than {self._settings.max_headers} headers: send fewer",
                code="too_many_headers",
            )

    def on_headers_complete(self) -> None:
        self._in_head = False
        if len(self.url) + sum(len(n) + len(v) for n, v in self.headers) > self._settings.max_header_bytes:
            raise self._too_large_head()
        if len(self._unanswered) > MAX_PIPELINED:
            raise ApiError(400, f"more than {MAX_PIPELINED} requests wait for a reply: read the replies first")
        super().on_headers_complete()
        self._unanswered.append(self.cycle)
        self._stop_expecting_request()
        self._expect_request()  # the body has its own time
        if self.parser.should_upgrade():
            self.cycle.keep_alive = False  # the parser takes what follows for another protocol

    def on_body(self, body: bytes) -> None:
        self._body_bytes += len(body)
        if self._body_bytes > MAX_DISCARDED_BYTES:
            self.transport.abort()  # it was told long ago that this is too much
            return
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._waiting_since = None if self._is_answering else self.loop.time()
        self._stop_expecting_request()
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        return bool(self._unanswered)

    def _expect_request(self) -> None:
        """From now on the client must get on with its request."""
        if self._waiting_since is None:
            self._waiting_since = self.loop.time()
        if self._request_timer is None:
            self._request_timer = self.loop.call_later(self._settings.client_timeout, self._check_request, 0)

    def _stop_expecting_request(self) -> None:
        if self._request_timer is not None:
            self._request_timer.cancel()
            self._request_timer = None

    def _check_request(self, bytes_before: int) -> None:
        if self.flow.read_paused or (not self._in_head and self._body_bytes - bytes_before >= MIN_PROGRESS):
            self._request_timer = self.loop.call_later(
                self._settings.client_timeout, self._check_request, self._body_bytes
            )
            return
        self._request_timer = None
        if not self._in_head and not self._is_answering:
            self.transport.close()  # it never said a word, or goes on sending what was answered already
            self._watch_closing()
            return
        what = "the headers took" if self._in_head else "the body came slower than its least speed for"
        self._refuse(
            ApiError(
                408,
                f"{what} {self._settings.client_timeout:g} s, the limit: send it faster, or in smaller requests",
                code="request_timeout",
            )
        )

    # What it is sent

    def on_response_complete(self) -> None:
        self._unanswered.popleft()
        super().on_response_complete()
        if self._request_timer is None and not self._is_answering:
            self._waiting_since = self.loop.time()
        self._watch_closing()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_closing()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._reply_timer is not None and not self.transport.is_closing():
            self._reply_timer.cancel()
            self._reply_timer = None

    def _watch_closing(self) -> None:
        """A closed connection stays until the client has taken the rest of its reply."""
        if self.transport.is_closing():
            self._expect_reader()

    def _expect_reader(self) -> None:
        if self._reply_timer is None:
            unsent = self._num_unsent_bytes()
            self._reply_timer = self.loop.call_later(self._settings.client_timeout, self._check_reader, unsent)

    def _check_reader(self, unsent_before: int) -> None:
        self._reply_timer = None
        unsent = self._num_unsent_bytes()
        if unsent_before - unsent >= MIN_PROGRESS:
            self._expect_reader()
        else:
            logger.info("cut off a client that did not read its reply: %s, %d bytes unsent", self._peer, unsent)
            self.transport.abort()

    def _num_unsent_bytes(self) -> int:
        # With TLS what is encrypted waits in a transport below, which asyncio keeps to itself.
        below = getattr(getattr(self.transport, "_ssl_protocol", None), "_transport", None)
        hidden: int = below.get_write_buffer_size() if below is not None else 0
        return self.transport.get_write_buffer_size() + hidden

    # Refusing

    def _refuse(self, error: ApiError) -> None:
        """Tell the client why, if no reply is on its way, and end the connection."""
        self._refusal = error
        self._stop_expecting_request()
        logger.info("refused a client: %s, %d, %s", self._peer, error.status, error)
        if self._is_answering:
            if self.cycle.response_started or len(self._unanswered) > 1 or not self.cycle.more_body:
                self.transport.abort()  # the next reply that the client expects is not this one
                return
            self.cycle.disconnected = True  # the route gets to know, and its reply goes nowhere
            self.cycle.message_event.set()
        content = error.encode()
        head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(content)
        self.transport.write(STATUS_LINE[error.status] + head + content)
        # A socket that is closed with unread bytes takes the reply back; so the client gets a moment to read it.
        if self.transport.can_write_eof():
            self.transport.write_eof()
            self._linger_timer = self.loop.call_later(LINGER_SECONDS, self.transport.abort)
        else:  # TLS has no half-closed connections
            self.transport.close()
            self._watch_closing()

    def _drop(self, num_bytes: int) -> None:
        self._dropped_bytes += num_bytes
        if self._dropped_bytes > MAX_LINGER_BYTES:
            self.transport.abort()

    def _make_room(self) -> None:
        """Drop whoever has kept us waiting longest; if all are being answered, tell the new client to come again."""
        waiting = [c for c in self.connections if isinstance(c, Connection) and c._waiting_since is not None]
        slowest = min(waiting, key=lambda c: c._waiting_since or 0.0)
        if slowest is self:
            self.app = _answer_overload
        else:
            self.connections.discard(slowest)
            slowest.transport.abort()

    def _too_large_head(self) -> ApiError:
        limit = self._settings.max_header_bytes
        return ApiError(
            431, f"the headers are larger than the limit of {limit:,} bytes: send less", code="headers_too_large"
        )

    @property
    def _peer(self) -> str:
        return f"{self.client[0]}:{self.client[1]}" if self.client else "unix socket"


async def _answer_overload(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(503, "too many connections at once: try again in a moment", code="overloaded")
    await send_error(send, error, "", (b"retry-after", b"1"), (b"connection", b"close"))
