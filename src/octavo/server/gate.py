"""What every request passes on its way in and out, whatever its route: prefix, id, origin, key, log line, load.

ASGI wrappers without an opinion about bodies. The route's path is computed once, here, so that the key check and the
router can never see two different ones.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
import uuid
from collections.abc import Callable, Collection
from urllib.parse import quote

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.errors import shorten
from octavo.server.errors import ApiError, is_anthropic
from octavo.server.logs import request_id
from octavo.server.settings import ServerSettings

access_logger = logging.getLogger("octavo.access")

MAX_LOGGED_PATH = 200
CLIENT_LEFT = 499  # nginx's code, in the log only
REQUEST_ID = re.compile(rb"[!-~]{1,128}")
OPEN_PATHS = ("/health", "/ready", "/ping")  # what load balancers ask; they say nothing but whether the engine lives


OnReply = Callable[[Scope, int, float], None]  # the request's scope, its status, and the seconds until its end


class Gate:
    """The outermost wrapper: takes the proxy's prefix off, gives the request its id, and writes its log line."""

    def __init__(self, app: ASGIApp, settings: ServerSettings, on_reply: OnReply) -> None:
        self._app = app
        self._settings = settings
        self._on_reply = on_reply

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        root = self._settings.root_path
        path = _below(root, scope["path"])
        scope = {**scope, "path": root + path, "root_path": root, "octavo.path": path}
        chosen = _header(scope, b"x-request-id")
        good = chosen is not None and REQUEST_ID.fullmatch(chosen) is not None
        own_id = chosen.decode() if good and chosen is not None else uuid.uuid4().hex
        shown = self._settings.request_id_headers or good
        status = CLIENT_LEFT
        began = time.perf_counter()

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                if shown:
                    names = (b"x-request-id", b"request-id") if is_anthropic(path) else (b"x-request-id",)
                    message["headers"] = [*message["headers"], *((name, own_id.encode()) for name in names)]
            await send(message)

        request_id.set(own_id)  # for good: the task is this request's own, and a failure is logged outside of here
        try:
            await self._app(scope, receive, send_with_id)
        except asyncio.CancelledError:  # the server ends, and the time to drain is over
            if status == CLIENT_LEFT:
                stopping = ApiError(503, "the server is stopping: ask again when it is back", code="stopping")
                await send_error(send_with_id, stopping, path)
        finally:
            seconds = time.perf_counter() - began
            self._on_reply(scope, status, seconds)
            if self._settings.access_log and path not in self._settings.unlogged_paths:
                _log_access(scope, path, status, seconds)


class OriginCheck:
    """Refuses what pages of other sites send. Browsers ask before most of it, but not before a POST of plain text."""

    def __init__(self, app: ASGIApp, allowed: Collection[str]) -> None:
        self._app = app
        self._allowed = frozenset(allowed)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self._may_ask(scope):
            await self._app(scope, receive, send)
            return
        origin = shorten((_header(scope, b"origin") or b"").decode("latin-1"))
        error = ApiError(
            403,
            f"a page of {origin} may not ask this server: allow it with --allowed-origins, or, if a proxy changed the "
            "Host header, let that pass it on",
            code="origin_not_allowed",
        )
        await send_error(send, error, scope["octavo.path"])

    def _may_ask(self, scope: Scope) -> bool:
        origin = _header(scope, b"origin")
        if origin is None or "*" in self._allowed or origin.decode("latin-1") in self._allowed:
            return True
        if scope["octavo.path"] in OPEN_PATHS and scope["method"] in ("GET", "HEAD"):
            return True
        # The scheme is left out: a proxy with TLS talks plainly to us.
        _, _, host = origin.lower().partition(b"://")
        return host != b"" and host == (_header(scope, b"host") or b"").lower()


class KeyCheck:
    """Lets a request pass if its route is open, or if it brings one of the keys. They are kept as digests only."""

    def __init__(self, app: ASGIApp, keys: Collection[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["octavo.path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        key = self._known_key(scope)
        if key is not None:
            scope["octavo.key"] = key  # the gate's own scope, in which it finds the route afterwards
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "this server wants an API key, and the request has none that it knows: send the header "
            "'Authorization: Bearer KEY' or 'X-Api-Key: KEY'",
            code="invalid_api_key",
        )
        await send_error(send, error, scope["octavo.path"], (b"www-authenticate", b"Bearer"))

    def _known_key(self, scope: Scope) -> bytes | None:
        """The digest of the key that the request brought, if we know it."""
        scheme, _, key = (_header(scope, b"authorization") or b"").partition(b" ")
        bearer = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        anthropic = _digest((_header(scope, b"x-api-key") or b"").strip())
        # All are compared, each in constant time: how long it takes says nothing about any of them.
        matches = [
            (known, hmac.compare_digest(given, known)) for known in self._digests for given in (bearer, anthropic)
        ]
        return next((known for known, does_match in matches if does_match), None)


class LoadCounter:
    """Counts the requests that are inside, streams until their end: what /load tells."""

    def __init__(self) -> None:
        self.value = 0

    def wrap(self, app: ASGIApp) -> ASGIApp:
        async def counted(scope: Scope, receive: Receive, send: Send) -> None:
            self.value += 1
            try:
                await app(scope, receive, send)
            finally:
                self.value -= 1

        return counted


async def send_error(send: Send, error: ApiError, path: str, *headers: tuple[bytes, bytes]) -> None:
    """The reply to a request that no route answers."""
    content = error.encode(path)
    own = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(content))]
    await send({"type": "http.response.start", "status": error.status, "headers": [*own, *headers]})
    await send({"type": "http.response.body", "body": content})


def _below(root: str, path: str) -> str:
    """`path` without the prefix `root`, which some proxies take off before they pass a request on and others leave."""
    if root and (path == root or path.startswith(root + "/")):
        path = path[len(root) :]
    return path or "/"


def _header(scope: Scope, name: bytes) -> bytes | None:
    return next((value for key, value in scope["headers"] if key == name), None)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _log_access(scope: Scope, path: str, status: int, seconds: float) -> None:
    host, port = scope["client"] or ("unix socket", 0)
    client = f"{host}:{port}" if port else host
    shown = shorten(quote(path, safe="/:@!$&'()*+,;=~"), MAX_LOGGED_PATH)  # no query: it may hold anything
    fields = {
        "client": client,
        "method": scope["method"],
        "path": shown,
        "status": status,
        "seconds": round(seconds, 4),
    }
    access_logger.info(
        "%s %s %s %d %.1f ms", client, scope["method"], shown, status, seconds * 1000, extra={"fields": fields}
    )
