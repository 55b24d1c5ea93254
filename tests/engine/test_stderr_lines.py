from __future__ import annotations

import asyncio
import os

import pytest

from octavo.engine.stderr_lines import MAX_LINE_BYTES, StderrLines


def logged(caplog: pytest.LogCaptureFixture, *pieces: bytes) -> list[str]:
    """What is logged of pieces that come one after the other before the pipe ends."""

    async def scenario() -> None:
        reading, writing = os.pipe()
        lines = await StderrLines.read(os.fdopen(reading, "rb"))
        for piece in pieces:
            os.write(writing, piece)
            await asyncio.sleep(0.01)
        os.close(writing)
        await asyncio.wait_for(lines.ended.wait(), 5)

    asyncio.run(scenario())
    return [record.getMessage() for record in caplog.records if record.name == "octavo.engine"]


def test_lines_come_whole_and_the_last_one_needs_no_end(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, b"one\ntw", b"o %d\n\n  three") == ["one", "two %d", "  three"]


def test_what_is_no_text_is_shown_as_well_as_can_be(caplog: pytest.LogCaptureFixture) -> None:
    assert logged(caplog, b"\xff\xe2\x82\xac\n") == ["\ufffd\u20ac"]


def test_a_line_without_end_is_cut(caplog: pytest.LogCaptureFixture) -> None:
    messages = logged(caplog, b"x" * (MAX_LINE_BYTES + 1), b"y")
    assert messages == ["x" * (MAX_LINE_BYTES + 1), "y"]
