"""Reasoning between tags before the answer. Line breaks and spaces beside the tags belong to them."""

from __future__ import annotations

from dataclasses import dataclass

from octavo.core.records import ReasoningTags
from octavo.server.text_parser import Content, Pausing, Reasoning, TextParser


@dataclass(frozen=True, slots=True)
class Tags:
    """How a family marks its reasoning.

    starts, ends: the ways to write a tag. always: text that begins with no tag is reasoning too, until an end tag.
    special: the tags are special tokens, which must be shown to be found.
    """

    starts: tuple[str, ...] = ("<think>",)
    ends: tuple[str, ...] = ("</think>",)
    always: bool = False
    special: bool = False


class TaggedReasoning(TextParser):
    """`prompt` is what the model goes on from: many templates write the first tag, or both if there is to be none."""

    def __init__(self, tags: Tags, prompt: str) -> None:
        super().__init__()
        self._tags = tags
        end_of_prompt = prompt[-256:].rstrip()
        self._opened = end_of_prompt.endswith(tags.starts)
        self._closed = end_of_prompt.endswith(tags.ends)
        self._space: list[str] = []  # at the end of the reasoning so far
        self.begun = False
        self.over = False

    @property
    def tags(self) -> ReasoningTags:
        """For the engine, which looks for them too."""
        starts = () if self._closed else self._tags.starts
        is_open = not self._closed and (self._opened or self._tags.always)
        return ReasoningTags(starts=starts, ends=self._tags.ends, is_open=is_open)

    def _read(self) -> Pausing[None]:
        if not self._closed:
            yield from self._skip_space()
            start = yield from self._follows(*self._tags.starts)
            self._take(len(start))
            if start or self._opened or self._tags.always:
                self.begun = True
                yield from self._skip_space()
                self._mark()
                yield from self._pass_until(self._tags.ends, self._reason)
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
