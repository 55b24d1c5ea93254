"""How formats write calls, as grammars: so that a call must come, or that one which comes fits its function.

A model writes calls as it was taught: the form is the parser's own wherever calls hold JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from octavo.structured.grammar import SpecialToken, expression, json_expression, quoted, triggered

MAX_CALLS = 64  # of one answer: a weak model would go on until max_tokens
_ANY_ARGUMENTS = {"type": "object"}


@dataclass(frozen=True, slots=True)
class Function:
    """A function that may be called. parameters: a JSON schema. strict: its arguments must fit them."""

    name: str
    parameters: dict[str, Any]
    strict: bool

    @classmethod
    def of(cls, tool: dict[str, Any]) -> Function:
        """A tool of a request that has been checked."""
        function = tool["function"]
        parameters = function.get("parameters")
        nothing = {"type": "object", "properties": {}, "additionalProperties": False}
        return cls(function["name"], nothing if parameters is None else parameters, bool(function.get("strict")))


# In the place of a call's name, bare or as a JSON string, of its arguments, and of some number.
NAME, JSON_NAME, ARGUMENTS, NUMBER = "<name>", "<json name>", "<arguments>", "<number>"
_BARE_NAME = re.compile(r"[\w.\-]+")


def json_call(key: str) -> tuple[str, ...]:
    return ('{"name": ', JSON_NAME, f', "{key}": ', ARGUMENTS, "}")


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls between marks.

    start, end: marks, which may be special tokens, or nothing. opening, closing: text inside of them. separator: what
    stands between calls; None: each has marks of its own. call: marks, texts and the places of name and arguments.
    """

    start: str = ""
    opening: str = ""
    closing: str = ""
    end: str = ""
    separator: str | None = None
    call: tuple[str, ...] = json_call("arguments")

    def can_write(self, name: str) -> bool:
        """Whether a name would be read as it was written."""
        return NAME not in self.call or _BARE_NAME.fullmatch(name) is not None

    def required(self, functions: Sequence[Function], special_token: SpecialToken, *, only_one: bool) -> str:
        """A grammar of one or more calls and nothing else."""
        calls, rules = self._calls(functions, special_token, only_one, "", strict=True)
        again = "" if only_one or self.separator is not None else f'("\\n"? calls){{0,{MAX_CALLS - 1}}}'
        return "\n".join([f"start: calls {again}", f"calls: {calls}", *rules])

    def optional(self, functions: Sequence[Function], special_token: SpecialToken, *, only_one: bool) -> str:
        """A grammar of free text in which what begins like a call is one."""
        if self.start:
            trigger, written = expression(self.start, special_token), ""
            calls, rules = self._calls(functions, special_token, only_one, written, strict=False)
            calls = calls.removeprefix(trigger)
        else:  # the beginning of the object is what tells
            written = '{"name": "'
            trigger = quoted(written)
            calls, rules = self._calls(functions, special_token, True, written, strict=False)
        return "\n".join([triggered({trigger: [calls]}, only_one=only_one), *rules])

    def _calls(
        self, functions: Sequence[Function], special_token: SpecialToken, only_one: bool, written: str, *, strict: bool
    ) -> tuple[str, list[str]]:
        """Calls with their marks, as an expression with its rules. `written`: the beginning that is there already.

        strict: so are all functions.
        """
        parts = [expression(self.start, special_token) if self.start else "", _text(self.opening), "call"]
        if self.separator is not None and not only_one:
            parts.append(f"({_text(self.separator)} call){{0,{MAX_CALLS - 1}}}")
        parts += [_text(self.closing), expression(self.end, special_token) if self.end else ""]
        rules = [f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}"]
        for i, function in enumerate(functions):
            arguments = json_expression(function.parameters if strict or function.strict else _ANY_ARGUMENTS)
            rules.append(f"call_{i}: {self._call(function.name, arguments, special_token, written)}")
        return " ".join(filter(None, parts)), rules

    def _call(self, name: str, arguments: str, special_token: SpecialToken, written: str) -> str:
        values = {NAME: name, JSON_NAME: json.dumps(name, ensure_ascii=False)}
        parts = []
        text = ""
        for piece in self.call:
            expressed = {ARGUMENTS: arguments, NUMBER: "/[0-9]{1,3}/"}.get(piece)
            if expressed is None and special_token(piece) is not None:
                expressed = expression(piece, special_token)
            if expressed is None:
                text += values.get(piece, piece)
                continue
            parts += [_text(text.removeprefix(written)), expressed]
            text = written = ""
        return " ".join(filter(None, [*parts, _text(text)]))


# What vLLM has a model write when it must call: a list, whatever its own format is.
PLAIN = CallForm(opening="[", closing="]", separator=", ", call=json_call("parameters"))


def _text(text: str) -> str:
    return quoted(text) if text else ""
