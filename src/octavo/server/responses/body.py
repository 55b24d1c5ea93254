"""The body of POST /v1/responses, strictly read, and the chat request that it comes down to.

Fields of sampling are those of chat, under chat's names; the others are OpenAI's. Knows neither store nor reply.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from msgspec import Struct

from octavo.core.errors import InvalidRequestError, short_repr, shorten
from octavo.core.records import RepetitionDetection
from octavo.server.protocol import ChatBody

LOGPROBS = "message.output_text.logprobs"
SEALED_REASONING = "reasoning.encrypted_content"
INCLUDED = (LOGPROBS, SEALED_REASONING)  # what `include` may name

# Fields of OpenAI's API, vLLM's extras and chat's names of others that are refused -> the values that ask for nothing.
UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "enable_response_messages": (False,),
    "image": (),
    "logprobs": (False,),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "mm_processor_kwargs": (),
    "moderation": (),
    "previous_input_messages": (),
    "priority": (0,),
    "prompt": (),
    "prompt_cache_options": ({},),
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "request_id": (),
    "response_format": (),
    "vllm_xargs": ({},),
}
# Fields that mean in a chat request what they mean here.
PASSED = (
    "model",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "stop_token_ids",
    "include_stop_str_in_output",
    "ignore_eos",
    "min_tokens",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "repetition_detection",
    "thinking_token_budget",
    "structured_outputs",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "user",
    "safety_identifier",
    "metadata",
    "prompt_cache_key",
    "service_tier",
    "cache_salt",
    "chat_template",
    "chat_template_kwargs",
    "documents",
    "enable_thinking",
    "parallel_tool_calls",
)
_OWN_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "reasoning_effort": "reasoning.effort",
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "logprobs": "top_logprobs",
}
# Options of which only these values are there; leaving them out is as good.
_VALUES = {
    "reasoning.summary": ("auto",),
    "reasoning.generate_summary": ("auto",),
    "reasoning.context": ("auto",),
    "reasoning.mode": ("standard",),
    "text.verbosity": ("medium",),
    "truncation": ("disabled", "auto"),
}
_TOOL_CHOICES = ("none", "auto", "required")
_FORMATS = {"text": (), "json_object": (), "json_schema": ("name", "description", "schema", "strict")}
_TOOL_FIELDS = ("name", "description", "parameters", "strict")


class ReasoningOptions(Struct, frozen=True, forbid_unknown_fields=True):
    """summary "auto": none is made, for the reasoning itself is in the reply."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # its older name
    context: str | None = None  # auto: the chat template decides which turns' reasoning the model sees
    mode: str | None = None


