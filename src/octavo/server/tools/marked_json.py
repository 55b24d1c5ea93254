"""JSON calls between marks: Hermes and Qwen, Granite, Jamba, Phi-4-mini."""

from __future__ import annotations

from typing import ClassVar

from octavo.server.text_parser import Pausing
from octavo.server.tools.json_calls import JsonCalls


class MarkedJson(JsonCalls):
    starts: ClassVar[tuple[str, ...]]
    end: ClassVar[str | None] = None

    def _read(self) -> Pausing[None]:
        mark = yield from self._say_until(*self.starts)
        while mark:
            mark = (yield from self._section(mark, self.end)) or (yield from self._say_until(*self.starts))


class Hermes(MarkedJson):
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>, one pair of tags a call."""

    shows_special_tokens = True
    starts = ("<tool_call>",)
    end = "</tool_call>"


class Granite(MarkedJson):
    """<|tool_call|> (3.0) or <tool_call> (3.1), then a list of calls."""

    shows_special_tokens = True
    starts = ("<|tool_call|>", "<tool_call>")


class Jamba(MarkedJson):
    """<tool_calls>[...]</tool_calls>"""

    shows_special_tokens = True
    starts = ("<tool_calls>",)
    end = "</tool_calls>"


class Phi4Mini(MarkedJson):
    """functools[...], a list of calls."""

    starts = ("functools",)
