"""What the parsers of all formats share: events of calls, and the white space around them.

White space beside calls belongs to the format. It is content only between two texts, or if there is no call at all.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from octavo.server.text_parser import CallArguments, CallStart, Content, Event, Pausing, TextParser
from octavo.server.tools.forms import CallForm
from octavo.structured.grammar import SpecialToken


class ToolParser(TextParser):
    """A call exists as soon as its name and the beginning of its arguments have been read.

    What does not get so far, because it is malformed or cut, is content, to the last character. Malformed arguments of
    a call that exists are passed on as they are.
    """

    shows_special_tokens: ClassVar[bool] = False  # whether the format's marks may be special tokens of the model

    @classmethod
    def form(cls, special_token: SpecialToken) -> CallForm | None:
        """How a model that was taught this format is made to call; None if its calls are not JSON."""
        return None

    def __init__(self, tools: Mapping[str, Mapping[str, Any]] = MappingProxyType({})) -> None:
        """tools: the properties in the schema of each tool's parameters, for formats whose values have no types."""
        super().__init__()
        self._tools = tools
        self.num_calls = 0
        self.last_is_whole = False  # the arguments of the last call have come to their end
        self._has_text = False
        self._space: list[str] = []  # at the end of the content so far

    @staticmethod
    def new_call_id() -> str:
        return f"chatcmpl-tool-{uuid.uuid4().hex}"

    def finish(self) -> list[Event]:
        events = super().finish()
        if self._space and not self.num_calls:
            events.append(Content("".join(self._space)))
        return events

    def _say(self, text: str) -> None:
        """`text` is content."""
        bare = text.rstrip()
        if bare:
            said = "".join(self._space) + bare
            self._space.clear()
            self.events.append(Content(said if self._has_text or not self.num_calls else said.lstrip()))
            self._has_text = True
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def _say_until(self, *tags: str) -> Pausing[str]:
        """Content up to the first of `tags`, which is taken and returned; "" at the end."""
        return (yield from self._pass_until(tags, self._say))

    def _begin_call(self, name: str, call_id: str = "") -> None:
        self.events.append(CallStart(self.num_calls, name, call_id))
        self.num_calls += 1
        self.last_is_whole = False

    def _argue(self, text: str) -> None:
        """`text` is the next piece of the last call's arguments."""
        self._mark()
        self.events.append(CallArguments(self.num_calls - 1, text))
