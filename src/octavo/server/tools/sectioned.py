"""Calls between special tokens, the name in front of its JSON: DeepSeek V3 and V3.1, Kimi K2."""

from __future__ import annotations

import re
from typing import ClassVar

from octavo.server.text_parser import Pausing
from octavo.server.tools.forms import ARGUMENTS, NAME, NUMBER, CallForm
from octavo.server.tools.json_calls import JsonCalls
from octavo.structured.grammar import SpecialToken

_HEAD = re.compile(r"[^<\n]*")
_KIMI_ID = re.compile(r"(?:functions\.)?([^\s:{}\"]+)(?::\d+)?")
_NAME = re.compile(r"[^\s`{<]*")


class SectionedCalls(JsonCalls):
    """section, call: the tokens that begin them. separator: between name and arguments. ends: of calls and sections."""

    shows_special_tokens = True
    sections: ClassVar[tuple[str, ...]]
    call: ClassVar[str]
    separator: ClassVar[str]
    ends: ClassVar[tuple[str, ...]]

    call_form: ClassVar[CallForm]

    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm:
        return cls.call_form

    def _read(self) -> Pausing[None]:
        while mark := (yield from self._say_until(*self.sections, self.call)):
            if mark != self.call:
                yield from self._skip_space()
                if not (yield from self._took(self.call)):
                    self._say(self._release())
                    continue
            yield from self._call()
            self._say(self._release())

    def _call(self) -> Pausing[None]:
        """A call after its first token. What is no call is to be released."""
        head = (yield from self._run_of(_HEAD)).strip()
        if not (yield from self._took(self.separator)):
            return
        yield from self._skip_space()
        name = yield from self._name(head)
        if not name or (yield from self._peek()) != "{":
            return
        self._begin_call(name, self._id_of(head))
        self.last_is_whole = yield from self._value((self.call, *self.ends), self._argue)
        self._mark()
        yield from self._skip_space()
        yield from self._took("```")
        yield from self._skip_space()
        while (yield from self._took(*self.ends)):
            self._mark()
            yield from self._skip_space()

    def _name(self, head: str) -> Pausing[str]:
        """The tool's name, where `head` is what stood before the separator."""
        raise NotImplementedError

    def _id_of(self, head: str) -> str:
        return ""


class DeepSeek(SectionedCalls):
    """V3: function<sep>NAME and a block of JSON code. V3.1: NAME<sep>JSON."""

    sections = ("<｜tool▁calls▁begin｜>",)
    call = "<｜tool▁call▁begin｜>"
    separator = "<｜tool▁sep｜>"
    ends = ("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
    call_form = CallForm(
        start="<｜tool▁calls▁begin｜>",
        separator="\n",
        call=(call, "function", separator, NAME, "\n```json\n", ARGUMENTS, "\n```", ends[0]),
        end=ends[1],
    )

    def _name(self, head: str) -> Pausing[str]:
        if (yield from self._peek()) == "{":
            return head
        if head != "function":
            return ""
        name = yield from self._run_of(_NAME)
        yield from self._skip_space()
        yield from self._took("```json")
        yield from self._skip_space()
        return name


class DeepSeekV31(DeepSeek):
    """The same, but a model that must call writes as V3.1 does."""

    call_form = CallForm(
        start="<｜tool▁calls▁begin｜>",
        separator="",
        call=(DeepSeek.call, NAME, DeepSeek.separator, ARGUMENTS, DeepSeek.ends[0]),
        end=DeepSeek.ends[1],
    )


class KimiK2(SectionedCalls):
    """functions.NAME:NUMBER before the arguments. That is the call's id too, and its template wants it back."""

    sections = ("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>")
    call = "<|tool_call_begin|>"
    separator = "<|tool_call_argument_begin|>"
    ends = ("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>")
    call_form = CallForm(
        start=sections[0],
        separator="",
        call=(call, "functions.", NAME, ":", NUMBER, separator, ARGUMENTS, ends[0]),
        end=ends[1],
    )

    def _name(self, head: str) -> Pausing[str]:
        yield from ()
        found = _KIMI_ID.fullmatch(head)
        return found[1] if found else ""

    def _id_of(self, head: str) -> str:
        return head
