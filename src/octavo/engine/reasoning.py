"""Where an output is in its reasoning, and the budget that ends it.

Tags are found in the bytes of tokens, because most models write them with tokens that depend on what is around them.
Knows neither tokenizers nor how a family marks its reasoning.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octavo.core.records import ReasoningTags
from octavo.runner.sampling import Array

MAX_REST = 3  # tokens that a character may lack


class ReasoningProgress:
    """Whether an output, fed token by token, is `inside` of its reasoning, or that is `over` (or never comes)."""

    def __init__(self, tags: ReasoningTags) -> None:
        self._starts = tuple(tag.encode() for tag in tags.starts)
        self._ends = tuple(tag.encode() for tag in tags.ends)
        self._longest_end = max(map(len, self._ends))
        self.inside = tags.is_open
        self.over = not tags.is_open and not tags.starts
        self._text = b""  # that a tag may begin in

    def feed(self, text: bytes) -> None:
        if self.over:
            return
        self._text += text
        if not self.inside:
            self._text = self._text.lstrip()
            start = next((tag for tag in self._starts if self._text.startswith(tag)), None)
            if start is None:
                self.over = not any(tag.startswith(self._text) for tag in self._starts)
                return
            self.inside = True
            self._text = self._text[len(start) :]
        if any(tag in self._text for tag in self._ends):
            self.inside, self.over = False, True
        self._text = self._text[-self._longest_end :]

    @property
    def is_mid_character(self) -> bool:
        """Whether bytes of the last character are missing."""
        for count, byte in enumerate(reversed(self._text[-MAX_REST:]), start=1):
            if byte >= 0xC0:  # the first of several
                return count < (2 if byte < 0xE0 else 3 if byte < 0xF0 else 4)
            if byte < 0x80:
                break
        return False


class ThinkingBudget:
    """A `TokenConstraint`: after `budget` tokens of reasoning come the tokens of an end tag, and nothing else.

    A character that the budget cuts may be finished first. Where a later constraint has its way, as a grammar that
    forbids half a character, the end is tried again. token_bytes: what a token adds to the text, a special token too.
    """

    def __init__(self, budget: int, tags: ReasoningTags, token_bytes: Callable[[int], bytes]) -> None:
        self._left = budget
        self._progress = ReasoningProgress(tags)
        self._token_bytes = token_bytes
        self._end = tags.end_token_ids
        self._next: int | None = None  # of these, the one to be forced
        self._force_if_spent()

    def fill(self, mask: Array) -> bool:
        if self._next is None:
            return False
        token_id = self._end[self._next]
        mask[:] = 0
        mask[token_id // 32] = np.uint32(1 << token_id % 32)
        return True

    def accept(self, token_id: int) -> None:
        if self._progress.over:
            self._next = None
            return
        self._left -= self._progress.inside
        self._progress.feed(self._token_bytes(token_id))
        if self._next is None or token_id != self._end[self._next]:
            self._force_if_spent()
        elif self._next + 1 < len(self._end):
            self._next += 1
        else:
            self._next = None
            self._progress.over, self._progress.inside = True, False

    def _force_if_spent(self) -> None:
        progress = self._progress
        spent = self._left <= 0 and (self._left <= -MAX_REST or not progress.is_mid_character)
        self._next = 0 if progress.inside and spent and self._end else None
