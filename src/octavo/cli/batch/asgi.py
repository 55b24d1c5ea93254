"""Requests to an ASGI application in this process, as if they had come over HTTP."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from octavo.cli.batch.files import RETRIED_STATUS, Entry, Reply

logger = logging.getLogger(__name__)

Application = Callable[[Any, Any, Any], Awaitable[None]]


async def post(app: Application, entry: Entry) -> Reply:
    """The application's whole reply, whose body is JSON."""
    content = json.dumps(entry.body).encode()
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": entry.route,
        "raw_path": entry.route.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))],
        "client": ("run-batch", 0),
        "server": ("run-batch", 0),
    }
    request: dict[str, Any] | None = {"type": "http.request", "body": content, "more_body": False}
    status, headers, parts = 0, {}, []

    async def receive() -> dict[str, Any]:
        nonlocal request
        if request is None:
            await asyncio.Event().wait()  # the client stays as long as it takes
        message, request = request, None
        assert message is not None
        return message

    async def send(message: dict[str, Any]) -> None:
        nonlocal status, headers
        if message["type"] == "http.response.start":
            status, headers = message["status"], dict(message["headers"])
        else:
            parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # Starlette raises what it has answered with 500 once more, for the server's log
        if status < RETRIED_STATUS:
            raise
        logger.exception("an unexpected error at %s", entry.route)
    return Reply(status, headers.get(b"x-request-id", b"").decode("latin-1"), json.loads(b"".join(parts)))
