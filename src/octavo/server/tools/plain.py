"""A list of calls in JSON and nothing else: what a model without a format of its own is made to write."""

from __future__ import annotations

from octavo.server.text_parser import Pausing
from octavo.server.tools.forms import PLAIN, CallForm
from octavo.server.tools.json_calls import JsonCalls
from octavo.structured.grammar import SpecialToken

_NO_MARK = "\0"  # which is in no JSON


class PlainCalls(JsonCalls):
    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm:
        return PLAIN

    def _read(self) -> Pausing[None]:
        yield from self._section(_NO_MARK, None)
        yield from self._pass_rest(self._say)
