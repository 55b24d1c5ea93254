"""POST /v1/completions: one or many prompts in, a continuation of each out, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.records import FinishReason, RequestOutput
from octavo.server.generation import Generation, usage_of
from octavo.server.logprobs import (
    PlacedToken,
    TokenNames,
    TokenPlacer,
    completion_logprobs,
    made_aside,
    num_numbers,
    placed_prompt,
    prompt_logprobs,
)
from octavo.server.protocol import CompletionBody
from octavo.server.reading import read_body
from octavo.server.replies import CompletionChoice, CompletionLogprobs, CompletionReply, Usage
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
    grammar = await service.grammar(body.wanted_form(), param=body.form_field)
    reply_id = new_id("cmpl", body.request_id)
    prompts = body.prompts()
    keep = service.frontend.num_kept(body.truncate_prompt_tokens, params.max_tokens)
    token_lists = await service.encode(prompts, add_special_tokens=body.add_special_tokens, param="prompt", keep=keep)
    try:
        requests = [
            service.frontend.build_request(
                token_ids,
                params,
                request_id=service.engine_id(reply_id),
                arrival_time=arrival_time,
                cache_salt=body.cache_salt,
                clamp_max_tokens=body.max_tokens is None,
                grammar=grammar,
                reasoning=None if params.thinking_token_budget is None else service.reasoning_behind(token_ids),
            )
            for token_ids in token_lists
        ]
    except InvalidRequestError as error:
        raise body.in_own_words(error) from None
    generations = service.submit(requests, body.labels)
    answers = [
        _Continuation(service, body, index, generation, _echoed(service, body, prompt, generation, keep))
        for index, (prompt, generation) in enumerate(zip(prompts, generations, strict=True))
    ]
    run = _Completions(service, body, answers, generations, reply_id)
    if body.stream:
        return EventStream(run.frames(), generations)
    async with aborted_if_client_leaves(http.receive, generations):
        return await run.reply()


def _echoed(
    service: Service, body: CompletionBody, prompt: str | list[int], generation: Generation, keep: int | None
) -> str:
    """What the reply repeats of a prompt, which is what the model has seen of it."""
    if not body.echo:
        return ""
    token_ids = generation.request.prompt_token_ids
    if isinstance(prompt, str) and (keep is None or len(token_ids) < keep):
        return prompt
    return service.frontend.detokenize(token_ids)


class _Continuation:
    """One prompt of a request being continued."""

    def __init__(self, service: Service, body: CompletionBody, index: int, generation: Generation, echoed: str) -> None:
        self._service = service
        self._body = body
        self._index = index
        self._generation = generation
        self._echoed = echoed
        frontend = service.frontend
        self._names = TokenNames(frontend.token_bytes, as_ids=body.return_tokens_as_token_ids)
        self._wants_tokens = body.logprobs is not None or body.return_token_ids
        self._placer = TokenPlacer(
            lambda token_id: frontend.visible_bytes(token_id, body.skip_special_tokens), start=len(echoed)
        )

    async def choice(self) -> CompletionChoice:
        """The whole of it."""
        texts: list[str] = []
        tokens: list[PlacedToken] = []
        async for text, output in self._generation.pieces():
            placed, new_text = self._news(text, output)
            texts.append(new_text)
            tokens += placed
            last = output
        said, size = "".join(texts), num_numbers([t.logprobs for t in tokens if t.logprobs is not None])
        choice = await made_aside(lambda: self._choice(said, tokens, last), size)
        await self._say_once(choice, tokens)
        return choice

    async def choices(self) -> AsyncIterator[CompletionChoice]:
        """The pieces of it that are worth a chunk."""
        is_first = True
        async for text, output in self._generation.pieces():
            tokens, text = self._news(text, output)
            if text or tokens or (is_first and self._echoed) or output.finish_reason is not None:
                choice = self._choice(text, tokens, output)
                if is_first:
                    is_first = False
                    await self._say_once(choice, tokens)
                yield choice

    @property
    def generation(self) -> Generation:
        return self._generation

    def _news(self, text: str, output: RequestOutput) -> tuple[list[PlacedToken], str]:
        """The tokens to tell of, if any are, and the text. Of an answer that only echoes, nothing."""
        if self._body.only_echoes:
            return [], ""
        if not self._wants_tokens:
            return [], text
        is_last = output.finish_reason is not None
        return self._placer.feed(output.token_ids, output.logprobs, text, is_last=is_last), text

    def _choice(self, text: str, tokens: Sequence[PlacedToken], output: RequestOutput) -> CompletionChoice:
        body = self._body
        choice = CompletionChoice(
            index=self._index, text=text, finish_reason=output.finish_reason, stop_reason=output.stop_reason
        )
        if body.only_echoes and output.finish_reason is FinishReason.STOP:  # by the token that nobody sees
            choice.finish_reason, choice.stop_reason = FinishReason.LENGTH, None
        if body.return_token_ids:
            choice.token_ids = [token.token_id for token in tokens]
        if body.logprobs is not None:
            choice.logprobs = completion_logprobs(tokens, self._names, body.logprobs)
        return choice

    async def _say_once(self, choice: CompletionChoice, tokens: Sequence[PlacedToken]) -> None:
        """What belongs to the first choice of an answer; `tokens` are those that it has."""
        body, generation = self._body, self._generation
        if body.echo:
            choice.text = self._echoed + choice.text
            if body.logprobs is not None:
                choice.logprobs = await self._echoed_logprobs(body.logprobs, tokens)
        choice.prompt_logprobs = await prompt_logprobs(generation, body.prompt_logprobs, self._names.token_bytes)
        if body.return_token_ids:
            choice.prompt_token_ids = generation.request.prompt_token_ids
        if body.return_seed:
            choice.seed = generation.seed

    async def _echoed_logprobs(self, num_top: int, tokens: Sequence[PlacedToken]) -> CompletionLogprobs:
        """Those of the prompt and of `tokens`."""
        generation = self._generation
        token_ids = generation.request.prompt_token_ids

        def logprobs() -> CompletionLogprobs:
            of_prompt = placed_prompt(self._echoed, token_ids, generation.prompt_logprobs, self._names.token_bytes)
            return completion_logprobs([*of_prompt, *tokens], self._names, num_top)

        return await made_aside(logprobs, num_numbers(generation.prompt_logprobs))


class _Completions:
    """The prompts of one request being continued."""

    def __init__(
        self,
        service: Service,
        body: CompletionBody,
        answers: list[_Continuation],
        generations: list[Generation],
        reply_id: str,
    ) -> None:
        self._service = service
        self._body = body
        self._answers = answers
        self._generations = generations
        self._id = reply_id
        self._created = int(time.time())

    async def reply(self) -> Response:
        # All at once, so that each output is timed when it comes.
        choices = await asyncio.gather(*(answer.choice() for answer in self._answers))
        reply = self._reply(choices)
        reply.usage = self._usage(self._generations)
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def frames(self) -> AsyncIterator[bytes]:
        async for frame in merged([self._chunks(answer) for answer in self._answers]):
            yield frame
        if self._body.usage_at_end:
            closing = self._reply([])
            closing.usage = self._usage(self._generations)
            yield _encode(closing)

    async def _chunks(self, answer: _Continuation) -> AsyncIterator[bytes]:
        async for choice in answer.choices():
            chunk = self._reply([choice])
            if self._body.usage_in_chunks:
                chunk.usage = self._usage([answer.generation])
            elif self._body.usage_at_end:
                chunk.usage = None
            yield _encode(chunk)

    def _usage(self, generations: list[Generation]) -> Usage:
        usage = usage_of(generations)
        if self._body.only_echoes:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _reply(self, choices: list[CompletionChoice]) -> CompletionReply:
        return CompletionReply(id=self._id, created=self._created, model=self._service.model_name, choices=choices)


def _encode(chunk: CompletionReply) -> bytes:
    return sse_frame(msgspec.json.encode(chunk))
