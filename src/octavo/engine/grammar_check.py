"""The HTTP process's side of the grammar checker: a request's form becomes a grammar that the engine can compile.

One process tries grammars one after the other and is started again when it had to be killed; what it said is kept.
Knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
import hashlib
import signal
from collections import OrderedDict
from collections.abc import Sequence

import msgspec

from octavo.core.errors import InvalidRequestError, OverloadedError
from octavo.core.records import StructuredOutputs
from octavo.structured.checker import COMMAND, CPU_SECONDS, MEMORY_BYTES, Job, Setup, Verdict, frame

MAX_WAITING = 64  # different grammars that wait to be tried
MAX_KEPT_BYTES = 32 << 20  # of verdicts
WALL_SECONDS = 30.0  # a job that has not ended then hangs; on a busy machine a second of work may take some


class GrammarChecker:
    """`setup`: the vocabulary. Its process starts with the first grammar and ends with `close`."""

    def __init__(self, setup: Setup, command: Sequence[str] = COMMAND) -> None:
        self._setup = setup
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._lock = asyncio.Lock()
        self._waiting: dict[bytes, asyncio.Task[Verdict]] = {}
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()
        self._kept_bytes = 0

    async def grammar(self, outputs: StructuredOutputs, around: str = "") -> str:
        """`grammar_text` of them, tried. Raises InvalidRequestError, OverloadedError."""
        try:
            job = frame(Job(outputs, around))
        except (UnicodeEncodeError, RecursionError):
            raise InvalidRequestError(
                "the form of output has half of a surrogate pair, or is nested without end: no output can have that",
                param="structured_outputs",
            ) from None
        key = hashlib.sha256(job).digest()
        verdict = self._kept.get(key)
        if verdict is None:
            task = self._waiting.get(key)
            if task is None:
                if len(self._waiting) >= MAX_WAITING:
                    raise OverloadedError(
                        f"{MAX_WAITING} other schemas or grammars wait to be compiled: try again in a moment"
                    )
                task = self._waiting[key] = asyncio.create_task(self._try(key, job))
            verdict = await asyncio.shield(task)
        else:
            self._kept.move_to_end(key)
        if verdict.grammar is None:
            raise InvalidRequestError(verdict.error, param="structured_outputs")
        return verdict.grammar

    async def close(self) -> None:
        for task in self._waiting.values():
            task.cancel()
        await self._end()

    async def _try(self, key: bytes, job: bytes) -> Verdict:
        try:
            async with self._lock:
                verdict = await self._ask(job)
        finally:
            del self._waiting[key]
        self._kept[key] = verdict
        self._kept_bytes += _size(verdict)
        while self._kept_bytes > MAX_KEPT_BYTES:
            self._kept_bytes -= _size(self._kept.popitem(last=False)[1])
        return verdict

    async def _ask(self, job: bytes) -> Verdict:
        process = self._process
        if process is None or process.returncode is not None:
            process = self._process = await self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(job)
            async with asyncio.timeout(WALL_SECONDS):
                await process.stdin.drain()
                size = int.from_bytes(await process.stdout.readexactly(4), "little")
                verdict = msgspec.msgpack.decode(await process.stdout.readexactly(size), type=Verdict)
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):
            code = await self._end()
            return Verdict(error=_cause(code))
        except BaseException:  # a cancelled job's answer must not be taken for the next one's
            await self._end()
            raise
        if verdict.last:
            await self._end()
        return verdict

    async def _start(self) -> asyncio.subprocess.Process:
        process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,  # ctrl-C in the terminal is for the parent alone
        )
        assert process.stdin is not None
        process.stdin.write(frame(self._setup))
        return process

    async def _end(self) -> int | None:
        """The exit code of the process, which is killed if it has not ended by itself."""
        process, self._process = self._process, None
        if process is None:
            return None
        try:
            async with asyncio.timeout(1.0):  # one that is about to die says why
                return await process.wait()
        except TimeoutError:
            process.kill()
            return await process.wait()


def _size(verdict: Verdict) -> int:
    return 100 + len(verdict.grammar or "") + len(verdict.error)


def _cause(code: int | None) -> str:
    if code == -signal.SIGPROF:
        what = f"more than {CPU_SECONDS:g} s to compile"
    elif code == -signal.SIGSEGV:
        what = "too deep a recursion"
    else:
        what = f"more than {WALL_SECONDS:g} s, or {MEMORY_BYTES >> 20} MiB, to compile"
    return f"this form of output takes {what}: make it smaller or simpler"
