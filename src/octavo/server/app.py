"""The routes as an ASGI application, and how errors leave it. What a route does is in the modules it names."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from octavo.core.errors import EngineDeadError, OctavoError, shorten
from octavo.core.version import version
from octavo.server import metrics
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.errors import ApiError
from octavo.server.protocol import ModelCard, ModelList
from octavo.server.service import Service


def create_app(service: Service) -> ASGIApp:
    def route(path: str, endpoint: Callable[[Service, HttpRequest], Awaitable[Response]], method: str = "GET") -> Route:
        return Route(path, partial(endpoint, service), methods=[method])

    routes = [
        route("/v1/chat/completions", chat_completions, "POST"),
        route("/v1/completions", completions, "POST"),
        route("/v1/models", list_models),
        route("/v1/models/{model:path}", show_model),
        route("/health", health),
        route("/ping", health),
        route("/metrics", show_metrics),
        route("/version", show_version),
    ]
    handlers = {
        ApiError: answer_error,
        OctavoError: answer_error,
        HTTPException: partial(answer_http_error, routes),
        ClientDisconnect: answer_nobody,
        Exception: answer_error,
    }
    return RequestIdEcho(Starlette(routes=routes, exception_handlers=handlers))  # type: ignore[arg-type]


async def list_models(service: Service, _: HttpRequest) -> Response:
    return _json(ModelList([_model_card(service)]))


async def show_model(service: Service, http: HttpRequest) -> Response:
    service.check_model(http.path_params["model"])
    return _json(_model_card(service))


async def health(service: Service, _: HttpRequest) -> Response:
    if not service.client.is_alive:
        raise EngineDeadError("the engine process is dead; start the server again")
    return Response()


async def show_metrics(service: Service, _: HttpRequest) -> Response:
    return Response(service.metrics.render(), media_type=metrics.CONTENT_TYPE)


async def show_version(_: Service, __: HttpRequest) -> Response:
    return _json({"version": version()})


async def answer_error(_: HttpRequest, error: Exception) -> Response:
    reply = ApiError.of(error)
    return Response(reply.encode(), reply.status, media_type="application/json")


async def answer_http_error(routes: list[Route], http: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{http.method} {shorten(http.url.path)}"
    match error.status_code:
        case 404:
            known = ", ".join(r.path for r in routes)
            reply = ApiError(404, f"there is no route {what}; the routes are {known}", code="unknown_url")
        case 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            reply = ApiError(405, f"{what} is not allowed: use {allowed}", code="method_not_allowed")
        case status:
            reply = ApiError(status, error.detail)
    return Response(reply.encode(), reply.status, headers=error.headers, media_type="application/json")


async def answer_nobody(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=499)  # nginx's code for a client that closed; nobody reads it


class RequestIdEcho:
    """Gives a client's X-Request-Id back with the reply."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request_id = next((v for k, v in scope.get("headers", ()) if k == b"x-request-id"), None)
        if request_id is None:
            await self._app(scope, receive, send)
            return

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"x-request-id", request_id)]
            await send(message)

        await self._app(scope, receive, send_with_id)


def _model_card(service: Service) -> ModelCard:
    name = service.model_name
    return ModelCard(id=name, created=service.created, root=name, max_model_len=service.frontend.info.max_model_len)


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
