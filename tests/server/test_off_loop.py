"""What is long or large is worked on beside the event loop."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from octavo.server.off_loop import THREAD_CHARACTERS, THREAD_VALUES, is_large, off_loop

TURN = {"role": "user", "content": "a"}


@pytest.mark.parametrize(
    ("values", "large"),
    [
        ((), False),
        (([TURN] * 20, [], {}), False),
        (([TURN] * THREAD_VALUES,), True),
        (([{"role": "user", "content": [{"type": "text", "text": "a"}] * THREAD_VALUES}],), True),
        (([TURN], [{"function": {"parameters": {str(i): i for i in range(THREAD_VALUES)}}}]), True),
        (([{"role": "user", "content": "a" * 1000 * (THREAD_VALUES + 1)}],), True),
        (([{"role": "user", "content": "a" * 100_000}],), False),
    ],
)
def test_a_conversation_is_large_by_its_values_or_its_text(values: tuple[Any, ...], large: bool) -> None:
    assert is_large(*values) is large


@pytest.mark.parametrize("num_characters", [THREAD_CHARACTERS, THREAD_CHARACTERS + 1, 1 << 20])
def test_work_on_a_long_text_is_done_in_a_thread(num_characters: int) -> None:
    worker = asyncio.run(off_loop(threading.current_thread, num_characters))
    assert (worker is threading.main_thread()) == (num_characters <= THREAD_CHARACTERS)
