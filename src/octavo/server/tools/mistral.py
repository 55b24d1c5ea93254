"""Mistral: the mark [TOOL_CALLS], then a list of calls in JSON (up to v7), or a name and its arguments (from v11)."""

from __future__ import annotations

import random
import re
import string

from octavo.server.text_parser import Pausing
from octavo.server.tools.forms import ARGUMENTS, NAME, CallForm
from octavo.server.tools.json_calls import JsonCalls
from octavo.structured.grammar import SpecialToken

_MARK, _ID, _ARGUMENTS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
_NAME = re.compile(r"[^\s\[\]{}\"]*")
_WORD = re.compile(r"\w*")


class Mistral(JsonCalls):
    shows_special_tokens = True

    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm:
        if special_token(_ARGUMENTS) is not None:
            return CallForm(start=_MARK, call=(NAME, _ARGUMENTS, ARGUMENTS))
        return CallForm(start=_MARK, opening=" [", closing="]", separator=", ")

    @staticmethod
    def new_call_id() -> str:
        return "".join(random.choices(string.ascii_letters + string.digits, k=9))  # what the templates demand

    def _read(self) -> Pausing[None]:
        while (yield from self._say_until(_MARK)):
            yield from self._skip_space()
            if (yield from self._peek()) in ("[", "{"):
                yield from self._section(_MARK, None)
            else:
                yield from self._named_call()

    def _named_call(self) -> Pausing[None]:
        """name[ARGS]{...}, with [CALL_ID] and an id between the two or without any of these marks."""
        name = yield from self._run_of(_NAME)
        yield from self._skip_space()
        if (yield from self._follows(_ID)):
            self._take(len(_ID))
            yield from self._run_of(_WORD)
        if (yield from self._follows(_ARGUMENTS)):
            self._take(len(_ARGUMENTS))
        yield from self._skip_space()
        if name and (yield from self._peek()) == "{":
            self._begin_call(name)
            self.last_is_whole = yield from self._value((_MARK,), self._argue)
            self._mark()
        else:
            self._say(self._release())
