"""Where tokens are in a text, whatever was cut off or held back."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from octavo.core.records import TokenLogprobs
from octavo.server.logprobs import (
    LEAST_LOGPROB,
    THREAD_NUMBERS,
    TokenNames,
    TokenPlacer,
    chat_logprobs,
    completion_logprobs,
    made_aside,
    placed_prompt,
)

TOKENS = [b"a", b"bc", b"\xc3", b"\xa9", b"\xf0\x9f", b"\x98\x80", b"\xa9", b"", b" the", b"<s>"]


def token_bytes(token_id: int) -> bytes:
    return TOKENS[token_id]


def placed(*news: tuple[list[int], str]) -> list[list[tuple[int, int]]]:
    """What a placer tells after each piece of news: (token id, offset)."""
    placer = TokenPlacer(token_bytes)
    return [
        [(t.token_id, t.offset) for t in placer.feed(ids, None, text, is_last=i == len(news) - 1)]
        for i, (ids, text) in enumerate(news)
    ]


def test_tokens_come_with_their_text() -> None:
    assert placed(([0], "a"), ([1], "bc"), ([0], "a")) == [[(0, 0)], [(1, 1)], [(0, 3)]]


def test_tokens_wait_for_text_that_is_held_back() -> None:
    assert placed(([0], ""), ([1], "a"), ([7], "bca"), ([0], "a")) == [[], [(0, 0)], [(1, 1), (7, 3)], [(0, 3)]]


def test_tokens_whose_text_was_cut_off_are_at_the_end() -> None:
    assert placed(([0], "a"), ([1], ""), ([0], "b")) == [[(0, 0)], [], [(1, 1), (0, 2)]]
    assert placed(([0, 1], "a"), ([0, 0], "")) == [[(0, 0)], [(1, 1), (0, 1), (0, 1)]]


def test_a_character_belongs_to_the_token_that_begins_it() -> None:
    assert placed(([2], ""), ([3], "é"), ([4], ""), ([5], "😀"), ([0], "a")) == [
        [],
        [(2, 0), (3, 1)],
        [],
        [(4, 1), (5, 2)],
        [(0, 2)],
    ]


def test_bytes_that_are_no_text_count_as_the_characters_that_they_become() -> None:
    # A stray continuation byte is one U+FFFD, and so is a character that was begun and never ended.
    assert placed(([6], "\ufffd"), ([4], ""), ([0], "\ufffda")) == [[(6, 0)], [], [(4, 1), (0, 2)]]


@pytest.mark.parametrize(
    ("text", "ids", "offsets"),
    [
        ("abca", [0, 1, 0], [0, 1, 3]),
        ("abc", [9, 0, 1], [0, 0, 1]),  # BOS is not in the text
        ("the a", [8, 0], [0, 3]),  # a space that the tokenizer put there
        ("éa", [2, 3, 0], [0, 1, 1]),
    ],
)
def test_tokens_of_a_prompt_are_found_in_its_text(text: str, ids: list[int], offsets: list[int]) -> None:
    entry = TokenLogprobs(-1.0, 1, [], [])
    found = placed_prompt(text, ids, [entry] * (len(ids) - 1), token_bytes)
    assert [t.offset for t in found] == offsets
    assert [t.logprobs for t in found] == [None] + [entry] * (len(ids) - 1)


def test_many_numbers_are_made_in_a_thread_and_few_are_not() -> None:
    def made(size: int) -> threading.Thread:
        return asyncio.run(made_aside(threading.current_thread, size))

    assert made(THREAD_NUMBERS) is threading.current_thread()
    assert made(THREAD_NUMBERS + 1) is not threading.current_thread()


def test_no_number_is_infinite_and_no_two_tokens_share_a_name() -> None:
    entry: Any = TokenLogprobs(float("-inf"), 9, [2, 4], [-0.5, float("-inf")])
    placer = TokenPlacer(token_bytes)
    tokens = placer.feed([0], [entry], "a", is_last=True)
    names = TokenNames(token_bytes, as_ids=False)
    told = completion_logprobs(tokens, names, 2)
    assert told.token_logprobs == [LEAST_LOGPROB]
    assert told.top_logprobs == [{"bytes:\\xc3": -0.5, "bytes:\\xf0\\x9f": LEAST_LOGPROB, "a": LEAST_LOGPROB}]
    (of_chat,) = chat_logprobs([2], [entry], names).content
    assert (of_chat.token, of_chat.bytes, of_chat.logprob) == ("\ufffd", [0xC3], LEAST_LOGPROB)
