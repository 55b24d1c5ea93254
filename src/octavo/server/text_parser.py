"""What parsers of a model's text are made of: text that arrives in pieces, and the events that it turns out to be.

A parser is a generator that reads characters and pauses where the text stops. So it is written as if it had the whole
text, and what it finds cannot depend on where the text was cut. Knows no format and no reply.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")
Pausing = Generator[None, None, T]  # a part of a parser that gives a T; each pause is a wait for more text
Put = Callable[[str], None]  # where text goes as it comes


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A tool call begins. `index` counts the calls of an answer from 0. id: "" if the model does not say one."""

    index: int
    name: str
    id: str = ""


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments, which are JSON text as a whole."""

    index: int
    text: str


Event = Content | Reasoning | CallStart | CallArguments

_SPACE = re.compile(r"\s*")
_ANYTHING = re.compile(r".*", re.DOTALL)


class TextParser(ABC):
    """Feed it text, then finish it. The events of all calls, texts joined, are the same however the text was cut."""

    def __init__(self) -> None:
        self.events: list[Event] = []  # of the call that runs
        self._text = ""
        self._at = 0  # what comes before in _text has been taken
        self._taken: list[str] = []  # since _mark or _release
        self._ended = False
        self._reading = self._read()

    @abstractmethod
    def _read(self) -> Pausing[None]:
        """Read to the end of the text."""

    def feed(self, text: str) -> list[Event]:
        self._text = self._text[self._at :] + text
        self._at = 0
        return self._run()

    def finish(self) -> list[Event]:
        """The text ends here. Not to be fed again."""
        self._ended = True
        return self._run()

    def _run(self) -> list[Event]:
        self.events = []
        next(self._reading, None)
        return self.events

    # -- for the generators --------------------------------------------------------------------------------------------

    def _more(self) -> Pausing[bool]:
        """Wait until there may be more text; False if there never will."""
        if self._ended:
            return False
        yield
        return True

    def _peek(self) -> Pausing[str]:
        """The next character, which is not taken; "" at the end."""
        while self._at == len(self._text):
            if not (yield from self._more()):
                return ""
        return self._text[self._at]

    def _follows(self, *tags: str) -> Pausing[str]:
        """Which of `tags` comes next, which is not taken; "" if none does."""
        longest = max(map(len, tags))
        while True:
            rest = self._text[self._at : self._at + longest]
            for tag in tags:
                if rest.startswith(tag):
                    return tag
            if not any(tag.startswith(rest) for tag in tags) or not (yield from self._more()):
                return ""

    def _took(self, *tags: str) -> Pausing[bool]:
        """Does one of `tags` come next? Then it is taken."""
        tag = yield from self._follows(*tags)
        self._take(len(tag))
        return bool(tag)

    def _take(self, count: int) -> str:
        """The next `count` characters, which must be there."""
        text = self._text[self._at : self._at + count]
        self._at += len(text)
        self._taken.append(text)
        return text

    def _mark(self) -> None:
        """What was taken until here is settled."""
        self._taken.clear()

    def _release(self) -> str:
        """All that was taken since the mark."""
        text = "".join(self._taken)
        self._taken.clear()
        return text

    def _pass(self, pattern: re.Pattern[str], put: Put) -> Pausing[None]:
        """Take what matches `pattern`, a run of single characters, and put it as it comes."""
        while True:
            match = pattern.match(self._text, self._at)
            if match is not None and match[0]:
                put(self._take(len(match[0])))
            if self._at < len(self._text) or not (yield from self._more()):
                return

    def _run_of(self, pattern: re.Pattern[str]) -> Pausing[str]:
        """All that matches `pattern`, a run of single characters."""
        parts: list[str] = []
        yield from self._pass(pattern, parts.append)
        return "".join(parts)

    def _skip_space(self) -> Pausing[None]:
        yield from self._run_of(_SPACE)

    def _pass_rest(self, put: Put) -> Pausing[None]:
        yield from self._pass(_ANYTHING, put)

    def _pass_until(self, tags: tuple[str, ...], put: Put) -> Pausing[str]:
        """Put all text before the first of `tags` as soon as it cannot be the tag's beginning.

        The tag is taken, with the mark before it, and returned; "" at the end of the text.
        """
        pattern = _one_of(tags)
        while True:
            found = pattern.search(self._text, self._at)
            size = (len(self._text) if found is None else found.start()) - self._at
            if found is None and not self._ended:
                size -= _unfinished(self._text[self._at :], tags)
            if size:
                put(self._take(size))
            self._mark()
            if found is not None:
                return self._take(len(found[0]))
            if not (yield from self._more()):
                return ""


@lru_cache(maxsize=64)
def _one_of(tags: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, tags)))


def _unfinished(text: str, tags: tuple[str, ...]) -> int:
    """The number of characters at the end of `text` that may be the beginning of a tag."""
    return max(
        (n for tag in tags for n in range(1, min(len(tag), len(text) + 1)) if text.endswith(tag[:n])),
        default=0,
    )
