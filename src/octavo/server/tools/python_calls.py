"""Calls written as Python: f(city="Oslo", days=[1, 2]). Keyword arguments with literal values become JSON.

A value that is no literal is passed on as text, so that nothing is lost and the arguments are still JSON.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import Any

from octavo.server.text_parser import Pausing, Put
from octavo.server.tools.parser import ToolParser

_NAME = re.compile(r"[\w.\-]*")
_WORD = re.compile(r"\w*")
_PLAIN = re.compile(r"[^'\"()\[\]{},]*")
_STRINGS = {quote: re.compile(rf"[^\\{quote}]*") for quote in "'\""}
_JSON_NAMES = {"true": True, "false": False, "null": None}


class PythonCalls(ToolParser):
    def _calls(self, end: str) -> Pausing[bool]:
        """Calls with commas or nothing between them up to `end`, which is taken: is there any?

        What is taken of one that is none is to be released.
        """
        called = False
        while True:
            yield from self._skip_space()
            if called and (yield from self._follows(end)):
                self._take(len(end))
                self._mark()
                return True
            if called and (yield from self._peek()) == ",":
                self._take(1)
                continue
            if not (yield from self._call()):
                return called
            self._mark()
            called = True

    def _call(self) -> Pausing[bool]:
        """Is there a call at the next character? It exists as soon as it has the name of an argument, or has none."""
        name = yield from self._run_of(_NAME)
        if not name.replace(".", "_").replace("-", "_").isidentifier() or (yield from self._peek()) != "(":
            return False
        self._take(1)
        key = yield from self._argument_name()
        if key == "" and (yield from self._peek()) == ")":
            self._take(1)
            self._begin_call(name)
            self._argue("{}")
            self.last_is_whole = True
            return True
        if not key or (yield from self._peek()) != "=":
            return False
        self._begin_call(name)
        lead = "{"
        while True:
            if (yield from self._peek()) == "=":
                self._take(1)
            self._argue(f"{lead}{_dumped(key)}: ")
            lead = ", "
            raw = yield from self._expression()
            character = yield from self._peek()
            if not character:
                self._argue(_cut_literal(raw))
                return True
            self._argue(as_json(raw))
            if character == ",":
                self._take(1)
                key = yield from self._argument_name()
                character = yield from self._peek()
                if key or character not in (")", ""):
                    continue
            if character:
                self._take(len(character) if character == ")" else 0)
                self._argue("}")
                self.last_is_whole = True
            return True

    def _argument_name(self) -> Pausing[str]:
        yield from self._skip_space()
        name = yield from self._run_of(_WORD)
        yield from self._skip_space()
        return name

    def _expression(self) -> Pausing[str]:
        """All up to a comma or a closing bracket that is not its own."""
        parts: list[str] = []
        depth = 0
        while True:
            yield from self._pass(_PLAIN, parts.append)
            character = yield from self._peek()
            if not character or (depth == 0 and character in ",)]"):
                return "".join(parts).strip()
            if character in _STRINGS:
                yield from self._python_string(character, parts.append)
                continue
            if character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
            parts.append(self._take(1))

    def _python_string(self, quote: str, put: Put) -> Pausing[None]:
        closing = (yield from self._follows(quote * 3)) or quote
        put(self._take(len(closing)))
        while True:
            yield from self._pass(_STRINGS[quote], put)
            character = yield from self._peek()
            if not character:
                return
            if character == "\\":
                put(self._take(1))
                if (yield from self._peek()):
                    put(self._take(1))
            elif (yield from self._follows(closing)):
                put(self._take(len(closing)))
                return
            else:
                put(self._take(1))


def as_json(raw: str) -> str:
    """A Python literal as JSON; anything else as a JSON string of itself."""
    for source in (raw, raw.replace("\n", "\\n")):  # models break lines inside of plain quotes
        try:
            return _dumped(_JSON_NAMES[source] if source in _JSON_NAMES else _literal(source))
        except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            pass
    return _dumped(raw)


def _literal(source: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd escapes: they would print the model's text
        return ast.literal_eval(source)


def _cut_literal(raw: str) -> str:
    """The beginning of a literal whose end never came, as the beginning of JSON."""
    quote = raw[:1]
    if quote not in _STRINGS:
        return raw
    return _dumped(raw.removeprefix(quote * 3).removeprefix(quote))[:-1]


def _dumped(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can write
        return json.dumps(value)
    return text
