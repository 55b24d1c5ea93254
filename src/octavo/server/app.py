"""The routes as an ASGI application, and how errors leave it. What a route does is in the modules it names."""

from __future__ import annotations

from functools import partial

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Scope

from octavo.core.errors import OctavoError, shorten
from octavo.core.version import version
from octavo.server import api_docs, metrics
from octavo.server.api_docs import RouteEntry
from octavo.server.chat import chat_completions
from octavo.server.completions import completions
from octavo.server.errors import ApiError
from octavo.server.gate import CLIENT_LEFT, OPEN_PATHS, Gate, KeyCheck, OriginCheck
from octavo.server.messages.bodies import MessagesBody, PromptBody
from octavo.server.messages.routes import count_tokens, messages
from octavo.server.protocol import ChatBody, CompletionBody
from octavo.server.replies import ModelCard, ModelList
from octavo.server.responses.body import ResponsesBody
from octavo.server.responses.routes import cancel_response, create_response, list_input_items, stored_response
from octavo.server.service import BodyMemory, Service
from octavo.server.tokenize import DetokenizeBody, TokenizeBody, detokenize, tokenize


def create_app(service: Service) -> ASGIApp:
    """All routes behind the gate and the key check, as `service.settings` has them."""
    settings = service.settings
    entries = route_entries(with_docs=settings.docs)
    handlers = {
        ApiError: answer_error,
        OctavoError: answer_error,
        HTTPException: partial(answer_http_error, entries),
        ClientDisconnect: answer_nobody,
        Exception: answer_error,
    }
    routes = [_route(service, e) for e in entries]
    starlette = Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]
    starlette.state.body_memory = BodyMemory()
    app: ASGIApp = starlette
    if settings.api_keys:
        app = KeyCheck(app, settings.api_keys)
    if settings.allowed_origins:
        # Outside the key check: a browser asks without a key first, and wants to read why it was refused.
        app = CORSMiddleware(
            app,
            allow_origins=settings.allowed_origins,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            allow_credentials=settings.allow_credentials,
            expose_headers=("X-Request-Id",),
        )
    paths: dict[object, str] = {route.endpoint: route.path for route in routes}

    def on_reply(scope: Scope, status: int, seconds: float) -> None:
        route = paths.get(scope.get("endpoint"), "none")  # as the router found it; a client's path may be anything
        service.metrics.count_http(route, scope["method"], status, seconds)

    return Gate(OriginCheck(app, settings.allowed_origins), settings, on_reply)


def route_entries(*, with_docs: bool) -> tuple[RouteEntry, ...]:
    """Every route there is; what /docs shows and the router knows."""
    entries = (
        RouteEntry(
            "/v1/chat/completions",
            ("POST",),
            chat_completions,
            "The next message of a conversation; with stream, as server-sent events.",
            ChatBody,
            generates=True,
        ),
        RouteEntry(
            "/v1/completions",
            ("POST",),
            completions,
            "The continuation of one or many prompts; with stream, as server-sent events.",
            CompletionBody,
            generates=True,
        ),
        RouteEntry(
            "/v1/messages",
            ("POST",),
            messages,
            "The next message of a conversation in the shape of Anthropic's API; with stream, as its events.",
            MessagesBody,
            generates=True,
        ),
        RouteEntry(
            "/v1/messages/count_tokens",
            ("POST",),
            count_tokens,
            "How many tokens the prompt of such a request has.",
            PromptBody,
        ),
        RouteEntry(
            "/v1/responses",
            ("POST",),
            create_response,
            "OpenAI Responses: the next turn of a conversation, whole, as server-sent events, or in the background.",
            ResponsesBody,
            generates=True,
        ),
        RouteEntry(
            "/v1/responses/{response_id}",
            ("GET", "DELETE"),
            stored_response,
            "A stored response; with stream=true, the events of one in the background, from starting_after on. "
            "DELETE ends and forgets it.",
        ),
        RouteEntry(
            "/v1/responses/{response_id}/cancel", ("POST",), cancel_response, "Ends a response in the background."
        ),
        RouteEntry(
            "/v1/responses/{response_id}/input_items",
            ("GET",),
            list_input_items,
            "The items that a stored response was asked with: after, limit, order.",
        ),
        RouteEntry("/v1/models", ("GET",), list_models, "The model that is served, under each of its names."),
        RouteEntry("/v1/models/{model:path}", ("GET",), show_model, "One model; 404 if it is not served here."),
        RouteEntry("/tokenize", ("POST",), tokenize, "Token ids of a prompt or a conversation.", TokenizeBody),
        RouteEntry("/detokenize", ("POST",), detokenize, "The text of token ids.", DetokenizeBody),
        RouteEntry(
            "/health", ("GET",), health, "200 while the engine answers or gets on with its work, else 503.", open=True
        ),
        RouteEntry("/ready", ("GET",), health, "The same.", open=True),
        RouteEntry("/ping", ("GET", "POST"), health, "The same.", open=True),
        RouteEntry("/load", ("GET",), show_load, "How many requests are generating or waiting to."),
        RouteEntry("/metrics", ("GET",), show_metrics, "Prometheus metrics."),
        RouteEntry("/version", ("GET",), show_version, "The version of octavo."),
    )
    assert {entry.path for entry in entries if entry.open} == set(OPEN_PATHS)
    return (*entries, RouteEntry("/docs", ("GET",), show_docs, "This page.")) if with_docs else entries