class TextOptions(Struct, frozen=True, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponseStreamOptions(Struct, frozen=True, forbid_unknown_fields=True):
    include_obfuscation: bool = False


class ResponsesBody(Struct, kw_only=True):
    input: str | list[Any]
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool = False
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    include: list[str] = []
    top_logprobs: int | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None  # of tools that run in the server, of which there are none
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    reasoning: ReasoningOptions = ReasoningOptions()
    text: TextOptions = TextOptions()
    truncation: str = "disabled"
    metadata: dict[str, str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | list[str] = []
    stop_token_ids: list[int] = []
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = 0
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] = []
    repetition_detection: RepetitionDetection | None = None
    thinking_token_budget: int | None = None
    structured_outputs: dict[str, Any] | None = None
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    cache_salt: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    documents: list[dict[str, Any]] = []
    enable_thinking: bool | None = None

    def check(self) -> None:
        """Raises InvalidRequestError for fields that are wrong by themselves or together."""
        for path, values in _VALUES.items():
            value = attrgetter(path)(self)
            if value not in (None, *values):
                known = " or ".join(map(repr, values))
                raise InvalidRequestError(
                    f"{path} is {short_repr(value)}; only {known} is supported: send that, or leave it out",
                    path,
                    "unsupported_parameter",
                )
        for i, name in enumerate(self.include):
            if name not in INCLUDED:
                raise InvalidRequestError(
                    f"include[{i}] is {short_repr(name)}; only {' and '.join(INCLUDED)} are supported: leave it out",
                    f"include[{i}]",
                    "unsupported_parameter",
                )
        if self.top_logprobs and not self.wants_logprobs:
            raise InvalidRequestError(
                f'top_logprobs needs include=["{LOGPROBS}"]: set it, or leave it out', "top_logprobs"
            )
        if self.stream_options is not None:
            if not self.stream:
                raise InvalidRequestError("stream_options needs stream=true: set it, or leave it out", "stream_options")
            if self.stream_options.include_obfuscation:
                field = "stream_options.include_obfuscation"
                raise InvalidRequestError(f"{field} is not supported: leave it out", field, "unsupported_parameter")
        if self.background and self.store is False:
            raise InvalidRequestError("background needs store=true: how else would one see the response", "background")
        if self.max_tool_calls is not None and self.max_tool_calls < 1:
            raise InvalidRequestError(
                f"max_tool_calls is {self.max_tool_calls}; it must be at least 1", "max_tool_calls"
            )

    @property
    def _truncate_prompt_tokens(self) -> int | None:
        """As vLLM does: what is too long loses its beginning, token by token."""
        return -1 if self.truncation == "auto" and self.truncate_prompt_tokens is None else self.truncate_prompt_tokens

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include

    @property
    def wants_sealed_reasoning(self) -> bool:
        return SEALED_REASONING in self.include

    @property
    def shown_tools(self) -> list[dict[str, Any]]:
        """The tools as a reply repeats them."""
        return [{"type": "function", **{name: tool.get(name) for name in _TOOL_FIELDS}} for tool in self.tools]

    def chat_body(self, messages: list[dict[str, Any]]) -> ChatBody:
        """The chat request for `messages`. Raises InvalidRequestError in this body's terms."""
        fields = {name: getattr(self, name) for name in PASSED}
        body = ChatBody(
            messages=messages,
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            truncate_prompt_tokens=self._truncate_prompt_tokens,
            reasoning_effort=self.reasoning.effort,
            tools=[_chat_tool(tool, f"tools[{i}]") for i, tool in enumerate(self.tools)],
            tool_choice=_chat_tool_choice(self.tool_choice),
            response_format=_response_format(self.text.format),
            **fields,
        )
        try:
            body.check()
        except InvalidRequestError as error:
            raise in_own_words(error) from error
        return body


def in_own_words(error: InvalidRequestError) -> InvalidRequestError:
    """An error about a field of the chat request, told about the field that it came from."""
    if error.param is None:
        return error
    own = error.param.replace(".function.", ".") if error.param.startswith("tools[") else error.param
    for theirs, ours in _OWN_NAMES.items():
        if own == theirs or own.startswith((f"{theirs}.", f"{theirs}[")):
            own = ours + own[len(theirs) :]
            break
    return InvalidRequestError(str(error).replace(error.param, own), own, error.code)


def _chat_tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise InvalidRequestError(
            f"{where}.type is {short_repr(kind)}; only 'function' is supported: this server runs no tools itself",
            f"{where}.type",
            "unsupported_parameter",
        )
    if "function" in tool:
        raise InvalidRequestError(
            f"{where}.function is how chat completions have it: here its fields stand beside type",
            f"{where}.function",
        )
    for name, value in tool.items():
        if name not in ("type", *_TOOL_FIELDS) and value not in (None, False):
            field = f"{where}.{shorten(name)}"
            raise InvalidRequestError(f"{field} is not supported: remove it", field, "unsupported_parameter")
    return {"type": "function", "function": {n: tool[n] for n in _TOOL_FIELDS if tool.get(n) is not None}}


def _chat_tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    if isinstance(choice, str):
        if choice not in _TOOL_CHOICES:
            raise InvalidRequestError(
                f"tool_choice is {short_repr(choice)}; it must be one of {', '.join(_TOOL_CHOICES)}, or "
                '{"type": "function", "name": ...}',
                "tool_choice",
            )
        return choice
    kind = choice.get("type")
    if kind != "function":
        raise InvalidRequestError(
            f"tool_choice.type is {short_repr(kind)}; only 'function' is supported, or 'none', 'auto', 'required'",
            "tool_choice.type",
            "unsupported_parameter",
        )
    if not isinstance(choice.get("name"), str) or len(choice) != 2:
        raise InvalidRequestError("tool_choice must have exactly a type and a name", "tool_choice")
    return {"type": "function", "function": {"name": choice["name"]}}


def _response_format(wanted: dict[str, Any] | None) -> dict[str, Any] | None:
    """The format of a text as chat has it, where a schema stands one level further down."""
    if wanted is None:
        return None
    kind = wanted.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise InvalidRequestError(
            f"text.format.type is {short_repr(kind)}; it must be one of {', '.join(_FORMATS)}", "text.format.type"
        )
    given = {name: value for name, value in wanted.items() if name != "type" and value is not None}
    for name in given:
        if name not in _FORMATS[kind]:
            field = f"text.format.{shorten(name)}"
            raise InvalidRequestError(f"{field} is not supported with type {kind!r}: remove it", field)
    if kind != "json_schema":
        return {"type": kind}
    if not isinstance(given.get("schema"), dict):
        raise InvalidRequestError("text.format.schema must be an object, a JSON schema", "text.format.schema")
    return {"type": kind, "json_schema": given}
