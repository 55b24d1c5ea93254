"""The HTTP process's side of the grammar checker: a request's form becomes a grammar that the engine can compile.

What the checker said is kept. Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import logging
import os
import signal
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from octavo.core.errors import InvalidRequestError, OverloadedError
from octavo.core.records import StructuredOutputs
from octavo.engine.client import is_stopped
from octavo.structured.checker import COMMAND, WALL_SECONDS, Job, Setup, Verdict, frame

logger = logging.getLogger(__name__)

MAX_WAITING = 64  # different grammars that are being tried or wait for it
MAX_KEPT_BYTES = 32 << 20  # of verdicts
CLOSE_SECONDS = 2.0
LOOK_SECONDS = 0.5  # between looks at a process that owes verdicts
# In looks and not by the clock, since this process may have been stopped itself.
SILENT_LOOKS = int((WALL_SECONDS + 10) / LOOK_SECONDS)  # without a verdict, of which each is due in WALL_SECONDS


class GrammarChecker:
    """`setup`: the vocabulary. Its process starts with the first grammar and ends with `close`."""

    def __init__(self, setup: Setup, command: Sequence[str] = COMMAND) -> None:
        self._setup = setup
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._starting = asyncio.Lock()
        self._reader: asyncio.Task[None] | None = None
        self._watcher: asyncio.Task[None] | None = None  # while something is asked
        self._num_verdicts = 0
        self._numbers = itertools.count()
        self._waiting: dict[bytes, asyncio.Task[Verdict]] = {}  # by the digest of the job
        self._asked: dict[int, asyncio.Future[Verdict]] = {}  # by the number of the job
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._kept_bytes = 0

    async def grammar(self, outputs: StructuredOutputs, around: str = "") -> str:
        """`grammar_text` of them, tried. Raises InvalidRequestError, OverloadedError."""
        try:
            key = hashlib.sha256(frame(Job(outputs, around))).digest()
        except (UnicodeEncodeError, RecursionError):
            raise InvalidRequestError(
                "the form of output has half of a surrogate pair, or is nested without end: no output can have that",
                param="structured_outputs",
            ) from None
        verdict = self._kept.get(key)
        if verdict is None:
            task = self._waiting.get(key)
            if task is None:
                if len(self._waiting) >= MAX_WAITING:
                    raise OverloadedError(
                        f"{MAX_WAITING} other schemas or grammars wait to be compiled: try again in a moment"
                    )
                task = self._waiting[key] = asyncio.create_task(self._try(key, outputs, around))
            verdict = await asyncio.shield(task)
        else:
            self._kept.move_to_end(key)
        if verdict.grammar is None:
            raise InvalidRequestError(verdict.error, param="structured_outputs")
        return verdict.grammar

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            assert process.stdin is not None
            process.stdin.close()  # which it understands
            try:
                async with asyncio.timeout(CLOSE_SECONDS):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if self._reader is not None:
            await self._reader
        if self._watcher is not None:
            self._watcher.cancel()

    async def _try(self, key: bytes, outputs: StructuredOutputs, around: str) -> Verdict:
        try:
            verdict = await self._ask(Job(outputs, around, next(self._numbers)))
        finally:
            del self._waiting[key]
        self._kept[key] = verdict
        self._kept_bytes += _size(verdict)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= _size(self._kept.popitem(last=False)[1])
        return verdict

    async def _ask(self, job: Job) -> Verdict:
        async with self._starting:
            if self._process is None:  # its reader notices its end, and fails whatever it was asked
                self._process = await self._start()
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asked[job.number] = future
        assert self._process.stdin is not None
        self._process.stdin.write(frame(job))
        if self._watcher is None or self._watcher.done():
            self._watcher = asyncio.create_task(self._watch())
        return await future

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # ctrl-C in the terminal is for the parent alone
        )
        assert process.stdin is not None
        process.stdin.write(frame(self._setup))
        self._reader = asyncio.create_task(self._read(process))
        return process

    async def _watch(self) -> None:
        """Ends a process that was stopped or hangs; its reader then fails what it was asked, and another is started."""
        looks = 0
        while self._asked:
            before = self._process, self._num_verdicts
            await asyncio.sleep(LOOK_SECONDS)
            process = self._process
            looks = looks + 1 if before == (process, self._num_verdicts) else 0
            if process is None or process.returncode is not None or not self._asked:
                continue
            if is_stopped(process.pid) or looks >= SILENT_LOOKS:
                logger.warning("the process that compiles grammars stands still: it is killed and will be replaced")
                os.killpg(process.pid, signal.SIGKILL)  # with its trials: it leads its session

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        stream = process.stdout
        assert stream is not None
        try:
            while True:
                size = int.from_bytes(await stream.readexactly(4), "little")
                verdict = msgspec.msgpack.decode(await stream.readexactly(size), type=Verdict)
                self._num_verdicts += 1
                self._asked.pop(verdict.number).set_result(verdict)
        except (asyncio.IncompleteReadError, ConnectionError):  # it has ended, or was killed
            self._process = None
            for future in self._asked.values():
                future.set_exception(OverloadedError("the process that compiles grammars has ended: try again"))
            self._asked.clear()
            await process.wait()


def _size(verdict: Verdict) -> int:
    return 100 + len(verdict.grammar or "") + len(verdict.error)
