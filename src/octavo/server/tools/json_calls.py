"""Calls written as JSON objects: {"name": ..., "arguments": {...}}, alone or in a list, between marks or not.

The arguments are passed on as the model wrote them, piece by piece. Only their end is looked for, so that a malformed
value is no reason to lose text.
"""

from __future__ import annotations

import json
import re

from octavo.server.text_parser import Pausing, Put
from octavo.server.tools.parser import ToolParser

_ARGUMENTS = ("arguments", "parameters")
_CALL_KEYS = ("name", *_ARGUMENTS, "type", "id")
_SCALAR = re.compile(r"[^\s,:{}\[\]\"<]*")
_OUTSIDE = re.compile(r"[^\"{}\[\]<]*")  # of strings; < and [ may begin a mark
_STRING = re.compile(r"[^\"\\\n]*")
_TORN_STRING = re.compile(r"[^\"\\\[<]*")


class JsonCalls(ToolParser):
    def _section(self, start: str, end: str | None) -> Pausing[str]:
        """Calls after the mark `start`, which has been taken: objects and lists of objects up to the mark `end`.

        Without `end`: one object or one list. If there is no call, all of it is content. Gives `start` if that was
        taken again, "" otherwise.
        """
        marks = (start,) if end is None else (end, start)
        called = in_list = False
        while not called or in_list or end is not None:
            yield from self._skip_space()
            character = yield from self._peek()
            if not character or (yield from self._follows(*marks)):
                break
            if character == "{":
                if (yield from self._object(marks, bare=False)):
                    called = True
                elif called:
                    self._say(self._release())
                else:
                    break
                self._mark()
            elif character in ("[", "]") and in_list == (character == "]"):
                in_list = not in_list
                self._take(1)
            elif character == "," and called:
                self._take(1)
            else:
                break
        if not called:
            self._say(self._release())
            return ""
        self._mark()
        if end is None:
            return ""
        mark = yield from self._say_until(*marks)
        return start if mark == start else ""

    def _object(self, marks: tuple[str, ...], *, bare: bool) -> Pausing[bool]:
        """An object at the next character: is it a call? What is taken of one that is none is to be released.

        bare: no mark says that there is a call here, so a call has a name and arguments and no other keys.
        """
        name: str | None = None
        arguments: list[str] | None = None
        begun = False
        self._take(1)
        while True:
            yield from self._skip_space()
            character = yield from self._peek()
            if character == "}":
                self._take(1)
                break
            key = (yield from self._string()) if character == '"' else None
            yield from self._skip_space()
            if key is None or (yield from self._peek()) != ":" or (bare and key not in _CALL_KEYS):
                return self._ends_early(begun)
            self._take(1)
            yield from self._skip_space()
            if key == "name" and name is None:
                name = (yield from self._string()) if (yield from self._peek()) == '"' else None
                if not name:
                    return False
                if arguments is not None:
                    begun = True
                    self._begin_whole(name, "".join(arguments))
            elif key in _ARGUMENTS and arguments is None:
                arguments = []
                if name is not None and (yield from self._peek()) in ("{", "["):
                    begun = True
                    self._begin_call(name)
                    self.last_is_whole = yield from self._value(marks, self._argue)
                    if not self.last_is_whole:
                        return True
                else:
                    if not (yield from self._value(marks, arguments.append)):
                        return False
                    if name is not None:
                        begun = True
                        self._begin_whole(name, "".join(arguments))
            elif not (yield from self._value(marks, lambda _: None)):
                return self._ends_early(begun)
            yield from self._skip_space()
            if (yield from self._peek()) == ",":
                self._take(1)
        if not begun and name is not None and not bare:
            begun = True
            self._begin_whole(name, "{}")
        return begun

    def _ends_early(self, begun: bool) -> bool:
        """An object is malformed, or cut, between its values. What follows the arguments of a call is content."""
        if begun:
            rest = self._release()
            self._say(rest if rest.strip(", \n") else "")
        return begun

    def _begin_whole(self, name: str, arguments: str) -> None:
        """A call whose arguments have been read already. Some models write null, or the object as text."""
        text = "" if arguments == "null" else _decoded(arguments) if arguments.startswith('"') else None
        if text is not None and text.lstrip()[:1] in ("", "{"):
            arguments = text if text.strip() else "{}"
        self._begin_call(name)
        self._argue(arguments)
        self.last_is_whole = True

    def _value(self, marks: tuple[str, ...], put: Put) -> Pausing[bool]:
        """A JSON value, put as it comes, and whether it is whole.

        It ends where its last bracket or quote closes, or before one of `marks` outside of strings. In a string with a
        line break, which JSON forbids, a mark counts too: its quote may be missing.
        """
        if (yield from self._peek()) not in ("{", "[", '"'):
            scalar = yield from self._run_of(_SCALAR)
            put(scalar)
            return bool(scalar) and (yield from self._peek()) != ""
        depth = 0
        in_string = torn = False
        while True:
            yield from self._pass((_TORN_STRING if torn else _STRING) if in_string else _OUTSIDE, put)
            character = yield from self._peek()
            if not character or ((torn or not in_string) and (yield from self._follows(*marks))):
                return False
            put(self._take(1))
            if character == '"':
                in_string, torn = not in_string, False
            elif in_string:
                torn = torn or character == "\n"
                if character == "\\" and (yield from self._peek()):
                    put(self._take(1))
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
            if depth == 0 and not in_string:
                return True

    def _string(self) -> Pausing[str | None]:
        """The text of a JSON string at the next character; None if it is none or has no end on its line."""
        parts = [self._take(1)]
        while True:
            yield from self._pass(_STRING, parts.append)
            character = yield from self._peek()
            if character not in ('"', "\\"):
                return None
            parts.append(self._take(1))
            if character == '"':
                return _decoded("".join(parts))
            if (yield from self._peek()):
                parts.append(self._take(1))


def _decoded(raw: str) -> str | None:
    """The text of a JSON string; None if it is none, or none that can be sent on."""
    try:
        text = json.loads(raw, strict=False)
        if not isinstance(text, str):
            return None
        text.encode()  # a lone half of a surrogate pair can be written in JSON but not sent
    except ValueError:
        return None
    return text
