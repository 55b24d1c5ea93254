"""/v1/responses: make a response, whole, streamed or in the background; read, cancel and delete it, list its input."""

from __future__ import annotations

import difflib
import time
import uuid
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError, short_repr, shorten
from octavo.server.chat import start_chat
from octavo.server.errors import ApiError
from octavo.server.off_loop import aside, is_large
from octavo.server.protocol import ChatBody
from octavo.server.reading import read_body
from octavo.server.responses.background import EventLog, Job
from octavo.server.responses.body import INCLUDED, UNSUPPORTED, ResponsesBody, in_own_words
from octavo.server.responses.items import Item, chat_messages, decode_item, encode_items, read_input
from octavo.server.responses.replies import DeletedResponse, InputItemList, ResponseReply
from octavo.server.responses.run import Run
from octavo.server.responses.store import StoredResponse
from octavo.server.service import EventStream, Service, aborted_if_client_leaves, read_limited

DEFAULT_PAGE, MAX_PAGE = 20, 100  # input items in one reply
THREAD_ITEMS = 500  # longer histories are read in a thread: some milliseconds
CONTINUED = ("completed", "incomplete")  # what a conversation can go on from


class ResponseEventStream(EventStream):
    """Ends with its last event, as OpenAI's does."""

    end = b""


async def create_response(service: Service, http: HttpRequest) -> Response:
    arrival_time = service.clock.now()
    body = read_body(await read_limited(http), ResponsesBody, service.default_fields, UNSUPPORTED)
    service.check_model(body.model)
    stores = _stores(service, body)
    owner = _owner(http)
    before = _before(service, body, owner)
    large = len(before) > THREAD_ITEMS or is_large(body.input, body.tools)
    stored, chat = await aside(lambda: _conversation(service, body, owner, before), takes_long=large)
    if stores and stored.num_bytes > service.responses.max_bytes:
        raise InvalidRequestError(
            f"the conversation takes {stored.num_bytes:,} bytes, and {service.responses.max_bytes:,} are stored at "
            "most: send store=false, or start it with a larger --responses-store-bytes",
            "store",
        )
    reply = _new_reply(service, body, stores)
    try:
        answer, generation = await start_chat(service, chat, reply.id, arrival_time)
    except InvalidRequestError as error:
        raise in_own_words(error) from error

    def keep() -> None:
        if stores and (reply.background or reply.status in CONTINUED):
            stored.status, stored.job = reply.status, None
            stored.outputs = encode_items(reply.output)
            stored.item_ids += tuple(item.id for item in reply.output)
            stored.reply = run.encoded()
            if not service.responses.put(reply.id, stored):
                stored.log = None
                service.responses.put(reply.id, stored)

    run = Run(service.frontend, answer, generation, reply, keep, seals_reasoning=body.wants_sealed_reasoning)
    if body.background:
        return _in_background(service, run, stored, streams=body.stream)
    if body.stream:
        return ResponseEventStream(run.frames(), [generation])
    async with aborted_if_client_leaves(http.receive, [generation]):
        async for _ in run.events():
            pass
        return _json(run.encoded())


async def stored_response(service: Service, http: HttpRequest) -> Response:
    """GET and DELETE."""
    response_id = http.path_params["response_id"]
    if http.method == "DELETE":
        _check_query(http, ())
        stored = _find(service, response_id, _owner(http))
        if stored.job is not None:
            await stored.job.cancel()
        service.responses.remove(response_id)
        return _json(msgspec.json.encode(DeletedResponse(response_id)))
    _check_query(http, ("include", "include[]", "include_obfuscation", "starting_after", "stream"))
    stored = _find(service, response_id, _owner(http))
    _check_include(http)
    if _flag(http, "include_obfuscation"):
        raise InvalidRequestError("include_obfuscation is not supported: leave it out", "include_obfuscation")
    after = _number(http, "starting_after", -1)
    if not _flag(http, "stream"):
        if "starting_after" in http.query_params:
            raise InvalidRequestError("starting_after needs stream=true: set it, or leave it out", "starting_after")
        return _json(stored.encoded())
    if stored.log is None:
        raise InvalidRequestError(
            f"response {shorten(response_id)!r} was not made with background=true and stream=true, so its events are "
            "not there to be read again: leave stream out",
            "stream",
        )
    return ResponseEventStream(stored.log.read(after + 1), [])


