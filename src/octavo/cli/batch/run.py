"""Sends a batch's requests to a function that answers them, many at a time, and keeps count. Knows no engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass

from octavo.cli.batch.files import RETRIED_STATUS, Entry, Reply, ReplyFile

MAX_ATTEMPTS = 5
ATTEMPTS_TOGETHER = 2  # later ones are made alone: a request that kills the engine each time takes no other with it
LONGEST_PAUSE = 10.0  # seconds between two attempts


@dataclass(slots=True)
class Counts:
    answered: int = 0
    refused: int = 0  # status 400 to 499: asking again would not help
    failed: int = 0  # 500 and above, after all attempts


async def run_batch(
    entries: Callable[[], Iterable[Entry]],
    ask: Callable[[Entry], Awaitable[Reply]],
    output: ReplyFile,
    *,
    max_concurrency: int,
    on_reply: Callable[[], None],
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> Counts:
    """Ask for every entry that has no reply yet; those that fail are asked again when all others are done.

    `entries` is called for each attempt, and read as it goes. Raises what `ask` and `output` raise.
    """
    counts = Counts()
    for attempt in range(1, MAX_ATTEMPTS + 1):
        is_last = attempt == MAX_ATTEMPTS
        concurrency = max_concurrency if attempt <= ATTEMPTS_TOGETHER else 1
        if not await _attempt(entries(), ask, output, counts, concurrency, on_reply, is_last) or is_last:
            break
        await sleep(min(2.0 ** (attempt - 1), LONGEST_PAUSE))
    return counts


async def _attempt(
    entries: Iterable[Entry],
    ask: Callable[[Entry], Awaitable[Reply]],
    output: ReplyFile,
    counts: Counts,
    concurrency: int,
    on_reply: Callable[[], None],
    is_last: bool,
) -> int:
    """Ask once for every entry that has no reply yet; how many failed. What fails at last is written too."""
    slots = asyncio.Semaphore(concurrency)
    num_failed = 0

    async def answer(entry: Entry) -> None:
        nonlocal num_failed
        try:
            reply = await ask(entry)
        finally:
            slots.release()
        if reply.status >= RETRIED_STATUS:
            num_failed += 1
            if not is_last:
                return
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
    return num_failed
