"""SmolLM 2 and 3: <tool_call> with one JSON call or a list of them, or <code> with Python calls."""

from __future__ import annotations

from octavo.server.text_parser import Pausing
from octavo.server.tools.forms import CallForm
from octavo.server.tools.json_calls import JsonCalls
from octavo.server.tools.python_calls import PythonCalls
from octavo.structured.grammar import SpecialToken

_JSON, _PYTHON = "<tool_call>", "<code>"


class SmolLM(JsonCalls, PythonCalls):
    """Code that is more than calls of tools is content."""

    shows_special_tokens = True

    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm:
        return CallForm(start=_JSON, opening="[", closing="]", end="</tool_call>", separator=", ")

    def _read(self) -> Pausing[None]:
        mark = yield from self._say_until(_JSON, _PYTHON)
        while mark:
            again = ""
            if mark == _JSON:
                again = yield from self._section(_JSON, "</tool_call>")
            else:
                yield from self._calls("</code>")
                self._say(self._release())
            mark = again or (yield from self._say_until(_JSON, _PYTHON))
