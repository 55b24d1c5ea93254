"""POST /v1/chat/completions: a conversation in, the assistant's next message out, whole or in chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
from msgspec import UNSET
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.records import RequestOutput, TokenLogprobs
from octavo.server.answer import Answer
from octavo.server.conversation import read_messages, read_text, read_tools
from octavo.server.generation import Generation, usage_of
from octavo.server.logprobs import TokenNames, chat_logprobs, made_aside, num_numbers, prompt_logprobs
from octavo.server.off_loop import aside, is_large
from octavo.server.protocol import ChatBody
from octavo.server.reading import read_body
from octavo.server.replies import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatDelta,
    ChatLogprobs,
    ChatReply,
    CompletionTokensDetails,
    PromptLogprobs,
    Usage,
)
from octavo.server.service import (
    EventStream,
    Service,
    aborted_if_client_leaves,
    new_id,
    read_limited,
    sse_frame,
)


async def chat_completions(service: Service, http: HttpRequest) -> Response:
    arrival_time = service.clock.now()
    body = read_body(await read_limited(http), ChatBody, service.default_fields)
    reply_id = new_id("chatcmpl", body.request_id)
    answer, generation = await start_chat(service, body, reply_id, arrival_time)
    chat = _Chat(service, body, answer, generation, reply_id)
    if body.stream:
        return EventStream(chat.frames(), [generation])
    async with aborted_if_client_leaves(http.receive, [generation]):
        return await chat.reply()


async def start_chat(
    service: Service, body: ChatBody, reply_id: str, arrival_time: float, *, clamp_max_tokens: bool = False
) -> tuple[Answer, Generation]:
    """The body's conversation submitted to the engine, for any route that speaks of conversations.

    clamp_max_tokens: one that does not fit is made to fit, also if the body chose it.
    The caller aborts the generation if nobody reads it. Raises ApiError, InvalidRequestError, EngineDeadError.
    """
    service.check_model(body.model)
    text = await rendered_prompt(service, body)
    answer = Answer(service.settings.parsers, body, text, service.frontend.special_token)
    grammar = await service.grammar(answer.form.outputs, answer.form.around, param=answer.form.field)
    keep = service.frontend.num_kept(body.truncate_prompt_tokens, body.chosen_max_tokens)
    (token_ids,) = await service.encode([text], add_special_tokens=body.add_special_tokens, param="messages", keep=keep)
    try:
        request = service.frontend.build_request(
            token_ids,
            answer.adjusted(body.params(service.default_max_tokens)),
            request_id=service.engine_id(reply_id),
            arrival_time=arrival_time,
            param="messages",
            cache_salt=body.cache_salt,
            clamp_max_tokens=clamp_max_tokens or body.chosen_max_tokens is None,
            reasoning=answer.reasoning_tags,
            grammar=grammar,
        )
    except InvalidRequestError as error:
        raise body.in_own_words(error) from None
    (generation,) = service.submit([request], body.labels)
    return answer, generation


async def rendered_prompt(service: Service, body: ChatBody) -> str:
    """`prompt_text`, in a thread if it takes long, or if the template is the request's own: then nobody knows."""
    if body.chat_template is None:
        large = is_large(body.messages, body.tools, body.documents, body.chat_template_kwargs)
        return await aside(lambda: prompt_text(service, body), takes_long=large)
    async with service.given_template_turn:
        return await asyncio.to_thread(prompt_text, service, body)


def prompt_text(service: Service, body: ChatBody) -> str:
    """What the chat template makes of the body's conversation. Raises InvalidRequestError."""
    settings = service.settings
    if body.chat_template is not None and not settings.trust_request_chat_template:
        raise InvalidRequestError(
            "chat_template needs a server started with --trust-request-chat-template: start it so, or with "
            "--chat-template, or leave it out",
            "chat_template",
        )
    return service.frontend.render_chat(
        read_messages(body.messages),
        add_generation_prompt=body.begins_message,
        continue_final_message=body.continue_final_message,
        tools=read_tools(body.tools) or None,
        documents=body.documents or None,
        template_kwargs={**settings.default_chat_template_kwargs, **body.template_variables},
        chat_template=body.chat_template,
    )


