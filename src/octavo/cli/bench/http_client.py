"""Streamed requests to any OpenAI-compatible server, timed as they come. HTTP is read by httptools.

Light, because it shares the machine with the server it measures. Knows nothing of workloads and statistics.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httptools

from octavo.core.errors import ConfigError, shorten

READ_BYTES = 1 << 16
DONE = b"[DONE]"


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are seconds of `time.perf_counter`; `error` is None if it went well."""

    start: float = 0.0
    chunk_times: list[float] = field(default_factory=list)  # of the chunks that brought text
    end: float = 0.0
    prompt_tokens: int = 0  # as the server's usage has them; 0 if it has none
    output_tokens: int = 0  # the same, or else a token a chunk
    has_usage: bool = False
    text: str = ""
    error: str | None = None


class RefusedError(ConfigError):
    """Waiting would not help. `status` is that of the reply, 0 if there is none."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


class Client:
    """Connections to one server, kept open between requests. Raises ConfigError for a URL that is none."""

    def __init__(self, base_url: str, headers: Mapping[str, str] | None = None) -> None:
        try:
            parts = urllib.parse.urlsplit(base_url)
            port = parts.port
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0:
            raise ConfigError(f"--base-url is {base_url!r}; it must look like http://127.0.0.1:8000")
        self._host = parts.hostname
        self._port = port or (443 if parts.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._prefix = urllib.parse.quote(parts.path.rstrip("/").removesuffix("/v1"), safe="/%")
        lines = {"Host": parts.netloc.rpartition("@")[2], "Content-Type": "application/json", **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Any:
        """The JSON of a GET. Raises ConfigError if that is not what comes."""
        parts: list[bytes] = []
        try:
            status = await self._exchange("GET", path, b"", parts.append)
            content = b"".join(parts)
            if status != 200:
                raise RefusedError(f"{path} is answered with {status}: {_message(content)}", status)
            return json.loads(content)
        except ssl.SSLCertVerificationError as error:
            raise RefusedError(
                f"the server's certificate is not trusted ({error.verify_message}): name one that is in SSL_CERT_FILE"
            ) from None
        except (OSError, EOFError, ValueError, httptools.HttpParserError) as error:
            raise ConfigError(f"no answer to {path} ({error or type(error).__name__}): is the server there?") from None

    async def stream(self, path: str, body: Mapping[str, Any]) -> Answer:
        """POST `body`, which asks for a stream with usage at its end, and time what comes. Never raises."""
        answer = Answer(start=time.perf_counter())
        reader = _EventReader(answer)
        try:
            status = await self._exchange("POST", path, json.dumps(body).encode(), reader.feed)
            reader.finish()
            if status != 200:
                answer.error = f"{status}: {_message(reader.rest)}"
            elif answer.error is None and not reader.done:
                answer.error = "the stream ended without [DONE]"
        except (OSError, EOFError, httptools.HttpParserError) as error:
            answer.error = answer.error or f"{type(error).__name__}: {error}"
        answer.end = time.perf_counter()
        if not answer.has_usage:
            answer.output_tokens = len(answer.chunk_times)
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.writer.close()

    async def _exchange(self, method: str, path: str, content: bytes, on_body: Any) -> int:
        """One request on a connection of its own; the status of the reply. A kept connection may be gone: once more."""
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._headers}Content-Length: {len(content)}\r\n\r\n"
        request = head.encode("utf-8", "surrogateescape") + content  # what came in no UTF-8 goes as it came
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connect()
            reply = _Reply(on_body)
            try:
                await connection.exchange(request, reply)
            except (OSError, EOFError):
                connection.writer.close()
                if kept and not reply.begun:
                    continue
                raise
            except BaseException:
                connection.writer.close()
                raise
            if reply.keep_alive:
                self._idle.append(connection)
            else:
                connection.writer.close()
            return reply.status

    async def _connect(self) -> _Connection:
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls)
        return _Connection(reader, writer)


@dataclass(slots=True)
class _Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def exchange(self, request: bytes, reply: _Reply) -> None:
        self.writer.write(request)
        while not reply.complete:
            data = await self.reader.read(READ_BYTES)
            if not data:
                if reply.ends_with_connection:
                    return
                raise EOFError("the server closed the connection")
            reply.feed(data)


class _Reply:
    """One reply as httptools reads it."""

    def __init__(self, on_body: Any) -> None:
        self.on_body = on_body
        self.complete = False
        self.begun = False
        self.status = 0
        self.keep_alive = False
        self._has_length = False
        self._parser = httptools.HttpResponseParser(self)

    @property
    def ends_with_connection(self) -> bool:
        return self.status != 0 and not self._has_length

    def feed(self, data: bytes) -> None:
        self.begun = True
        self._parser.feed_data(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._has_length |= name.lower() in (b"content-length", b"transfer-encoding")

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()

    def on_message_complete(self) -> None:
        self.complete = True
        self.keep_alive = self._has_length and self._parser.should_keep_alive()


class _EventReader:
    """Server-sent events of completions or chat, into an Answer."""

    def __init__(self, answer: Answer) -> None:
        self.rest = b""  # of an event that is not whole; of a refusal, all there is
        self.done = False  # the last event, or the reason why it was the last, has come
        self._answer = answer

    def feed(self, data: bytes) -> None:
        *events, self.rest = (self.rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            self._read(event)

    def finish(self) -> None:
        """The reply is whole: its last event needs no empty line behind it."""
        self._read(self.rest)

    def _read(self, event: bytes) -> None:
        for line in event.split(b"\n"):
            if line.startswith(b"data:"):
                data = line.removeprefix(b"data:").strip()
                try:
                    self._take(data)
                except (ValueError, LookupError, TypeError, AttributeError):
                    self._answer.error = f"no event of a stream: {_message(data)}"

    def _take(self, data: bytes) -> None:
        if data == DONE:
            self.done = True
            return
        chunk = json.loads(data)
        answer = self._answer
        if chunk.get("error"):
            answer.error = _message(data)
        if usage := chunk.get("usage"):
            answer.has_usage = True
            answer.prompt_tokens, answer.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            self.done |= choice.get("finish_reason") is not None
            text = (
                choice.get("text")
                or delta.get("content")
                or delta.get("reasoning_content")
                or delta.get("reasoning")
                or ""
            )
            # A chunk may bring a token that shows nothing yet, and the last one brings the reason only.
            if text or (choice.get("finish_reason") is None and "role" not in delta):
                answer.chunk_times.append(time.perf_counter())
                answer.text += text


def _message(content: bytes) -> str:
    try:
        return shorten(str(json.loads(content)["error"]["message"]), 300)
    except (ValueError, LookupError, TypeError):
        return shorten(content.decode("utf-8", "replace"), 300)
