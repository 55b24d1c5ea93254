"""The process in which grammars are tried: it may take too long, too much memory, or too deep a stack, and is killed.

What compiles here, within its limits, compiles in the engine too. Started as `python -m octavo.structured.checker`, it
reads jobs from standard input and writes verdicts to standard output. Knows no requests.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from typing import BinaryIO, TypeVar

import msgspec

from octavo.core.errors import InvalidRequestError
from octavo.core.records import StructuredOutputs
from octavo.structured.compiler import GrammarCompiler
from octavo.structured.grammar import grammar_text

CPU_SECONDS = 1.0  # of one job; most take a few milliseconds
MEMORY_BYTES = 192 << 20  # of one job, beside the vocabulary
MASK_SECONDS = 0.05  # the first mask; a step waits for the slowest
MAX_KEPT_BYTES = 64 << 20  # what finished jobs may leave behind
Message = TypeVar("Message")
COMMAND = (sys.executable, "-P", "-m", "octavo.structured.checker")


class Setup(msgspec.Struct, frozen=True):
    """The first message: the fields of GrammarCompiler."""

    token_bytes: list[bytes]
    special: list[int]
    eos: list[int]
    vocab_size: int


class Job(msgspec.Struct, frozen=True):
    """The arguments of `grammar_text`."""

    outputs: StructuredOutputs
    around: str = ""


class Verdict(msgspec.Struct, frozen=True):
    """grammar: what the engine shall compile, or None with the error. last: no more jobs, this process ends."""

    grammar: str | None = None
    error: str = ""
    last: bool = False


def frame(message: msgspec.Struct) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return len(payload).to_bytes(4, "little") + payload


def judge(compiler: GrammarCompiler, job: Job) -> Verdict:
    try:
        grammar = grammar_text(job.outputs, job.around)
        matcher = compiler.compile(grammar)
    except InvalidRequestError as error:
        return Verdict(error=str(error))
    except RecursionError:
        return Verdict(error="it is nested too deeply: make it flatter")
    fresh = matcher.deep_copy()
    began = time.process_time()
    fresh.compute_bitmask()
    took = time.process_time() - began
    if took > MASK_SECONDS:
        return Verdict(
            error=f"each token of this form takes {took * 1e3:.0f} ms to find, the limit is {MASK_SECONDS * 1e3:.0f}: "
            "make it smaller"
        )
    return Verdict(grammar)


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.nice(5)
    setup = _read(sys.stdin.buffer, Setup)
    if setup is None:
        return 0
    compiler = GrammarCompiler(setup.token_bytes, setup.special, setup.eos, setup.vocab_size)
    baseline = _address_space()
    resource.setrlimit(resource.RLIMIT_AS, (baseline + MEMORY_BYTES, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (job := _read(sys.stdin.buffer, Job)) is not None:
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)  # whose signal ends the process
        verdict = judge(compiler, job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        last = _address_space() - baseline > MAX_KEPT_BYTES
        sys.stdout.buffer.write(frame(msgspec.structs.replace(verdict, last=last)))
        sys.stdout.buffer.flush()
        if last:
            break
    return 0


def _address_space() -> int:
    with open("/proc/self/statm", "rb") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


def _read(stream: BinaryIO, kind: type[Message]) -> Message | None:
    """The next message, or None at the end."""
    size = stream.read(4)
    if len(size) < 4:
        return None
    return msgspec.msgpack.decode(stream.read(int.from_bytes(size, "little")), type=kind)


if __name__ == "__main__":
    sys.exit(main())
