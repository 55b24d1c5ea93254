"""POST /v1/completions: one or many prompts in, a continuation of each out, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.core.records import TokenLogprobs
from octavo.server.generation import Generation, usage_of
from octavo.server.logprobs import completion_logprobs
from octavo.server.protocol import CompletionBody, read_body
from octavo.server.replies import CompletionChoice, CompletionLogprobs, CompletionReply
from octavo.server.service import (
    EventStream,
    Service,
    aborted_if_client_leaves,
    merged,
    new_id,
    read_limited,
    sse_frame,
)


async def completions(service: Service, http: HttpRequest) -> Response:
    arrival_time = service.clock.now()
    body = read_body(await read_limited(http), CompletionBody, service.default_fields)
    service.check_model(body.model)
    params = body.params(service.default_max_tokens)
    reply_id = new_id("cmpl", body.request_id)
    prompts = await service.encode(body.prompts(), add_special_tokens=body.add_special_tokens, param="prompt")
    requests = [
        service.frontend.build_request(
            token_ids,
            params,
            request_id=service.engine_id(reply_id),
            arrival_time=arrival_time,
            cache_salt=body.cache_salt,
            clamp_max_tokens=body.max_tokens is None,
        )
        for token_ids in prompts
    ]
    generations = service.submit(requests)
    run = _Completions(service, body, generations, reply_id)
    if body.stream:
        return EventStream(run.frames(), generations)
    async with aborted_if_client_leaves(http.receive, generations):
        return await run.reply()


class _Completions:
    """The prompts of one request being continued."""

    def __init__(self, service: Service, body: CompletionBody, generations: list[Generation], reply_id: str) -> None:
        self._service = service
        self._body = body
        self._generations = generations
        self._id = reply_id
        self._created = int(time.time())

    async def reply(self) -> Response:
        # All at once, so that each output is timed when it comes.
        choices = await asyncio.gather(*(self._choice(i, g) for i, g in enumerate(self._generations)))
        reply = self._reply(choices)
        reply.usage = usage_of(self._generations)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def frames(self) -> AsyncIterator[bytes]:
        async for frame in merged([self._chunks(i, g) for i, g in enumerate(self._generations)]):
            yield frame
        if self._body.usage_at_end:
            closing = self._reply([])
            closing.usage = usage_of(self._generations)
            yield _encode(closing)

    async def _choice(self, index: int, generation: Generation) -> CompletionChoice:
        texts: list[str] = []
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        async for text, output in generation.pieces():
            texts.append(text)
            token_ids += output.token_ids
            logprobs += output.logprobs or []
            last = output
        choice = CompletionChoice(
            index=index,
            text="".join(texts),
            logprobs=self._logprobs(token_ids, logprobs, 0)[0],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            seed=generation.seed if self._body.return_seed else UNSET,
        )
        if self._body.return_token_ids:
            choice.token_ids = token_ids
            choice.prompt_token_ids = generation.request.prompt_token_ids
        return choice

    async def _chunks(self, index: int, generation: Generation) -> AsyncIterator[bytes]:
        body = self._body
        offset = 0
        prompt_token_ids = generation.request.prompt_token_ids if body.return_token_ids else UNSET
        seed = generation.seed if body.return_seed else UNSET
        async for text, output in generation.pieces():
            wants_tokens = bool(output.token_ids) and (body.logprobs is not None or body.return_token_ids)
            if not (text or output.finish_reason is not None or wants_tokens):
                continue
            logprobs, offset = self._logprobs(output.token_ids, output.logprobs or [], offset)
            choice = CompletionChoice(
                index=index,
                text=text,
                logprobs=logprobs,
                finish_reason=output.finish_reason,
                stop_reason=output.stop_reason,
                token_ids=output.token_ids if body.return_token_ids else UNSET,
                prompt_token_ids=prompt_token_ids,
                seed=seed,
            )
            prompt_token_ids = seed = UNSET  # with the first chunk only
            chunk = self._reply([choice])
            if body.usage_in_chunks:
                chunk.usage = usage_of([generation])
            elif body.usage_at_end:
                chunk.usage = None
            yield _encode(chunk)

    def _reply(self, choices: list[CompletionChoice]) -> CompletionReply:
        return CompletionReply(id=self._id, created=self._created, model=self._service.model_name, choices=choices)

    def _logprobs(
        self, token_ids: list[int], logprobs: list[TokenLogprobs], offset: int
    ) -> tuple[CompletionLogprobs | None, int]:
        if self._body.logprobs is None:
            return None, offset
        frontend, skip_special = self._service.frontend, self._body.skip_special_tokens

        def visible_bytes(token_id: int) -> bytes:
            return frontend.visible_bytes(token_id, skip_special)

        return completion_logprobs(token_ids, logprobs, frontend.token_bytes, visible_bytes, offset)


def _encode(chunk: CompletionReply) -> bytes:
    return sse_frame(msgspec.json.encode(chunk))
