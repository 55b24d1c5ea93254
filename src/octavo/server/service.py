"""What every generating route needs: the engine, the door, the metrics, and the few steps they have in common."""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from octavo.core.clock import Clock
from octavo.core.errors import InvalidRequestError, shorten
from octavo.core.reasoning import REASONING_PARSERS
from octavo.core.records import ReasoningTags, Request, StructuredOutputs
from octavo.engine.frontend import Frontend
from octavo.engine.grammar_check import GrammarChecker
from octavo.engine.supervisor import EngineSupervisor
from octavo.server.alternatives import Alternatives
from octavo.server.errors import ApiError
from octavo.server.gate import LoadCounter
from octavo.server.generation import Generation
from octavo.server.logs import log_request, request_id
from octavo.server.metrics import Metrics
from octavo.server.off_loop import off_loop
from octavo.server.responses.store import ResponseStore
from octavo.server.settings import ServerSettings
from octavo.server.stats_log import StatsLog

MAX_BODY_BYTES = 32 << 20
MAX_DISCARDED_BYTES = 8 * MAX_BODY_BYTES  # read and dropped, so that the client gets to read why it was refused
SMALL_BODY_BYTES = 64 << 10  # always has a place
MAX_HELD_BYTES = 256 << 20  # of all larger bodies that are being received
# JSON is read on the event loop: so many values, and so many lists, objects and keys, take some 50 ms and 100 MB.
MAX_COMMAS = 1 << 20
MAX_BRACKETS = 1 << 18


