"""The arguments of a tool call as a JSON object that any client can read, whatever the model wrote, as they come.

Anthropic's clients parse an input while it arrives and raise if they cannot. So only what is JSON is passed on, and
what was left open is closed.
"""

from __future__ import annotations

import json
import re

from octavo.server.text_parser import CallArguments, Event, Pausing, Put, TextParser

MALFORMED = "_malformed"  # the key of what is not JSON
MAX_DEPTH = 64  # deeper than any tool's input; readers of JSON have limits of their own

_SCALAR = re.compile(r"[^\s,:{}\[\]\"]*")
_PLAIN = re.compile(r"[^\"\\\x00-\x1f]*")
_VALUE = re.compile(r"true|false|null|-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
_HEX_DIGIT = re.compile(r"[0-9a-fA-F]")
_SURROGATE, _HIGH, _LOW = re.compile(r"[dD][89a-fA-F]"), re.compile(r"[dD][89abAB]"), re.compile(r"[dD][c-fC-F]..")
_NO_CHARACTER = r"\ufffd"


class JsonArguments(TextParser):
    """Feed it the text of arguments; it gives pieces that are one JSON object together.

    Mended: a comma before a bracket, line breaks in strings, escapes that JSON does not have. From where nothing can be
    mended, the rest is text under the key "_malformed". Where the text ends early, what is open is closed, and a key
    without a value is left out.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_put = 0

    def next(self, text: str) -> str:
        return _joined(self.feed(text))

    def end(self) -> str:
        return _joined(self.finish())

    def _read(self) -> Pausing[None]:
        yield from self._skip_space()
        self._mark()
        if (yield from self._peek()) == "{":
            yield from self._object(0)
        else:
            self._put("{")
            yield from self._end_early("")
        yield from self._pass_rest(lambda _: None)

    def _put(self, text: str) -> None:
        self._mark()
        self._num_put += 1
        self.events.append(CallArguments(0, text))

    def _value(self, lead: str, depth: int) -> Pausing[bool]:
        """A value, put after `lead` if there is one: is it whole?"""
        character = yield from self._peek()
        if character == '"':
            self._put(lead)
            return (yield from self._string(self._put))
        if character in ("{", "[") and depth < MAX_DEPTH:
            self._put(lead)
            return (yield from (self._object(depth) if character == "{" else self._list(depth)))
        scalar = yield from self._run_of(_SCALAR)
        if _VALUE.fullmatch(scalar) is None:
            return False
        self._put(lead + scalar)
        return True

    def _object(self, depth: int) -> Pausing[bool]:
        self._take(1)
        self._put("{")
        lead, sound = "", True
        while sound and (yield from self._comes(lead)):
            key = yield from self._key()
            before = self._num_put
            sound = bool(key) and (yield from self._value(f"{lead}{key}: ", depth + 1))
            lead = ", " if self._num_put > before else lead
        return (yield from self._end("}", lead, depth, sound))

    def _list(self, depth: int) -> Pausing[bool]:
        self._take(1)
        self._put("[")
        lead, sound = "", True
        while sound and (yield from self._comes(lead)):
            sound = yield from self._value(lead, depth + 1)
            lead = ", "
        return (yield from self._end("]", lead, depth, sound))

    def _key(self) -> Pausing[str]:
        """A key that has a colon behind it, which is taken too; "" if there is none."""
        parts: list[str] = []
        if (yield from self._peek()) != '"' or not (yield from self._string(parts.append)):
            return ""
        yield from self._skip_space()
        if (yield from self._peek()) != ":":
            return ""
        self._take(1)
        yield from self._skip_space()
        return "".join(parts)

    def _comes(self, lead: str) -> Pausing[bool]:
        """Is there another entry? Any but the first, for which `lead` is empty, comes after a comma."""
        yield from self._skip_space()
        if lead:
            if (yield from self._peek()) != ",":
                return False
            self._take(1)
            yield from self._skip_space()
        return (yield from self._peek()) not in ("}", "]", "")

    def _end(self, bracket: str, lead: str, depth: int, sound: bool) -> Pausing[bool]:
        """The end of an object or a list, as it should be or not: is it?"""
        whole = sound and (yield from self._peek()) == bracket
        if whole:
            self._take(1)
            self._put(bracket)
        elif depth == 0:
            yield from self._end_early(lead)
        else:
            self.events.append(CallArguments(0, bracket))  # without a mark: what is malformed has not been put yet
        return whole

    def _end_early(self, lead: str) -> Pausing[None]:
        """The end of the outermost object, with what is left of the text in it."""
        rest = [self._release()]
        if (yield from self._peek()):
            yield from self._pass_rest(rest.append)
            self._put(f"{lead}{json.dumps(MALFORMED)}: {json.dumps(''.join(rest), ensure_ascii=False)}")
        self._put("}")

    def _string(self, put: Put) -> Pausing[bool]:
        put(self._take(1))
        while True:
            yield from self._pass(_PLAIN, put)
            character = yield from self._peek()
            if character in ('"', ""):
                self._take(len(character))
                put('"')
                return character == '"'
            self._take(1)
            put((yield from self._escape()) if character == "\\" else json.dumps(character)[1:-1])

    def _escape(self) -> Pausing[str]:
        """What stands for the characters after a backslash."""
        character = yield from self._peek()
        if character == "u":
            self._take(1)
            return (yield from self._unicode())
        if character and character in '"\\/bfnrt':
            self._take(1)
            return f"\\{character}"
        return r"\\" if character else ""

    def _unicode(self) -> Pausing[str]:
        """What stands for the digits after \\u. Half of a surrogate pair is no character."""
        digits = yield from self._hex_digits()
        if len(digits) < 4:
            return rf"\\u{digits}"
        if not _SURROGATE.match(digits):
            return rf"\u{digits}"
        if not (_HIGH.match(digits) and (yield from self._follows(r"\u"))):
            return _NO_CHARACTER
        self._take(2)
        low = yield from self._hex_digits()
        if _LOW.match(low):
            return rf"\u{digits}\u{low}"
        return _NO_CHARACTER + (rf"\u{low}" if len(low) == 4 and not _SURROGATE.match(low) else _NO_CHARACTER)

    def _hex_digits(self) -> Pausing[str]:
        """Four of them, or as many as there are."""
        digits = ""
        while len(digits) < 4 and _HEX_DIGIT.fullmatch((yield from self._peek())):
            digits += self._take(1)
        return digits


def _joined(events: list[Event]) -> str:
    return "".join(event.text for event in events if isinstance(event, CallArguments))
