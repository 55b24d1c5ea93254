"""The text of an answer taken apart into reasoning, content and tool calls, whole or as it comes.

Knows which parsers a server was started with and what a request asked for; formats are the parsers' own.
"""

from __future__ import annotations

from typing import Any

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.reasoning import HARMONY, REASONING_PARSERS
from octavo.core.records import FinishReason, ReasoningTags, SamplingParams
from octavo.server.answer_form import answer_form
from octavo.server.parsers import AnswerParsers
from octavo.server.protocol import ChatBody
from octavo.server.reasoning.harmony import HarmonyReasoning
from octavo.server.reasoning.tagged import TaggedReasoning
from octavo.server.replies import CallFunction, CallFunctionDelta, ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from octavo.server.text_parser import CallArguments, CallStart, Content, Event, Reasoning, TextParser
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.plain import PlainCalls
from octavo.server.tools.registry import TOOL_PARSERS
from octavo.structured.grammar import SpecialToken


class Answer:
    """One answer on its way. `prompt` is the text that the model goes on from. Raises InvalidRequestError."""

    def __init__(self, parsers: AnswerParsers, body: ChatBody, prompt: str, special_token: SpecialToken) -> None:
        self._tools: ToolParser | None = None
        self._reasoning: TaggedReasoning | None = None
        self._shows_special_tokens = False
        if body.may_call_tools:
            self._tools = _tool_parser(parsers, body, special_token)(_properties(body.tools))
            self._shows_special_tokens = self._tools.shows_special_tokens
        if parsers.reasoning is not None:
            tags = REASONING_PARSERS[parsers.reasoning]
            reader = HarmonyReasoning if parsers.reasoning == HARMONY else TaggedReasoning
            self._reasoning = reader(tags, prompt)
            self._shows_special_tokens |= tags.special
        parser = None if self._tools is None else type(self._tools)
        self.form = answer_form(body, parser, self.reasoning_tags, special_token)
        self._names_function = body.called_function is not None
        self._keeps_reasoning = body.include_reasoning
        self._max_calls = None if body.parallel_tool_calls else 1
        self.num_reasoning_tokens = 0  # up to the end tag, with it
        self._reasoning_is_over = False
        self._num_tokens = 0
        self._content: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[ToolCall, list[str]]] = []  # with the pieces of its arguments

    @property
    def reasoning_tags(self) -> ReasoningTags | None:
        """How the answer will mark its reasoning, if that is known."""
        return None if self._reasoning is None else self._reasoning.tags

    def adjusted(self, params: SamplingParams) -> SamplingParams:
        """With the special tokens shown that the parsers look for."""
        return msgspec.structs.replace(params, skip_special_tokens=False) if self._shows_special_tokens else params

    def read(self, text: str, *, is_last: bool, num_tokens: int = 0) -> ChatDelta:
        """What `text` adds; with the last text, what was held back too. A delta without fields if that is nothing.

        num_tokens: how many tokens made it, for `num_reasoning_tokens`.
        """
        delta = ChatDelta()
        for event in self.events(text, is_last=is_last, num_tokens=num_tokens):
            match event:
                case Content():
                    delta.content = (delta.content or "") + event.text
                case Reasoning():
                    delta.reasoning = delta.reasoning_content = (delta.reasoning or "") + event.text
                case CallStart() | CallArguments():
                    delta.tool_calls = self._with_call(delta.tool_calls or [], event)
        return delta

    def events(self, text: str, *, is_last: bool, num_tokens: int = 0) -> list[Event]:
        """The same as `read` gives, in the order of the text and without what the request does not want."""
        self._num_tokens += num_tokens
        wanted: list[Event] = []
        for event in self._events(text, is_last):
            match event:
                case Content():
                    self._content.append(event.text)
                case Reasoning() if self._keeps_reasoning:
                    self._thoughts.append(event.text)
                case CallStart() if self._tools is not None and self._wants_call(event.index):
                    self._calls.append((ToolCall(event.id or self._tools.new_call_id(), CallFunction(event.name)), []))
                case CallArguments() if self._wants_call(event.index):
                    self._calls[event.index][1].append(event.text)
                case _:
                    continue
            wanted.append(event)
        if self._reasoning is not None and self._reasoning.begun and not self._reasoning_is_over:
            self.num_reasoning_tokens = self._num_tokens
            self._reasoning_is_over = self._reasoning.over
        return wanted

    def call_id(self, index: int) -> str:
        """The id of a call whose start was among the events."""
        return self._calls[index][0].id

    @property
    def last_call_is_whole(self) -> bool:
        if not self._calls or self._tools is None:
            return False
        return self._tools.last_is_whole or self._tools.num_calls > len(self._calls)  # it went on to one not wanted

    def message(self) -> ChatMessage:
        """The whole of what was read."""
        message = ChatMessage("".join(self._content))
        if self._thoughts:
            message.reasoning = message.reasoning_content = "".join(self._thoughts)
        if self._calls:
            for call, arguments in self._calls:
                call.function.arguments = "".join(arguments)
            message.tool_calls = [call for call, _ in self._calls]
        if not message.content and (self._calls or self._reasoning is not None):
            message.content = None
        return message

    def finish_reason(self, reason: FinishReason | None) -> str | None:
        """A model that stopped after a whole call waits for the result; one that was cut, even in a call, does not.

        As OpenAI's API has it, one that could do nothing but call just stopped.
        """
        if self._names_function:
            return reason
        return "tool_calls" if reason is FinishReason.STOP and self.last_call_is_whole else reason

    def _events(self, text: str, is_last: bool) -> list[Event]:
        events: list[Event] = [Content(text)] if text else []
        for parser in (self._reasoning, self._tools):
            if parser is not None:
                events = [found for event in events for found in _parsed(parser, event)]
                if is_last:
                    events += parser.finish()
        return events

    def _wants_call(self, index: int) -> bool:
        return self._max_calls is None or index < self._max_calls

    def _with_call(self, deltas: list[ToolCallDelta], event: CallStart | CallArguments) -> list[ToolCallDelta]:
        """`deltas` with the event in the entry of its call, which is made if it is not there."""
        if isinstance(event, CallStart):
            call, _ = self._calls[event.index]
            function = CallFunctionDelta("", event.name)
            return [*deltas, ToolCallDelta(event.index, function, call.id, call.type)]
        if not deltas or deltas[-1].index != event.index:
            return [*deltas, ToolCallDelta(event.index, CallFunctionDelta(event.text))]
        deltas[-1].function.arguments += event.text
        return deltas


def _parsed(parser: TextParser, event: Event) -> list[Event]:
    return parser.feed(event.text) if isinstance(event, Content) else [event]


def _properties(tools: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """What the schema of each tool says of its parameters; schemas are the client's, so they may be anything."""
    found: dict[str, dict[str, Any]] = {}
    for tool in tools:
        properties = (tool["function"].get("parameters") or {}).get("properties")
        if isinstance(properties, dict):
            found[tool["function"]["name"]] = properties
    return found


def _tool_parser(parsers: AnswerParsers, body: ChatBody, special_token: SpecialToken) -> type[ToolParser]:
    """Raises InvalidRequestError."""
    parser = None if parsers.tools is None else TOOL_PARSERS[parsers.tools]
    if body.must_call_tools:
        form = None if parser is None else parser.form(special_token)
        names = [tool["function"]["name"] for tool in body.tools]
        writes_all = form is not None and all(map(form.can_write, names))
        return parser if parser is not None and writes_all else PlainCalls
    if parser is None:
        raise InvalidRequestError(
            "tools with tool_choice 'auto' need a server started with --enable-auto-tool-choice and "
            "--tool-call-parser: start it so, or send tool_choice 'required' or 'none'",
            "tool_choice",
        )
    return parser
