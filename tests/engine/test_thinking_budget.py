"""Reasoning in an output of byte-like tokens: where it is, and how a budget ends it."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.core.records import ReasoningTags
from octavo.engine.reasoning import ReasoningProgress, ThinkingBudget
from octavo.runner.constraint import mask_words

VOCAB_SIZE = 300
THINK = ReasoningTags(starts=("<think>", "[T]"), ends=("</think>", "[/T]"), is_open=False, end_token_ids=(280, 290))
OPEN = ReasoningTags(starts=THINK.starts, ends=THINK.ends, is_open=True, end_token_ids=THINK.end_token_ids)
NEVER = ReasoningTags(starts=(), ends=THINK.ends, is_open=False, end_token_ids=THINK.end_token_ids)
TOKENS = {280: b"</thi", 290: b"nk>"}


def token_bytes(token_id: int) -> bytes:
    return TOKENS.get(token_id, bytes([token_id % 256]))


def states(tags: ReasoningTags, text: bytes) -> str:
    """After each byte: . before, i inside, a after."""
    progress = ReasoningProgress(tags)
    shown = ""
    for byte in text:
        progress.feed(bytes([byte]))
        assert not (progress.inside and progress.over)
        shown += "i" if progress.inside else "a" if progress.over else "."
    return shown


@pytest.mark.parametrize(
    ("tags", "text", "expected"),
    [
        (THINK, b"\n <think>a</think>b", "........iiiiiiiiiaa"),
        (THINK, b"[T][/T]", "..iiiia"),
        (THINK, b"<thing", ".....a"),
        (THINK, b"x<think>", "aaaaaaaa"),
        (OPEN, b"a</thin</think>", "iiiiiiiiiiiiiia"),
        (OPEN, b"<think>[/T]<think>", "iiiiiiiiiiaaaaaaaa"),
        (NEVER, b"<think>", "aaaaaaa"),
    ],
)
def test_reasoning_is_found_byte_by_byte_and_in_one_piece(tags: ReasoningTags, text: bytes, expected: str) -> None:
    assert states(tags, text) == expected
    whole = ReasoningProgress(tags)
    whole.feed(text)
    assert ("i" if whole.inside else "a" if whole.over else ".") == expected[-1]


def answer(budget: int, tags: ReasoningTags, wish: bytes) -> list[int]:
    """The tokens of a model that writes `wish`, but for what is forced upon it."""
    constraint = ThinkingBudget(budget, tags, token_bytes)
    tokens: list[int] = []
    for byte in wish:
        mask = np.full(mask_words(VOCAB_SIZE), 77, np.uint32)
        if constraint.fill(mask):
            (token,) = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        else:
            token = byte
        constraint.accept(int(token))
        tokens.append(int(token))
    return tokens


def test_a_spent_budget_forces_the_end_and_then_the_answer_is_free() -> None:
    assert answer(3, OPEN, b"abcdefgh") == [*b"abc", 280, 290, *b"fgh"]
    assert answer(0, OPEN, b"abcd") == [280, 290, *b"cd"]


@pytest.mark.parametrize("text", ["é", "€", "😀"])
@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5])
def test_a_character_that_the_budget_cuts_is_finished_first(text: str, budget: int) -> None:
    data = text.encode()
    begun = -(-(budget - 1) // len(data)) * len(data)
    assert answer(budget, OPEN, b"a" + data * 9)[: begun + 3] == [*b"a", *(data * 9)[:begun], 280, 290]


def test_bytes_that_are_no_characters_do_not_put_the_end_off() -> None:
    assert answer(2, OPEN, b"\xf0" * 9) == [*b"\xf0" * 5, 280, 290, *b"\xf0" * 2]


def test_an_end_that_something_else_forbids_is_tried_again() -> None:
    constraint = ThinkingBudget(1, OPEN, token_bytes)
    for token in (97, 98, 280, 99, 280):
        constraint.accept(token)
    mask = np.zeros(mask_words(VOCAB_SIZE), np.uint32)
    assert constraint.fill(mask)
    assert np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist() == [290]
    constraint.accept(290)
    assert not constraint.fill(mask)


def test_only_reasoning_counts() -> None:
    assert answer(2, THINK, b"\n\n[T]abcdefg") == [*b"\n\n[T]ab", 280, 290, *b"efg"]
    assert answer(0, THINK, b"[T]abc") == [*b"[T]", 280, 290, *b"c"]
    assert answer(2, THINK, b"abcdef") == [*b"abcdef"]
    assert answer(0, NEVER, b"abcdef") == [*b"abcdef"]


def test_reasoning_that_ends_in_time_is_left_alone() -> None:
    assert answer(5, OPEN, b"a[/T]bcdefghi") == [*b"a[/T]bcdefghi"]
    assert answer(4, OPEN, b"a[/T]bcdef") == [*b"a[/T", 280, 290, *b"cdef"]
