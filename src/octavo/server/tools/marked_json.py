"""JSON calls between marks: Hermes and Qwen, Granite, Jamba, Phi-4-mini."""

from __future__ import annotations

from typing import ClassVar

from octavo.server.text_parser import Pausing
from octavo.server.tools.forms import CallForm
from octavo.server.tools.json_calls import JsonCalls
from octavo.structured.grammar import SpecialToken


class MarkedJson(JsonCalls):
    starts: ClassVar[tuple[str, ...]]
    end: ClassVar[str | None] = None
    call_form: ClassVar[CallForm]

    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm:
        return cls.call_form

    def _read(self) -> Pausing[None]:
        mark = yield from self._say_until(*self.starts)
        while mark:
            mark = (yield from self._section(mark, self.end)) or (yield from self._say_until(*self.starts))


class Hermes(MarkedJson):
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, one pair of tags a call."""

    shows_special_tokens = True
    starts = ("<tool_call>",)
    end = "</tool_call>"
    call_form = CallForm(start="<tool_call>", opening="\n", closing="\n", end="</tool_call>")


class Granite(MarkedJson):
    """<|tool_call|> (3.0) or <tool_call> (3.1), then a list of calls."""

    shows_special_tokens = True
    starts = ("<|tool_call|>", "<tool_call>")

    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm:
        start = next((mark for mark in cls.starts if special_token(mark) is not None), cls.starts[0])
        return CallForm(start=start, opening="[", closing="]", separator=", ")


class Jamba(MarkedJson):
    """<tool_calls>[...]</tool_calls>"""

    shows_special_tokens = True
    starts = ("<tool_calls>",)
    end = "</tool_calls>"
    call_form = CallForm(start="<tool_calls>", opening="[", closing="]", end="</tool_calls>", separator=", ")


class Phi4Mini(MarkedJson):
    """functools[...], a list of calls."""

    starts = ("functools",)
    call_form = CallForm(start="functools", opening="[", closing="]", separator=", ")
