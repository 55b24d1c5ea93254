"""Reasoning between tags before the answer. Line breaks and spaces beside the tags belong to them."""

from __future__ import annotations

from octavo.core.reasoning import Tags
from octavo.server.text_parser import Content, Pausing, Reasoning, TextParser


class TaggedReasoning(TextParser):
    """`prompt` is what the model goes on from. tags: for the engine, which looks for them too."""

    def __init__(self, tags: Tags, prompt: str) -> None:
        super().__init__()
        self.tags = tags.behind(prompt)
        self._space: list[str] = []  # at the end of the reasoning so far
        self.begun = False
        self.over = False

    def _read(self) -> Pausing[None]:
        tags = self.tags
        if tags.starts:
            yield from self._skip_space()
            start = yield from self._follows(*tags.starts)
            self._take(len(start))
            if start or tags.is_open:
                self.begun = True
                yield from self._skip_space()
                self._mark()
                yield from self._pass_until(tags.ends, self._reason)
                self.over = True
                yield from self._skip_space()
                self._mark()
            self._say(self._release())
        yield from self._pass_rest(self._say)

    def _reason(self, text: str) -> None:
        bare = text.rstrip()
        if bare:
            self.events.append(Reasoning("".join(self._space) + bare))
            self._space.clear()
        if len(bare) < len(text):
            self._space.append(text[len(bare) :])

    def _say(self, text: str) -> None:
        if text:
            self.events.append(Content(text))