def _route(service: Service, entry: RouteEntry) -> Route:
    counted = [Middleware(service.load.wrap)] if entry.generates else None
    return Route(entry.path, partial(entry.endpoint, service), methods=entry.methods, middleware=counted)


async def list_models(service: Service, _: HttpRequest) -> Response:
    return _json(ModelList([_model_card(service, name) for name in service.model_names]))


async def show_model(service: Service, http: HttpRequest) -> Response:
    name = http.path_params["model"]
    service.check_model(name)
    return _json(_model_card(service, name))


async def health(service: Service, _: HttpRequest) -> Response:
    await service.client.check_health()
    return Response()


async def show_load(service: Service, _: HttpRequest) -> Response:
    return _json({"server_load": service.load.value})


async def show_metrics(service: Service, _: HttpRequest) -> Response:
    return Response(service.metrics.render(), media_type=metrics.CONTENT_TYPE)


async def show_version(_: Service, __: HttpRequest) -> Response:
    return _json({"version": version()})


async def show_docs(service: Service, http: HttpRequest) -> Response:
    settings = service.settings
    page = api_docs.render(
        route_entries(with_docs=True),
        model=service.model_name,
        version=version(),
        url=f"{http.url.scheme}://{http.headers.get('host') or 'HOST:PORT'}",
        root_path=settings.root_path,
        needs_key=bool(settings.api_keys),
    )
    return Response(page, media_type="text/html", headers={"Content-Security-Policy": api_docs.SECURITY_POLICY})


async def answer_error(http: HttpRequest, error: Exception) -> Response:
    reply = ApiError.of(error)
    content = reply.encode(http.scope["octavo.path"])
    return Response(content, reply.status, headers=reply.headers, media_type="application/json")


async def answer_http_error(entries: tuple[RouteEntry, ...], http: HttpRequest, error: Exception) -> Response:
    """Starlette's own refusals: no such path, or not with this method."""
    assert isinstance(error, HTTPException)
    what = f"{http.method} {shorten(http.url.path)}"
    match error.status_code:
        case 404:
            known = ", ".join(entry.path for entry in entries)
            reply = ApiError(404, f"there is no route {what}; the routes are {known}", code="unknown_url")
        case 405:
            allowed = (error.headers or {}).get("Allow", "another method")
            reply = ApiError(405, f"{what} is not allowed: use {allowed}", code="method_not_allowed")
        case status:
            reply = ApiError(status, error.detail)
    content = reply.encode(http.scope["octavo.path"])
    return Response(content, reply.status, headers=error.headers, media_type="application/json")


async def answer_nobody(_: HttpRequest, __: Exception) -> Response:
    return Response(status_code=CLIENT_LEFT)


def _model_card(service: Service, name: str) -> ModelCard:
    return ModelCard(
        id=name, created=service.created, root=service.model_name, max_model_len=service.frontend.info.max_model_len
    )


def _json(value: object) -> Response:
    return Response(msgspec.json.encode(value), media_type="application/json")
