"""Sends a batch's requests to a function that answers them, many at a time, and keeps count. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from octavo.cli.batch.files import RETRIED_STATUS, Entry, Reply, ReplyFile

MAX_ATTEMPTS = 5
LONGEST_PAUSE = 10.0  # seconds between two attempts


@dataclass(slots=True)
class Counts:
    answered: int = 0
    refused: int = 0  # status 400 to 499: asking again would not help
    failed: int = 0  # 500 and above, after all attempts


async def run_batch(
    entries: Iterable[Entry],
    ask: Callable[[Entry], Awaitable[Reply]],
    output: ReplyFile,
    *,
    max_concurrency: int,
    on_reply: Callable[[], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Counts:
    """Ask for every entry that has no reply yet. `entries` is read as it goes. Raises what `ask` and `output` raise."""
    counts = Counts()
    slots = asyncio.Semaphore(max_concurrency)

    async def answer(entry: Entry) -> None:
        try:
            for attempt in range(MAX_ATTEMPTS):
                if attempt:
                    await sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE))
                reply = await ask(entry)
                if reply.status < RETRIED_STATUS:
                    break
        finally:
            slots.release()
        output.append(entry, reply)
        counts.answered += reply.status < 400
        counts.refused += 400 <= reply.status < RETRIED_STATUS
        counts.failed += reply.status >= RETRIED_STATUS
        on_reply()

    try:
        async with asyncio.TaskGroup() as tasks:
            for entry in entries:
                if entry.custom_id not in output.done:
                    await slots.acquire()
                    tasks.create_task(answer(entry))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return counts
