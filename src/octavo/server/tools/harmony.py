"""gpt-oss: a call is a message to a function, <|channel|>commentary to=functions.NAME<|message|>{...}<|call|>."""

from __future__ import annotations

import re

from octavo.server.reasoning.harmony import CALL, CHANNEL, MESSAGE
from octavo.server.text_parser import Pausing
from octavo.server.tools.json_calls import JsonCalls

_HEAD = re.compile(r"[^<]*")
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?(\S+)")
_CONSTRAIN = "<|constrain|>"  # and the type of the arguments, which is JSON


class Harmony(JsonCalls):
    shows_special_tokens = True

    def _read(self) -> Pausing[None]:
        while (yield from self._say_until(CHANNEL)):
            yield from self._call()
            self._say(self._release())

    def _call(self) -> Pausing[None]:
        """A call after its first mark. What is no call is to be released."""
        recipient = _RECIPIENT.search((yield from self._run_of(_HEAD)))
        if (yield from self._took(_CONSTRAIN)):
            yield from self._run_of(_HEAD)
        if recipient is None or not (yield from self._took(MESSAGE)):
            return
        yield from self._skip_space()
        if (yield from self._peek()) != "{":
            return
        self._begin_call(recipient[1])
        self.last_is_whole = yield from self._value((CALL, CHANNEL), self._argue)
        self._mark()
        yield from self._skip_space()
        if (yield from self._took(CALL)):
            self._mark()
