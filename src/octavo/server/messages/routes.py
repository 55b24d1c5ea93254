"""POST /v1/messages and /v1/messages/count_tokens: Anthropic's Messages API, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, get_args

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from octavo.core.errors import InvalidRequestError
from octavo.core.records import FinishReason, RequestOutput
from octavo.server.answer import Answer
from octavo.server.chat import rendered_prompt, start_chat
from octavo.server.errors import ANTHROPIC_PATH, ApiError
from octavo.server.generation import Generation
from octavo.server.logs import request_id
from octavo.server.messages.blocks import BlockWriter, gathered
from octavo.server.messages.bodies import (
    BlockEvent,
    BlockOut,
    Ending,
    MessageDelta,
    MessageReply,
    MessagesBody,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    PromptBody,
    StreamEvent,
    TokenCount,
    Usage,
)
from octavo.server.messages.conversation import chat_body, in_own_words, num_parts
from octavo.server.off_loop import aside, off_loop
from octavo.server.protocol import ChatBody
from octavo.server.reading import read_body
from octavo.server.service import EventStream, Service, aborted_if_client_leaves, read_limited
from octavo.server.tokenize import check_length

THREAD_PARTS = 1000  # requests of more are converted in a thread: some milliseconds
PING_SECONDS = 15.0  # of an answer that has nothing to show: connections that are silent get closed on the way


class MessageStream(EventStream):
    """Events with names; the last one ends the stream."""

    end = b""

    @staticmethod
    def error_frame(error: ApiError) -> bytes:
        return b"event: error\ndata: " + error.encode(ANTHROPIC_PATH) + b"\n\n"


async def messages(service: Service, http: HttpRequest) -> Response:
    arrival_time = service.clock.now()
    body = read_body(await read_limited(http), MessagesBody)
    message_id = f"msg_{request_id.get()}"
    try:
        chat = await _chat_body(body, service.default_fields)
        # Clients of Anthropic's ask for more than smaller models have room for, and know a stop reason for that.
        answer, generation = await start_chat(service, chat, message_id, arrival_time, clamp_max_tokens=True)
    except InvalidRequestError as error:
        raise in_own_words(error) from error
    message = _Message(service, body, answer, generation, message_id)
    if body.stream:
        return MessageStream(message.frames(), [generation])
    async with aborted_if_client_leaves(http.receive, [generation]):
        return await message.reply()


async def count_tokens(service: Service, http: HttpRequest) -> Response:
    body = read_body(await read_limited(http), PromptBody)
    service.check_model(body.model)
    try:
        chat = await _chat_body(body, {})
        text = await rendered_prompt(service, chat)
    except InvalidRequestError as error:
        raise in_own_words(error) from error
    check_length(text, "messages")

    def reply() -> bytes:
        tokens = service.frontend.tokenize(text, add_special_tokens=chat.add_special_tokens)
        return msgspec.json.encode(TokenCount(len(tokens)))

    return Response(await off_loop(reply, len(text)), media_type="application/json")


async def _chat_body(body: PromptBody, defaults: Mapping[str, Any]) -> ChatBody:
    """`chat_body`; the event loop stays free meanwhile."""
    return await aside(lambda: chat_body(body, defaults), takes_long=num_parts(body) > THREAD_PARTS)


class _Message:
    """One message being written."""

    def __init__(
        self, service: Service, body: MessagesBody, answer: Answer, generation: Generation, message_id: str
    ) -> None:
        self._service = service
        self._body = body
        self._answer = answer
        self._generation = generation
        self._id = message_id
        omits_thinking = body.thinking is not None and body.thinking.display == "omitted"
        self._blocks = BlockWriter(answer.call_id, shows_thinking=not omits_thinking)

    async def reply(self) -> Response:
        events: list[BlockEvent] = []
        async for text, output in self._generation.pieces():
            events += self._block_events(text, output)
            last = output
        message = self._reply(gathered(events), self._ending(last))
        return Response(msgspec.json.encode(message), media_type="application/json")

    async def frames(self) -> AsyncIterator[bytes]:
        clock = self._service.clock
        shown_at: float | None = None
        async for text, output in self._generation.pieces():
            events: list[StreamEvent] = []
            if shown_at is None:
                events = [MessageStart(self._reply([], Ending(None, None))), Ping()]
            events += self._block_events(text, output)
            if output.finish_reason is not None:
                events += [MessageDelta(self._ending(output), self._usage()), MessageStop()]
            if not events and shown_at is not None and clock.now() - shown_at > PING_SECONDS:
                events = [Ping()]
            if events:
                shown_at = clock.now()
                yield b"".join(map(_frame, events))

    def _block_events(self, text: str, output: RequestOutput) -> list[BlockEvent]:
        if output.finish_reason is FinishReason.ABORT:  # Anthropic has no reason for a stop like that
            raise ApiError(503, "the request was aborted before its end: the server is stopping", code="stopping")
        is_last = output.finish_reason is not None
        events = self._blocks.write(self._answer.events(text, is_last=is_last, num_tokens=len(output.token_ids)))
        return events + self._blocks.finish() if is_last else events

    def _reply(self, content: list[BlockOut], ending: Ending) -> MessageReply:
        return MessageReply(
            id=self._id,
            model=self._service.model_name,
            content=content,
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=self._usage(),
        )

    def _ending(self, output: RequestOutput) -> Ending:
        wanted, given = self._body.max_tokens, self._generation.request.params.max_tokens
        match output.finish_reason:
            case FinishReason.STOP if self._answer.last_call_is_whole:
                return Ending("tool_use", None)
            case FinishReason.STOP if isinstance(output.stop_reason, str):
                return Ending("stop_sequence", output.stop_reason)
            case FinishReason.LENGTH:
                return Ending("max_tokens" if given == wanted else "model_context_window_exceeded", None)
        return Ending("end_turn", None)

    def _usage(self) -> Usage:
        generation = self._generation
        return Usage(
            input_tokens=len(generation.request.prompt_token_ids) - generation.num_cached_tokens,
            cache_read_input_tokens=generation.num_cached_tokens,
            output_tokens=generation.num_output_tokens,
            output_tokens_details=OutputTokensDetails(self._answer.num_reasoning_tokens),
        )


def _frame(event: StreamEvent) -> bytes:
    return b"event: " + _TAGS[type(event)] + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"


_TAGS = {kind: str(kind.__struct_config__.tag).encode() for kind in get_args(StreamEvent)}
