"""Incremental text equals the text of the whole, however the bytes are cut."""

from __future__ import annotations

import random

import pytest

from octavo.tokenizer.text_stream import TextStream

WHOLE = "aé日😀\u0301👨‍👩‍👧 \U0010ffff\0".encode()
BROKEN = [
    b"\x80", b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f", b"\xe6\x97", b"\xe6A",
    b"\xf0\x9f\x98", b"\xf0\x80\x80\x80", b"\xe0\x80", b"\xc3", b"\xf5", b"\xed\x9f\xbf", b"ok",
]  # fmt: skip


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_whole_characters_only_whatever_the_pieces(size: int) -> None:
    stream = TextStream()
    pieces = [stream.feed(WHOLE[at : at + size]) for at in range(0, len(WHOLE), size)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == WHOLE.decode()
    assert stream.finish() == ""


def test_any_bytes_cut_anywhere_give_the_text_of_the_whole() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        parts = [rng.choice([rng.randbytes(rng.randrange(4)), rng.choice(BROKEN), WHOLE]) for _ in range(4)]
        data = b"".join(parts)
        stream, text, at = TextStream(), "", 0
        while at < len(data):
            step = rng.randrange(1, 6)
            text += stream.feed(data[at : at + step])
            at += step
        assert text + stream.finish() == data.decode("utf-8", "replace"), data


def test_unfinished_character_waits_and_then_becomes_a_replacement() -> None:
    stream = TextStream()
    assert stream.feed(b"x\xf0\x9f\x98") == "x"
    assert stream.feed(b"") == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_invalid_byte_is_shown_at_once() -> None:
    assert TextStream().feed(b"a\xffb") == "a\ufffdb"