async def cancel_response(service: Service, http: HttpRequest) -> Response:
    _check_query(http, ())
    response_id = http.path_params["response_id"]
    stored = _find(service, response_id, _owner(http))
    if not stored.is_background:
        raise InvalidRequestError(
            f"response {shorten(response_id)!r} was not made with background=true: only such can be cancelled; any "
            "other ends when its client closes the connection"
        )
    if stored.job is not None:
        await stored.job.cancel()
    elif stored.status != "cancelled":
        raise InvalidRequestError(f"response {shorten(response_id)!r} has ended already: it is {stored.status}")
    return _json(stored.encoded())


async def list_input_items(service: Service, http: HttpRequest) -> Response:
    _check_query(http, ("after", "include", "include[]", "limit", "order"))
    stored = _find(service, http.path_params["response_id"], _owner(http))
    _check_include(http)
    limit = _number(http, "limit", DEFAULT_PAGE)
    if not 1 <= limit <= MAX_PAGE:
        raise InvalidRequestError(f"limit is {limit}; it must be between 1 and {MAX_PAGE}", "limit")
    order = http.query_params.get("order", "desc")
    if order not in ("asc", "desc"):
        raise InvalidRequestError(f"order is {shorten(order)!r}; it must be 'asc' or 'desc'", "order")
    items = [decode_item(raw) for raw in stored.inputs]
    if order == "desc":
        items.reverse()
    after = http.query_params.get("after")
    if after is not None:
        place = next((i for i, item in enumerate(items) if item.id == after), None)
        if place is None:
            raise InvalidRequestError(f"after is {shorten(after)!r}, and no item of the input has that id", "after")
        items = items[place + 1 :]
    page = items[:limit]
    first, last = (page[0].id, page[-1].id) if page else (None, None)
    return _json(msgspec.json.encode(InputItemList(page, first, last, len(items) > limit)))


def _stores(service: Service, body: ResponsesBody) -> bool:
    """Whether the response is to be stored. Raises InvalidRequestError if it cannot be and must."""
    if service.responses.max_responses > 0:
        return body.store is not False
    if body.store or body.background:
        field = "store" if body.store else "background"
        raise InvalidRequestError(
            f"{field}=true: this server stores no responses (--responses-store-size 0): leave it out", field
        )
    return False


def _before(service: Service, body: ResponsesBody, owner: bytes) -> tuple[bytes, ...]:
    """The encoded items that the body goes on from."""
    if body.previous_response_id is None:
        return ()
    previous = _find(service, body.previous_response_id, owner, "previous_response_id")
    if previous.is_running or previous.status not in CONTINUED:
        how = "is still being made" if previous.is_running else f"has {previous.status}"
        raise InvalidRequestError(
            f"response {shorten(body.previous_response_id)!r} {how}: go on from a completed or incomplete one",
            "previous_response_id",
        )
    return previous.conversation()


def _conversation(
    service: Service, body: ResponsesBody, owner: bytes, before: tuple[bytes, ...]
) -> tuple[StoredResponse, ChatBody]:
    """What is to be stored of the conversation, and the chat request for it. Takes some microseconds for each item."""
    history = [decode_item(raw) for raw in before]

    def find(item_id: str) -> Item | None:
        return service.responses.find_item(item_id, owner)

    items = read_input(body.input, history, find, service.frontend.info.max_model_len)
    if not history and not items and not body.instructions:
        raise InvalidRequestError("input is empty: send at least one item", "input")
    ids = tuple(item.id for item in items)
    chat = body.chat_body(chat_messages(body.instructions, [*history, *items]))
    return StoredResponse(owner, before, encode_items(items), ids, "queued"), chat


