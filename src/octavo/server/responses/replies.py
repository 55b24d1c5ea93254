"""The response object of OpenAI's Responses API and the events of its stream: shapes only."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from octavo.server.replies import ChatTokenLogprob
from octavo.server.responses.items import CallItem, Item, MessageItem, OutputText, ReasoningItem, ReasoningText

OutputItem = MessageItem | ReasoningItem | CallItem


class ResponseError(Struct):
    code: str
    message: str


class IncompleteDetails(Struct):
    reason: str


class InputTokensDetails(Struct):
    cached_tokens: int
    cache_write_tokens: int = 0  # OpenAI's price list has one for these; here every prompt is kept, and none is priced


class OutputTokensDetails(Struct):
    reasoning_tokens: int


class ResponseUsage(Struct):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseReply(Struct, kw_only=True):
    """A response as it stands; what the request asked for is repeated in it."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    background: bool
    completed_at: int | None = None
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt_cache_key: str | None
    reasoning: dict[str, Any]
    safety_identifier: str | None
    service_tier: str = "default"
    store: bool
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: str
    usage: ResponseUsage | None = None
    user: str | None


class DeletedResponse(Struct):
    id: str
    object: str = "response"
    deleted: bool = True


class InputItemList(Struct):
    data: list[Item]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class StreamEvent(Struct, tag_field="type", kw_only=True):
    sequence_number: int


class ResponseEvent(StreamEvent):
    response: ResponseReply


class Created(ResponseEvent, tag="response.created"):
    pass


class Queued(ResponseEvent, tag="response.queued"):
    pass


class InProgress(ResponseEvent, tag="response.in_progress"):
    pass


class Completed(ResponseEvent, tag="response.completed"):
    pass


class Incomplete(ResponseEvent, tag="response.incomplete"):
    pass


class Failed(ResponseEvent, tag="response.failed"):
    pass


class _OfItem(StreamEvent):
    output_index: int


class ItemAdded(_OfItem, tag="response.output_item.added"):
    item: OutputItem


class ItemDone(_OfItem, tag="response.output_item.done"):
    item: OutputItem


class _InItem(_OfItem):
    item_id: str


class ArgumentsDelta(_InItem, tag="response.function_call_arguments.delta"):
    delta: str


class ArgumentsDone(_InItem, tag="response.function_call_arguments.done"):
    arguments: str


class _InPart(_InItem, kw_only=True):
    content_index: int = 0  # our items have one part


class PartAdded(_InPart, tag="response.content_part.added", kw_only=True):
    part: OutputText | ReasoningText


class PartDone(_InPart, tag="response.content_part.done", kw_only=True):
    part: OutputText | ReasoningText


class TextDelta(_InPart, tag="response.output_text.delta", kw_only=True):
    delta: str
    logprobs: list[ChatTokenLogprob]


class TextDone(_InPart, tag="response.output_text.done", kw_only=True):
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningDelta(_InPart, tag="response.reasoning_text.delta", kw_only=True):
    delta: str


class ReasoningDone(_InPart, tag="response.reasoning_text.done", kw_only=True):
    text: str


def event_frame(event: StreamEvent) -> bytes:
    """The event as the wire has it."""
    name = str(type(event).__struct_config__.tag)
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(event) + b"\n\n"
