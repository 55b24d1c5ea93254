"""Llama 3 and 4: bare JSON objects, {"name": ..., "parameters": {...}}, or the same after <|python_tag|>."""

from __future__ import annotations

import re

from octavo.server.text_parser import Pausing
from octavo.server.tools.forms import CallForm, json_call
from octavo.server.tools.json_calls import JsonCalls
from octavo.structured.grammar import SpecialToken

_TAG = "<|python_tag|>"
_SEPARATORS = re.compile(r"[\s;,]*")


class LlamaJson(JsonCalls):
    """A call begins a line, follows the tag, or follows another call, after a semicolon or nothing."""

    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm:
        return CallForm(separator="; ", call=json_call("parameters"))

    def _read(self) -> Pausing[None]:
        while True:
            yield from self._skip_space()
            while (yield from self._peek()) == "{" and (yield from self._object((_TAG,), bare=True)):
                self._mark()
                yield from self._run_of(_SEPARATORS)
            self._say(self._release())
            mark = yield from self._say_until("\n", _TAG)
            if not mark:
                return
            if mark == "\n":
                self._say(self._release())