def _new_reply(service: Service, body: ResponsesBody, stores: bool) -> ResponseReply:
    return ResponseReply(
        id=f"resp_{uuid.uuid4().hex}",  # never what a client chose: nobody's response can be written over
        created_at=int(time.time()),
        status="queued" if body.background else "in_progress",
        background=body.background,
        instructions=body.instructions,
        max_output_tokens=body.max_output_tokens,
        max_tool_calls=body.max_tool_calls,
        metadata=body.metadata,
        model=service.model_name,
        parallel_tool_calls=body.parallel_tool_calls,
        previous_response_id=body.previous_response_id,
        prompt_cache_key=body.prompt_cache_key,
        reasoning={"effort": body.reasoning.effort, "summary": body.reasoning.summary},
        safety_identifier=body.safety_identifier,
        store=stores,
        temperature=body.temperature,
        text={"format": body.text.format or {"type": "text"}, "verbosity": "medium"},
        tool_choice=body.tool_choice,
        tools=body.shown_tools,
        top_logprobs=body.top_logprobs or 0,
        top_p=body.top_p,
        truncation=body.truncation,
        user=body.user,
    )


def _in_background(service: Service, run: Run, stored: StoredResponse, *, streams: bool) -> Response:
    stored.is_background = True
    stored.log = log = EventLog() if streams else None

    def grew() -> None:
        if not service.responses.recount(run.reply.id):
            run.give_up(
                "there is no room for more events of responses in the background (--responses-store-bytes): ask for "
                "fewer tokens, without stream, or for fewer responses at a time"
            )

    stored.job = job = Job(_counted(service, run.frames()), run.encoded, run.cancel, log, grew)
    if not service.responses.put(run.reply.id, stored):
        run.cancel()
        raise ApiError(
            503,
            f"{service.responses.max_responses:,} responses are being made in the background, the limit of what is "
            "stored (--responses-store-size, --responses-store-bytes): try again later",
            code="overloaded",
        )
    reply = _json(run.encoded())
    job.start()
    return reply if log is None else ResponseEventStream(log.read(), [])


async def _counted(service: Service, frames: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """`frames`, counted as load until their end."""
    service.load.value += 1
    try:
        async for frame in frames:
            yield frame
    finally:
        service.load.value -= 1


def _owner(http: HttpRequest) -> bytes:
    """The digest of the key that the request brought; of nobody in particular on a server without keys."""
    owner: bytes = http.scope.get("octavo.key", b"")
    return owner


def _find(service: Service, response_id: str, owner: bytes, param: str | None = None) -> StoredResponse:
    stored = service.responses.get(response_id, owner)
    if stored is None:
        remedy = "" if param is None else ": send the whole conversation as input"
        raise ApiError(
            404,
            f"there is no response {shorten(response_id)!r} here: it never was, was made with store=false, or was "
            f"deleted or evicted since (the last {service.responses.max_responses:,} are kept){remedy}",
            param,
            "response_not_found",
        )
    return stored


def _check_query(http: HttpRequest, known: Sequence[str]) -> None:
    for name in http.query_params:
        if name not in known:
            near = difflib.get_close_matches(shorten(name), known, n=1)
            hint = f"did you mean {near[0]}?" if near else "remove it"
            raise InvalidRequestError(f"there is no parameter {shorten(name)!r} in this URL: {hint}", shorten(name))


def _check_include(http: HttpRequest) -> None:
    for name in ("include", "include[]"):
        for value in http.query_params.getlist(name):
            if value not in INCLUDED:
                raise InvalidRequestError(
                    f"include is {short_repr(value)}; only {' and '.join(INCLUDED)} are supported: leave it out",
                    "include",
                )


def _flag(http: HttpRequest, name: str) -> bool:
    value = http.query_params.get(name, "false")
    if value not in ("true", "false"):
        raise InvalidRequestError(f"{name} is {shorten(value)!r}; it must be true or false", name)
    return value == "true"


def _number(http: HttpRequest, name: str, default: int) -> int:
    value = http.query_params.get(name)
    if value is None:
        return default
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise InvalidRequestError(f"{name} is {shorten(value)!r}; it must be a whole number", name)
    return int(value)


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