class _Chat:
    """One conversation being answered."""

    def __init__(self, service: Service, body: ChatBody, answer: Answer, generation: Generation, reply_id: str) -> None:
        self._service = service
        self._body = body
        self._answer = answer
        self._generation = generation
        self._id = reply_id
        self._created = int(time.time())
        # A message that is gone on with keeps its role, and with echo the reply has what it began with.
        last = body.messages[-1]
        self._role = service.settings.response_role if body.begins_message else last["role"]
        self._echo = read_text(last) if body.echo and last["role"] == self._role else ""
        self._names = TokenNames(service.frontend.token_bytes, as_ids=body.return_tokens_as_token_ids)

    async def reply(self) -> Response:
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        async for text, output in self._generation.pieces():
            self._read(text, output)
            token_ids += output.token_ids
            logprobs += output.logprobs or []
            last = output
        message = self._answer.message()
        message.role = self._role
        if self._echo:
            message.content = self._echo + (message.content or "")
        choice = ChatChoice(
            message=message,
            logprobs=await made_aside(lambda: self._logprobs(token_ids, logprobs), num_numbers(logprobs)),
            finish_reason=self._answer.finish_reason(last.finish_reason),
            stop_reason=last.stop_reason,
            token_ids=token_ids if self._body.return_token_ids else UNSET,
            seed=self._seed(),
        )
        reply = ChatReply(
            id=self._id,
            created=self._created,
            model=self._service.model_name,
            choices=[choice],
            usage=self._usage(),
            prompt_token_ids=self._prompt_token_ids(),
            prompt_logprobs=await self._prompt_logprobs(),
        )
        return Response(msgspec.json.encode(reply), media_type="application/json")

    async def frames(self) -> AsyncIterator[bytes]:
        first = True
        async for text, output in self._generation.pieces():
            if first:
                opening = self._chunk(
                    [ChatChunkChoice(delta=ChatDelta(content=self._echo, role=self._role), seed=self._seed())]
                )
                opening.prompt_token_ids = self._prompt_token_ids()
                opening.prompt_logprobs = await self._prompt_logprobs()
                yield _encode(opening)
                first = False
            delta = self._read(text, output)
            if self._is_news(delta, output):
                yield _encode(self._chunk([self._chunk_choice(delta, output)]))
        if self._body.usage_at_end:
            closing = self._chunk([])
            closing.usage = self._usage()
            yield _encode(closing)

    def _read(self, text: str, output: RequestOutput) -> ChatDelta:
        return self._answer.read(text, is_last=output.finish_reason is not None, num_tokens=len(output.token_ids))

    def _usage(self) -> Usage:
        usage = usage_of([self._generation])
        usage.completion_tokens_details = CompletionTokensDetails(self._answer.num_reasoning_tokens)
        return usage

    def _is_news(self, delta: ChatDelta, output: RequestOutput) -> bool:
        return bool(
            delta != ChatDelta()
            or output.finish_reason is not None
            or (output.token_ids and (self._body.logprobs or self._body.return_token_ids))
        )

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        chunk = ChatChunk(id=self._id, created=self._created, model=self._service.model_name, choices=choices)
        if self._body.usage_in_chunks:
            chunk.usage = self._usage()
        elif self._body.usage_at_end:
            chunk.usage = None
        return chunk

    def _chunk_choice(self, delta: ChatDelta, output: RequestOutput) -> ChatChunkChoice:
        choice = ChatChunkChoice(
            delta=delta,
            logprobs=self._logprobs(output.token_ids, output.logprobs or []),
            finish_reason=self._answer.finish_reason(output.finish_reason),
        )
        if output.finish_reason is not None:
            choice.stop_reason = output.stop_reason
        if self._body.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    def _logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        return chat_logprobs(token_ids, logprobs, self._names)

    async def _prompt_logprobs(self) -> PromptLogprobs | msgspec.UnsetType:
        return await prompt_logprobs(self._generation, self._body.prompt_logprobs, self._service.frontend.token_bytes)

    def _prompt_token_ids(self) -> list[int] | msgspec.UnsetType:
        return self._generation.request.prompt_token_ids if self._body.return_token_ids else UNSET

    def _seed(self) -> int | msgspec.UnsetType:
        return self._generation.seed if self._body.return_seed else UNSET


def _encode(chunk: ChatChunk) -> bytes:
    return sse_frame(msgspec.json.encode(chunk))
