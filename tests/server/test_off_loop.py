from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from typing import Any

import pytest

from octavo.server.off_loop import THREAD_CHARACTERS, THREAD_VALUES, is_large, off_loop
from tests.server.harness import ENVIRONMENT

TURN = {"role": "user", "content": "a"}


# In a process of its own: what other tests left behind comes and goes.
MEMORY_PROGRAM = """
import asyncio
from octavo.core.config import EngineConfig
from octavo.engine.model_location import locate_model
from octavo.engine.text_side import load_text_side
from octavo.server.off_loop import off_loop

def own_memory():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))

tokenizer = load_text_side(locate_model(EngineConfig())).tokenizer
text = " ".join(f"{i:x}ab" for i in range(20_000))

async def at_once(times):
    await asyncio.gather(*(off_loop(lambda: len(tokenizer.encode(text)), len(text)) for _ in range(times)))

asyncio.run(at_once(1))  # the tokenizer's cache is full now
before = own_memory()
asyncio.run(at_once(6))
print(own_memory() - before)
"""


def test_short_work_stays_on_the_loop_and_long_work_leaves_it() -> None:
    async def threads() -> list[bool]:
        here = threading.get_ident()
        sizes = (THREAD_CHARACTERS, THREAD_CHARACTERS + 1, 10**6)
        return [await off_loop(threading.get_ident, size) == here for size in sizes]

    assert asyncio.run(threads()) == [True, False, False]


@pytest.mark.parametrize("size", [1, 10**6])
def test_what_the_work_raises_comes_through(size: int) -> None:
    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError):
        asyncio.run(off_loop(work, size))


def test_long_texts_in_many_threads_leave_no_memory_behind() -> None:
    done = subprocess.run([sys.executable, "-c", MEMORY_PROGRAM], capture_output=True, text=True, env=ENVIRONMENT)
    assert int(done.stdout) < 60e6, done.stderr  # twice as much stays if it is not given back


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
