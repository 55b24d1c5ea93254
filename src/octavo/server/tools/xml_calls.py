"""Calls in tags, with a tag for each argument: Qwen3-Coder, MiniMax M2, Seed-OSS, DeepSeek V3.2, GLM 4.5.

The values have no quotes, so what they are is the tool's schema's to say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from octavo.server.text_parser import Pausing
from octavo.server.tools.parser import ToolParser
from octavo.server.tools.python_calls import as_json

_IN_TAG = re.compile(r"[^<>\n]*")
_IN_LINE = re.compile(r"[^<\n]*")
_QUOTED = re.compile(r"\"([^\"]*)\"")


class BareValues(ToolParser):
    """Arguments that are text up to a tag."""

    _properties: Mapping[str, Any] = MappingProxyType({})  # of the tool that is being called

    def _argument(self, lead: str, key: str, ends: tuple[str, ...], *, is_text: bool | None = None) -> Pausing[str]:
        """The value of `key` up to the first of `ends`, which is taken and returned; "" at the end of the text.

        Text is passed on as it comes, other values when they are whole. is_text: None if the schema has to say.
        """
        self._argue(f"{lead}{json.dumps(key, ensure_ascii=False)}: ")
        schema = self._schema(key)
        if is_text or (is_text is None and schema.get("type") == "string"):
            self._argue('"')
            end = yield from self._pass_until(ends, lambda text: self._argue(_escaped(text)))
            self._argue('"' if end else "")
            return end
        parts: list[str] = []
        end = yield from self._pass_until(ends, parts.append)
        self._argue(_typed("".join(parts), schema))
        return end

    def _begin_arguments(self, name: str) -> None:
        self._begin_call(name)
        self._argue("{")
        self._properties = self._tools.get(name, {})

    def _end_arguments(self) -> None:
        self._argue("}")
        self.last_is_whole = True

    def _schema(self, key: str) -> dict[str, Any]:
        schema = self._properties.get(key)
        return schema if isinstance(schema, dict) else {}


class XmlCalls(BareValues):
    """<outer> <function=NAME> <parameter=KEY> value </parameter> </function> </outer>, as the class variables have it.

    Models leave the outer tag out, so a call begins with that of the function. A line break next to a value's tags
    belongs to them. The end tag of an argument may be missing where a line begins with another.
    """

    outer: ClassVar[tuple[str, str]]
    function: ClassVar[tuple[str, str]] = ("<function=", "</function>")
    parameter: ClassVar[tuple[str, str]] = ("<parameter=", "</parameter>")

    def _read(self) -> Pausing[None]:
        while mark := (yield from self._say_until(self.outer[0], self.function[0])):
            if mark == self.outer[0]:
                yield from self._skip_space()
                if not (yield from self._took(self.function[0])):
                    self._say(self._release())
                    continue
            yield from self._call()
            self._say(self._release())

    def _call(self) -> Pausing[None]:
        """A call after the beginning of its function's tag. What is no call is to be released."""
        name = _name((yield from self._run_of(_IN_TAG)))
        if not name or not (yield from self._took(">")):
            return
        yield from self._skip_space()
        tag = yield from self._follows(self.parameter[0], self.function[1])
        if not tag:
            return
        self._take(len(tag))
        self._begin_arguments(name)
        lead = ""
        while tag.strip() == self.parameter[0]:
            attributes = yield from self._run_of(_IN_TAG)
            if not (yield from self._took(">")):
                return
            yield from self._took("\n")
            is_text = True if 'string="true"' in attributes else None
            tag = yield from self._argument(lead, _name(attributes), self._ends_of_value, is_text=is_text)
            lead = ", "
            if tag.strip() == self.parameter[1]:
                yield from self._skip_space()
                tag = yield from self._follows(self.parameter[0], self.function[1])
                self._take(len(tag))
        if not tag:
            return
        self._end_arguments()
        yield from self._skip_space()
        if (yield from self._took(self.outer[1])):
            self._mark()

    @property
    def _ends_of_value(self) -> tuple[str, ...]:
        begin, end = self.parameter
        return (f"\n{end}", end, f"\n{begin}", f"\n{self.function[1]}")


class QwenXml(XmlCalls):
    shows_special_tokens = True
    outer = ("<tool_call>", "</tool_call>")


class SeedOss(XmlCalls):
    shows_special_tokens = True
    outer = ("<seed:tool_call>", "</seed:tool_call>")


class MiniMaxM2(XmlCalls):
    shows_special_tokens = True
    outer = ("<minimax:tool_call>", "</minimax:tool_call>")
    function = ("<invoke name=", "</invoke>")
    parameter = ("<parameter name=", "</parameter>")


class DeepSeekXml(XmlCalls):
    """V3.2. A parameter's tag says whether its value is text: string="true"."""

    shows_special_tokens = True
    outer = ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>")
    function = ("<｜DSML｜invoke name=", "</｜DSML｜invoke>")
    parameter = ("<｜DSML｜parameter name=", "</｜DSML｜parameter>")


class Glm(BareValues):
    """<tool_call>NAME <arg_key>KEY</arg_key> <arg_value>value</arg_value> </tool_call>"""

    shows_special_tokens = True

    def _read(self) -> Pausing[None]:
        while (yield from self._say_until("<tool_call>")):
            yield from self._call()
            self._say(self._release())

    def _call(self) -> Pausing[None]:
        name = (yield from self._run_of(_IN_LINE)).strip()
        yield from self._skip_space()
        if not name or not (yield from self._follows("<arg_key>", "</tool_call>")):
            return
        self._begin_arguments(name)
        lead = ""
        while not (yield from self._took("</tool_call>")):
            if not (yield from self._took("<arg_key>")):
                return
            key = (yield from self._run_of(_IN_LINE)).strip()
            if not (yield from self._took("</arg_key>")):
                return
            yield from self._skip_space()
            if not (yield from self._took("<arg_value>")):
                return
            if not (yield from self._argument(lead, key, ("</arg_value>",))):
                return
            lead = ", "
            yield from self._skip_space()
        self._end_arguments()


def _name(attributes: str) -> str:
    """The first quoted text in a tag, or all of it."""
    quoted = _QUOTED.search(attributes)
    return quoted[1] if quoted else attributes.strip()


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _typed(raw: str, schema: dict[str, Any]) -> str:
    """A value as JSON: what it says if that is JSON (or Python, where the schema wants no text), else text."""
    try:
        json.loads(raw, parse_constant=_refuse)
        return raw.strip()
    except (ValueError, RecursionError):
        pass
    return as_json(raw.strip()) if schema.get("type") not in (None, "string") else f'"{_escaped(raw)}"'


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
