"""Log-probabilities in the shapes of OpenAI's and vLLM's APIs. Knows token ids, numbers and the bytes of tokens."""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import NamedTuple, TypeVar

from msgspec import UNSET, UnsetType

from octavo.core.records import TokenLogprobs
from octavo.server.generation import Generation
from octavo.server.off_loop import aside
from octavo.server.replies import (
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    PromptLogprob,
    PromptLogprobs,
    TokenLogprob,
)

THREAD_NUMBERS = 4096  # more than these are made ready in a thread: some milliseconds
LEAST_LOGPROB = -9999.0  # JSON has no infinity; OpenAI's API uses the same floor

TokenBytes = Callable[[int], bytes]
Made = TypeVar("Made")


class TokenNames:
    """How tokens are called in a reply: by their text, or with `as_ids` as "token_id:7"."""

    def __init__(self, token_bytes: TokenBytes, *, as_ids: bool) -> None:
        self.token_bytes = token_bytes
        self._as_ids = as_ids

    def shown(self, token_id: int) -> str:
        """Its text, U+FFFD for a part of a character."""
        return f"token_id:{token_id}" if self._as_ids else self.token_bytes(token_id).decode("utf-8", "replace")

    def distinct(self, token_id: int) -> str:
        """Its text, or its bytes in hexadecimal if it is part of a character: names of two tokens differ."""
        if self._as_ids:
            return f"token_id:{token_id}"
        raw = self.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], names: TokenNames) -> ChatLogprobs:
    """One entry for each of `token_ids`, with its alternatives, best first."""

    def entry(token_id: int, logprob: float) -> tuple[str, float, list[int]]:
        return names.shown(token_id), max(logprob, LEAST_LOGPROB), list(names.token_bytes(token_id))

    return ChatLogprobs(
        [
            ChatTokenLogprob(
                *entry(token_id, of.logprob),
                [TokenLogprob(*entry(t, p)) for t, p in zip(of.top_ids, of.top_logprobs, strict=True)],
            )
            for token_id, of in zip(token_ids, logprobs, strict=True)
        ]
    )


class PlacedToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None
    offset: int  # characters of the reply before it


def completion_logprobs(tokens: Sequence[PlacedToken], names: TokenNames, num_top: int) -> CompletionLogprobs:
    """Four parallel lists; the first token of a prompt has no numbers.

    The alternatives are the best `num_top` (-1: all that there are) and always the chosen token.
    """
    result = CompletionLogprobs([], [], [], [])
    for token_id, entry, offset in tokens:
        name = names.distinct(token_id)
        result.tokens.append(name)
        result.text_offset.append(offset)
        if entry is None:
            result.token_logprobs.append(None)
            result.top_logprobs.append(None)
            continue
        chosen = max(entry.logprob, LEAST_LOGPROB)
        count = len(entry.top_ids) if num_top < 0 else num_top
        top = {
            names.distinct(t): max(p, LEAST_LOGPROB)
            for t, p in zip(entry.top_ids[:count], entry.top_logprobs, strict=False)
        }
        top.setdefault(name, chosen)
        result.token_logprobs.append(chosen)
        result.top_logprobs.append(top)
    return result


async def prompt_logprobs(
    generation: Generation, num_top: int | None, token_bytes: TokenBytes
) -> PromptLogprobs | UnsetType:
    """For each token of the prompt its numbers and those of the best `num_top` (-1: all), once they are there.

    None: they were not asked for.
    """
    if num_top is None:
        return UNSET
    token_ids, logprobs = generation.request.prompt_token_ids, generation.prompt_logprobs
    return await made_aside(lambda: _prompt_logprobs(token_ids, logprobs, num_top, token_bytes), num_numbers(logprobs))


async def made_aside(make: Callable[[], Made], size: int) -> Made:
    """What `make` makes of `size` numbers, in a thread if these are many, so that the event loop stays free."""
    return await aside(make, takes_long=size > THREAD_NUMBERS)


def num_numbers(logprobs: Sequence[TokenLogprobs]) -> int:
    return sum(1 + len(entry.top_ids) for entry in logprobs)


def _prompt_logprobs(
    token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], num_top: int, token_bytes: TokenBytes
) -> PromptLogprobs:
    shown: PromptLogprobs = [None]
    for token_id, entry in zip(token_ids[1:], logprobs, strict=False):  # an aborted request has not all
        count = len(entry.top_ids) if num_top < 0 else num_top
        numbers = {token_id: (entry.logprob, entry.rank)}
        for rank, (t, p) in enumerate(zip(entry.top_ids[:count], entry.top_logprobs, strict=False), 1):
            numbers.setdefault(t, (p, rank))
        shown.append(
            {
                t: PromptLogprob(max(p, LEAST_LOGPROB), rank, token_bytes(t).decode("utf-8", "replace"))
                for t, (p, rank) in numbers.items()
            }
        )
    return shown


def placed_prompt(
    text: str, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> list[PlacedToken]:
    """The tokens of a prompt that the reply repeats as `text`. What is not in the text, such as BOS, has no length."""
    data = text.encode("utf-8", "replace")
    count, at = _CharacterCount(), 0
    placed = []
    entries: Sequence[TokenLogprobs | None] = (None, *logprobs)
    for token_id, entry in zip_longest(token_ids, entries):  # an aborted request has not all
        placed.append(PlacedToken(token_id, entry, count.begun))
        raw = token_bytes(token_id)
        # Some tokenizers put a space before a text.
        piece = next((p for p in (raw, raw.removeprefix(b" ")) if data.startswith(p, at)), b"")
        at += len(piece)
        count.add(piece)
    return placed


class TokenPlacer:
    """Tokens of a reply with their places in its text, which begins at `start`, given out when their text has come.

    A character belongs to the token that begins it. Tokens whose text never comes, for it belonged to a stop string,
    are placed at the end.
    """

    def __init__(self, visible_bytes: TokenBytes, start: int = 0) -> None:
        self._visible_bytes = visible_bytes
        self._count = _CharacterCount(start)
        self._shown = start
        self._waiting: deque[tuple[PlacedToken, int]] = deque()  # with the end of its text

    def feed(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None, text: str, *, is_last: bool
    ) -> list[PlacedToken]:
        """The tokens that are settled, now that these have come and `text` has."""
        entries: Sequence[TokenLogprobs | None] = logprobs or [None] * len(token_ids)
        for token_id, entry in zip(token_ids, entries, strict=True):
            token = PlacedToken(token_id, entry, self._count.begun)
            self._count.add(self._visible_bytes(token_id))
            self._waiting.append((token, self._count.begun))
        self._shown += len(text)
        settled = []
        while self._waiting and (is_last or self._waiting[0][1] <= self._shown):
            token = self._waiting.popleft()[0]
            settled.append(token._replace(offset=min(token.offset, self._shown)))
        return settled


class _CharacterCount:
    """How many characters bytes have begun, as they become text: bytes that are none count as U+FFFD."""

    def __init__(self, start: int = 0) -> None:
        self._whole = start
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self.begun = start

    def add(self, data: bytes) -> None:
        self._whole += len(self._decoder.decode(data))
        self.begun = self._whole + bool(self._decoder.getstate()[0])
