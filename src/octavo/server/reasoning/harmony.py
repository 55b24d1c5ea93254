"""OpenAI's harmony format, of gpt-oss: an answer is messages with channels, one of which is reasoning.

Calls of tools are messages too; they are passed on for the parser of calls, in one way of writing them.
"""

from __future__ import annotations

import re

from octavo.server.reasoning.tagged import TaggedReasoning
from octavo.server.text_parser import Content, Pausing, Reasoning

CHANNEL, MESSAGE, CALL = "<|channel|>", "<|message|>", "<|call|>"
_START = "<|start|>"
_ENDS = ("<|end|>", CALL, "<|return|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


class HarmonyReasoning(TaggedReasoning):
    """<|channel|>analysis<|message|>...<|end|> is reasoning, the other channels are content.

    A message to somebody becomes content as <|channel|>commentary to=NAME<|message|>...<|call|>. Text that does not
    begin like a message is content as it is, and so is a beginning that does not come to its text.
    """

    def _read(self) -> Pausing[None]:
        while True:
            yield from self._skip_space()
            if not (yield from self._follows(CHANNEL, _START, "to=")):
                break
            head: list[str] = []
            before = self._release()
            mark = yield from self._pass_until((MESSAGE,), head.append)
            self._mark()
            if not mark:
                self._say(before + "".join(head))
                return
            yield from self._message("".join(head))
        self._say(self._release())
        yield from self._pass_rest(self._say)

    def _message(self, head: str) -> Pausing[None]:
        recipient, channel = _RECIPIENT.search(head), _CHANNEL.search(head)
        thinks = recipient is None and channel is not None and channel[1] == "analysis"
        self.begun |= thinks
        self.over = self.begun and not thinks
        if recipient is not None:
            self._say(f"{CHANNEL}commentary to={recipient[1]}{MESSAGE}")
        end = yield from self._pass_until(_ENDS, self._think if thinks else self._say)
        self._mark()
        if recipient is not None and end:
            self._say(CALL)

    def _think(self, text: str) -> None:
        self.events.append(Reasoning(text))

    def _say(self, text: str) -> None:
        if text:
            self.events.append(Content(text))