class Service:
    """The server's parts, passed to its routes."""

    def __init__(
        self,
        client: EngineSupervisor,
        frontend: Frontend,
        clock: Clock,
        default_fields: Mapping[str, Any] | None = None,
        settings: ServerSettings | None = None,
    ) -> None:
        """default_fields: of SamplingParams, where the model's makers recommend other values than the API's."""
        self.settings = settings or ServerSettings()
        self.load = LoadCounter()
        self.client = client
        self.frontend = frontend
        self.clock = clock
        self.default_fields = dict(default_fields or {})
        # Apart from the others, for it yields to what fits while a client's own does not.
        self.default_max_tokens: int | None = self.default_fields.pop("max_tokens", None)
        self.metrics = Metrics(client, clock, self.settings.metrics_prefix)
        self.responses = ResponseStore(self.settings.responses_store_size, self.settings.responses_store_bytes)
        self.stats_log = StatsLog(client, self.metrics, clock) if self.settings.log_stats else None
        self.created = int(time.time())
        self._num_requests = itertools.count()
        self.alternatives = Alternatives(frontend.info.vocab_size)
        self.given_template_turn = asyncio.Lock()  # one request's own template at a time: others need threads too
        self._checker: GrammarChecker | None = None

    async def grammar(self, form: StructuredOutputs | None, around: str = "", *, param: str) -> str | None:
        """What holds an output to a form; None for a free one. `around`: rules of what may stand around it.

        `param` is the field that a refusal names. Raises InvalidRequestError, OverloadedError.
        """
        if form is None:
            return None
        if self._checker is None:
            setup = await asyncio.to_thread(self.frontend.grammar_setup)
            self._checker = self._checker or GrammarChecker(setup)  # another request may have been quicker
        try:
            return await self._checker.grammar(form, around)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{param}: {error}", param, error.code) from None

    async def close(self) -> None:
        if self._checker is not None:
            await self._checker.close()

    def engine_id(self, reply_id: str) -> str:
        """An id for the engine that never comes again, whatever id the client chose; `reply_id` is for the reader."""
        return f"{next(self._num_requests)}-{reply_id}"

    @property
    def model_name(self) -> str:
        return self.frontend.info.served_model_name

    @property
    def model_names(self) -> tuple[str, ...]:
        """All that requests may ask for, the one in replies first."""
        return (self.model_name, *self.frontend.info.other_model_names)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError if a model is named that is not served."""
        if name is not None and name not in self.model_names:
            raise ApiError(
                404, f"model {shorten(name)!r} is not served here; use {self.model_name!r}", "model", "model_not_found"
            )

    async def encode(
        self, prompts: Sequence[str | list[int]], *, add_special_tokens: bool, param: str, keep: int | None = None
    ) -> list[list[int]]:
        """Token ids of each prompt, by `Frontend.encode` where it is text; the event loop stays free meanwhile.

        keep: the last so many of them; None: all.
        """

        def ids_of(prompt: str | list[int]) -> list[int]:
            if isinstance(prompt, str):
                return self.frontend.encode(prompt, add_special_tokens=add_special_tokens, param=param, keep=keep)
            return prompt if keep is None else prompt[-keep:]

        def encode_all() -> list[list[int]]:
            return [ids_of(prompt) for prompt in prompts]

        num_characters = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await off_loop(encode_all, num_characters)

    def reasoning_behind(self, token_ids: Sequence[int]) -> ReasoningTags | None:
        """How the answer to a prompt will mark its reasoning, if the server was told."""
        name = self.settings.parsers.reasoning
        return None if name is None else self.frontend.reasoning_behind(token_ids, REASONING_PARSERS[name])

    def submit(self, requests: Sequence[Request], labels: Mapping[str, Any] | None = None) -> list[Generation]:
        """All of `requests` submitted, or none. Raises what `EngineSupervisor.generate` raises, ApiError 503 if too
        many wait, and what `Alternatives.take` raises. labels: for the log."""
        limit, in_flight = self.settings.max_num_queued_reqs, self.client.num_requests
        if limit is not None and in_flight + len(requests) > limit:
            raise ApiError(
                503,
                f"{in_flight:,} requests run or wait and {len(requests):,} would come, the limit is {limit:,} "
                "(--max-num-queued-reqs): ask again in a moment",
                code="overloaded",
            )
        if self.stats_log is not None:
            self.stats_log.work_begins()
        generations: list[Generation] = []
        give_back = self.alternatives.take(requests)
        try:
            for request, on_end in zip(requests, give_back, strict=True):
                if self.settings.log_requests:
                    prompt = self.frontend.detokenize(request.prompt_token_ids)
                    log_request(request, prompt, self.settings.max_log_len, labels or {})
                interval = self.settings.stream_interval
                generations.append(Generation(self.client, self.metrics, request, interval, on_end))
        except Exception:
            for generation in generations:
                generation.abort()
            for give in give_back:
                give()
            raise
        return generations


def new_id(prefix: str, chosen: str | None) -> str:
    """The id of a reply: the one that the body chose, or that of the HTTP request, so that the log tells of it."""
    return f"{prefix}-{chosen or request_id.get() or uuid.uuid4().hex}"


class BodyMemory:
    """What all large bodies that are being received take together, and may take."""

    def __init__(self, limit: int = MAX_HELD_BYTES) -> None:
        self._limit = limit
        self._held = 0

    def take(self, num_bytes: int) -> None:
        """Raises ApiError 503 if there is no room."""
        if self._held + num_bytes > self._limit:
            raise ApiError(
                503,
                f"the large bodies that are being received take {self._held:,} bytes, the limit is {self._limit:,}: "
                "try again in a moment, or send less at a time",
                code="overloaded",
            )
        self._held += num_bytes

    def give_back(self, num_bytes: int) -> None:
        self._held -= num_bytes


async def read_limited(http: HttpRequest) -> bytes:
    """The body of a request. Raises ApiError: 413 if it is too large or holds too much, 503 if all together are."""
    memory: BodyMemory = http.app.state.body_memory
    if int(http.headers.get("content-length", 0)) > MAX_DISCARDED_BYTES:  # which nobody will wait for
        raise _too_large()
    body = bytearray()
    size = taken = commas = brackets = 0
    try:
        async for chunk in http.stream():
            size += len(chunk)
            commas += chunk.count(b",")
            brackets += len(chunk) - len(chunk.translate(None, b"[{:"))
            if size <= MAX_BODY_BYTES:
                if len(body) + len(chunk) > SMALL_BODY_BYTES:
                    memory.take(len(chunk))
                    taken += len(chunk)
                body += chunk
            elif size > MAX_DISCARDED_BYTES:
                break
    finally:
        memory.give_back(taken)
    if size > MAX_BODY_BYTES:
        raise _too_large()
    # Those in texts count too: a prompt that has so many is longer than any model's.
    for count, limit, what in (
        (commas, MAX_COMMAS, "commas"),
        (brackets, MAX_BRACKETS, "colons and opening brackets and braces"),
    ):
        if count > limit:
            raise ApiError(413, f"the body has {count:,} {what}, the limit is {limit:,}: send less at a time")
    return bytes(body)


def _too_large() -> ApiError:
    return ApiError(413, f"the body is larger than the limit of {MAX_BODY_BYTES:,} bytes: send less at a time")


@asynccontextmanager
async def aborted_if_client_leaves(receive: Receive, generations: Sequence[Generation]) -> AsyncIterator[None]:
    """While inside, a closed socket aborts `generations` at once; leaving it ends whichever still run.

    `receive` must have given the whole body already.
    """

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        for generation in generations:
            generation.abort()

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        for generation in generations:
            generation.abort()


class EventStream(StreamingResponse):
    """Server-sent events. An error before the first frame is an HTTP error; a later one is a frame of its own.

    How that frame looks and what ends a stream is OpenAI's way here; routes of other APIs have subclasses.
    """

    media_type = "text/event-stream"
    end = b"data: [DONE]\n\n"

    @staticmethod
    def error_frame(error: ApiError) -> bytes:
        return sse_frame(error.encode())

    def __init__(self, frames: AsyncIterator[bytes], generations: Sequence[Generation]) -> None:
        super().__init__(frames, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._frames = frames
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aborted_if_client_leaves(receive, self._generations):
            await self._run(send)

    async def _run(self, send: Send) -> None:
        frames = aiter(self._frames)
        frame = await anext(frames, b"")
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        unexpected: Exception | None = None
        try:
            await _send_frame(send, frame)
            async for frame in frames:
                await _send_frame(send, frame)
        except Exception as error:
            reply = ApiError.of(error)
            unexpected = error if reply.code == "internal_error" else None
            await _send_frame(send, self.error_frame(reply))
        await send({"type": "http.response.body", "body": self.end, "more_body": False})
        if unexpected is not None:
            raise unexpected  # for the log


def sse_frame(payload: bytes) -> bytes:
    return b"data: " + payload + b"\n\n"


def _send_frame(send: Callable[[MutableMapping[str, Any]], Awaitable[None]], frame: bytes) -> Awaitable[None]:
    return send({"type": "http.response.body", "body": frame, "more_body": True})


async def merged(sources: Sequence[AsyncIterator[bytes]]) -> AsyncIterator[bytes]:
    """The items of all sources as they come, what came at once in one piece; the first failure of one ends it."""
    if len(sources) == 1:
        async for item in sources[0]:
            yield item
        return
    queue: asyncio.Queue[bytes | Exception | None] = asyncio.Queue()

    async def drain(source: AsyncIterator[bytes]) -> None:
        try:
            async for item in source:
                queue.put_nowait(item)
            queue.put_nowait(None)
        except Exception as error:
            queue.put_nowait(error)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    try:
        running = len(tasks)
        while running:
            # A step brings an item of each source: one write instead of many.
            news = [await queue.get(), *(queue.get_nowait() for _ in range(queue.qsize()))]
            pieces = [piece for piece in news if isinstance(piece, bytes)]
            if pieces:
                yield b"".join(pieces)
            for failure in news:
                if isinstance(failure, Exception):
                    raise failure
            running -= news.count(None)
    finally:
        for task in tasks:
            task.cancel()
