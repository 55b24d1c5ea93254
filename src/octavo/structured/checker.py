"""The process in which grammars are tried. Each is tried in a fork that may take too long, too much memory or too deep
a stack, and dies of it; the others do not notice.

What compiles here, within its limits, compiles in the engine too. Started as `python -m octavo.structured.checker`, it
reads jobs from standard input and writes verdicts to standard output, in the order in which they are ready.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import BinaryIO, TypeVar

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.records import StructuredOutputs
from octavo.structured.compiler import GrammarCompiler
from octavo.structured.grammar import grammar_text

CPU_SECONDS = 1.0  # of one job; most take a few milliseconds
MEMORY_BYTES = 192 << 20  # of one job, beside the vocabulary
WALL_SECONDS = 30.0  # a job that has not ended then hangs; on a busy machine a second of work may take some
STACK_BYTES = 8 << 20  # most systems' own limit; the engine's threads have more
MAX_AT_ONCE = 8
NICE = 5
PATIENCE = 0.1  # seconds after which a job yields to everything else
Message = TypeVar("Message")
COMMAND = (sys.executable, "-P", "-m", "octavo.structured.checker")


class Setup(msgspec.Struct, frozen=True):
    """The first message: the fields of GrammarCompiler."""

    token_bytes: list[bytes]
    special: list[int]
    eos: list[int]
    vocab_size: int


class Job(msgspec.Struct, frozen=True):
    """The arguments of `grammar_text`. `number` comes back with the verdict."""

    outputs: StructuredOutputs
    around: str = ""
    number: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """grammar: what the engine shall compile, or None with the error."""

    grammar: str | None = None
    error: str = ""
    number: int = 0


def frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(4, "little") + payload


def judge(compiler: GrammarCompiler, job: Job) -> Verdict:
    try:
        grammar = grammar_text(job.outputs, job.around)
        compiler.compile(grammar)
    except InvalidRequestError as error:
        return Verdict(error=str(error), number=job.number)
    except RecursionError:
        return Verdict(error="it is nested too deeply: make it flatter", number=job.number)
    return Verdict(grammar, number=job.number)


@dataclass(slots=True)
class _Trial:
    """A fork that tries one job and writes its verdict into a pipe."""

    pid: int
    number: int
    began: float
    is_slow: bool = False
    received: bytearray = field(default_factory=bytearray)

    def verdict(self) -> Verdict:
        """After the end of the pipe."""
        _, status = os.waitpid(self.pid, 0)
        if status == 0:
            return msgspec.msgpack.decode(self.received, type=Verdict)
        return Verdict(error=_cause(os.waitstatus_to_exitcode(status)), number=self.number)


class _Checker:
    def __init__(self, compiler: GrammarCompiler, source: BinaryIO, sink: BinaryIO) -> None:
        self._compiler = compiler
        self._source = source
        self._sink = sink
        self._waiting: deque[Job] = deque()
        self._trials: dict[int, _Trial] = {}  # by the pipe
        self._selector = selectors.DefaultSelector()
        self._selector.register(source, selectors.EVENT_READ)

    def run(self) -> None:
        """Until there is nobody who asks."""
        while True:
            for key, _ in self._selector.select(PATIENCE if self._trials else None):
                if key.fileobj is not self._source:
                    self._receive(key.fd)
                elif (job := _read(self._source, Job)) is not None:
                    self._waiting.append(job)
                else:
                    for trial in self._trials.values():
                        os.kill(trial.pid, signal.SIGKILL)
                    return
            while self._waiting and len(self._trials) < MAX_AT_ONCE:
                self._begin(self._waiting.popleft())
            self._hurry()

    def _begin(self, job: Job) -> None:
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            _try(self._compiler, job, theirs)
        os.close(theirs)
        self._trials[ours] = _Trial(pid, job.number, time.monotonic())
        self._selector.register(ours, selectors.EVENT_READ)

    def _receive(self, pipe: int) -> None:
        trial = self._trials[pipe]
        if data := os.read(pipe, 1 << 16):
            trial.received += data
            return
        self._selector.unregister(pipe)
        os.close(pipe)
        del self._trials[pipe]
        self._sink.write(frame(trial.verdict()))
        self._sink.flush()

    def _hurry(self) -> None:
        now = time.monotonic()
        for trial in self._trials.values():
            if now - trial.began > WALL_SECONDS:
                os.kill(trial.pid, signal.SIGKILL)
            elif now - trial.began > PATIENCE and not trial.is_slow:
                trial.is_slow = True
                with suppress(ProcessLookupError):
                    os.setpriority(os.PRIO_PROCESS, trial.pid, 19)


def _try(compiler: GrammarCompiler, job: Job, pipe: int) -> None:
    """The life of a fork."""
    status = 1
    try:
        for inherited in (0, 1):  # whoever reads there shall see the end of our parent, not ours
            os.close(inherited)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        most = resource.getrlimit(resource.RLIMIT_STACK)[1]
        resource.setrlimit(resource.RLIMIT_STACK, (STACK_BYTES if most < 0 else min(STACK_BYTES, most), most))
        resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY_BYTES, resource.RLIM_INFINITY))
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # whose signal ends the process
        verdict = judge(compiler, job)
        with open(pipe, "wb") as file:
            file.write(msgspec.msgpack.encode(verdict))
        status = 0
    finally:
        os._exit(status)


def _cause(code: int) -> str:
    if code == -signal.SIGPROF:
        what = f"more than {CPU_SECONDS:g} s to compile"
    elif code == -signal.SIGSEGV:
        what = "too deep a recursion"
    else:
        what = f"more than {WALL_SECONDS:g} s, or {MEMORY_BYTES >> 20} MiB, to compile"
    return f"this form of output takes {what}: make it smaller or simpler"


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _read(stream: BinaryIO, kind: type[Message]) -> Message | None:
    """The next message, or None at the end."""
    size = _exactly(stream, 4)
    payload = None if size is None else _exactly(stream, int.from_bytes(size, "little"))
    return None if payload is None else msgspec.msgpack.decode(payload, type=kind)


def _exactly(stream: BinaryIO, size: int) -> bytes | None:
    data = bytearray()
    while len(data) < size:
        chunk = stream.read(size - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(NICE)
    source = open(sys.stdin.fileno(), "rb", buffering=0, closefd=False)  # noqa: SIM115 - unbuffered, for the selector
    setup = _read(source, Setup)
    if setup is not None:
        compiler = GrammarCompiler(setup.token_bytes, setup.special, setup.eos, setup.vocab_size)
        _Checker(compiler, source, sys.stdout.buffer).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
