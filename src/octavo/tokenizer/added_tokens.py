"""Tokens that are looked for in a text before it is cut into words: special ones and those a model's makers added."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# What Unicode calls white space; Python's \s has four separators more.
_SPACES = re.compile(r"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]*")
_NOT_A_SPACE = re.compile(r"[^\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")


@dataclass(frozen=True, slots=True)
class AddedToken:
    """lstrip, rstrip: the token takes the white space before, after it. single_word: it is none inside of a word."""

    text: str
    token_id: int
    special: bool
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class AddedTokenFinder:
    """Finds the tokens in a text from left to right, the longest where several begin at one place."""

    def __init__(self, tokens: Sequence[AddedToken]) -> None:
        self._by_text: dict[str, AddedToken] = {}
        for token in tokens:
            if token.text:
                self._by_text.setdefault(token.text, token)
        # A pattern of all tokens would try them one by one, and there may be thousands. So it has only their first two
        # characters, and a dictionary has the rest: one look-up for each length that a token with this beginning has.
        lengths: dict[str, set[int]] = {}
        for text in self._by_text:
            lengths.setdefault(text[:2], set()).add(len(text))
        for beginning in lengths:
            if len(beginning) == 2 and beginning[0] in lengths:
                lengths[beginning].add(1)
        self._lengths = {beginning: sorted(sizes, reverse=True) for beginning, sizes in lengths.items()}
        beginnings = sorted(self._lengths, key=len, reverse=True)
        self._beginning = re.compile("|".join(map(re.escape, beginnings)) if beginnings else "(?!)")

    def find(self, text: str) -> Iterator[tuple[int, int, int]]:
        """(token id, start, end) of each token; the spaces that it takes lie between start and end."""
        at = 0  # the end of the token before
        look = 0
        while (candidate := self._beginning.search(text, look)) is not None:
            start = candidate.start()
            token = self._at(text, start, candidate.group())
            if token is None:
                look = start + 1
                continue
            end = look = start + len(token.text)
            if token.single_word and (_is_word(text[start - 1 : start]) or _is_word(text[end : end + 1])):
                continue
            if token.lstrip:
                while start > at and not _NOT_A_SPACE.match(text, start - 1):
                    start -= 1
            if token.rstrip:
                match = _SPACES.match(text, end)
                assert match is not None
                end = look = match.end()
            yield token.token_id, start, end
            at = end

    def _at(self, text: str, start: int, beginning: str) -> AddedToken | None:
        for length in self._lengths[beginning]:
            if (token := self._by_text.get(text[start : start + length])) is not None:
                return token
        return None


def _is_word(char: str) -> bool:
    return char.isalnum() or char == "_"
