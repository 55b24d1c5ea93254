"""Request and reply bodies of Anthropic's Messages API, and the events of its streams.

What has no counterpart here is refused by name, unless its value asks for nothing. Knows nothing of conversations.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType

from octavo.core.errors import InvalidRequestError, short_repr

KEEP_ALL_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}  # an edit of the context that edits nothing


class CacheControl(Struct, forbid_unknown_fields=True):
    """Where a prefix to be cached ends. Every prefix is cached here, so this is known and needs nothing."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] = "5m"


class TextBlock(Struct, forbid_unknown_fields=True):
    text: str
    type: str = "text"
    cache_control: CacheControl | None = None
    citations: list[dict[str, Any]] = []


class ThinkingBlock(Struct, forbid_unknown_fields=True):
    thinking: str
    signature: str = ""
    type: str = "thinking"


class RedactedThinkingBlock(Struct, forbid_unknown_fields=True):
    """Encrypted by another server, so there is nothing in it for the models here."""

    data: str
    type: str = "redacted_thinking"


class ToolUseBlock(Struct, forbid_unknown_fields=True):
    id: str
    name: str
    input: dict[str, Any]
    type: str = "tool_use"
    caller: dict[str, Any] | None = None  # who called, for the client's own eyes
    cache_control: CacheControl | None = None


class ToolResultBlock(Struct, forbid_unknown_fields=True):
    tool_use_id: str
    content: str | list[dict[str, Any]] = ""
    is_error: bool = False
    type: str = "tool_result"
    cache_control: CacheControl | None = None


class InputMessage(Struct, forbid_unknown_fields=True):
    role: str
    content: str | list[dict[str, Any]]


class Tool(Struct, forbid_unknown_fields=True):
    """eager_input_streaming: inputs are streamed as they come in any case."""

    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = "custom"
    strict: bool | None = None
    cache_control: CacheControl | None = None
    eager_input_streaming: bool | None = None
    input_examples: list[dict[str, Any]] = []
    defer_loading: bool = False
    allowed_callers: list[str] | None = None


class ToolChoice(Struct, forbid_unknown_fields=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(Struct, forbid_unknown_fields=True):
    type: str
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(Struct, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(Struct, frozen=True, forbid_unknown_fields=True):
    """user_id: for the client's own bookkeeping."""

    user_id: str | None = None


class PromptBody(Struct, kw_only=True):
    """The fields that make the prompt: all that count_tokens takes."""

    model: str | None = None
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] = ""
    tools: list[dict[str, Any]] = []
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig = OutputConfig()
    output_format: OutputFormat | None = None  # its older place
    cache_control: CacheControl | None = None
    context_management: dict[str, Any] = {}
    speed: str = "standard"

    def check(self) -> None:
        """Raises InvalidRequestError."""
        if not self.messages:
            raise InvalidRequestError("messages is empty: send at least one", "messages")
        if self.context_management not in ({}, {"edits": []}, {"edits": [KEEP_ALL_THINKING]}):
            raise _unsupported("context_management", self.context_management)
        if self.speed != "standard":
            raise _unsupported("speed", self.speed)
        if self.thinking is not None:
            check_one_of(self.thinking.type, ("enabled", "adaptive", "disabled"), "thinking.type")
            self._check_budget(self.thinking)

    @staticmethod
    def _check_budget(thinking: Thinking) -> None:
        budget = thinking.budget_tokens
        if (budget is not None) != (thinking.type == "enabled"):
            raise InvalidRequestError(
                "thinking.budget_tokens goes with thinking.type 'enabled', and only with it: send both, or 'adaptive' "
                "to think without a budget",
                "thinking.budget_tokens",
            )
        if budget is not None and budget < 1:
            raise InvalidRequestError(
                f"thinking.budget_tokens is {budget}; it must be at least 1", "thinking.budget_tokens"
            )


class MessagesBody(PromptBody, kw_only=True):
    max_tokens: int
    metadata: Metadata = Metadata()
    service_tier: str = "auto"
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def check(self) -> None:
        PromptBody.check(self)
        check_one_of(self.service_tier, ("auto", "standard_only"), "service_tier")


def check_one_of(value: str, allowed: tuple[str, ...], name: str) -> None:
    """Raises InvalidRequestError."""
    if value not in allowed:
        known = ", ".join(allowed)
        raise InvalidRequestError(f"{name} is {short_repr(value)}; it must be one of {known}", name)


def _unsupported(name: str, value: object) -> InvalidRequestError:
    return InvalidRequestError(
        f"{name}={short_repr(value)} is not supported: leave it out", name, "unsupported_parameter"
    )


class OutputTokensDetails(Struct):
    thinking_tokens: int


class Usage(Struct, kw_only=True):
    """input_tokens: those of the prompt that were not in the cache. Caching is automatic, so nothing is created."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    service_tier: str | UnsetType = UNSET


class TextOut(Struct, tag="text"):
    text: str = ""


class ThinkingOut(Struct, tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseOut(Struct, tag="tool_use"):
    id: str
    name: str
    input: msgspec.Raw = msgspec.Raw(b"{}")


BlockOut = TextOut | ThinkingOut | ToolUseOut


class MessageReply(Struct, kw_only=True, tag="message"):
    id: str
    role: str = "assistant"
    model: str
    content: list[BlockOut]
    stop_reason: str | None
    stop_sequence: str | None
    usage: Usage


class TokenCount(Struct):
    input_tokens: int


class TextDelta(Struct, tag="text_delta"):
    text: str


class ThinkingDelta(Struct, tag="thinking_delta"):
    thinking: str


class SignatureDelta(Struct, tag="signature_delta"):
    signature: str


class InputJsonDelta(Struct, tag="input_json_delta"):
    partial_json: str


BlockDelta = TextDelta | ThinkingDelta | SignatureDelta | InputJsonDelta


class MessageStart(Struct, tag="message_start"):
    message: MessageReply


class BlockStart(Struct, tag="content_block_start"):
    index: int
    content_block: BlockOut


class BlockPiece(Struct, tag="content_block_delta"):
    index: int
    delta: BlockDelta


class BlockStop(Struct, tag="content_block_stop"):
    index: int


class Ending(Struct):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Struct, tag="message_delta"):
    delta: Ending
    usage: Usage


class MessageStop(Struct, tag="message_stop"):
    pass


class Ping(Struct, tag="ping"):
    pass


BlockEvent = BlockStart | BlockPiece | BlockStop
StreamEvent = BlockEvent | MessageStart | MessageDelta | MessageStop | Ping
