"""Grammars at work in the engine: which tokens may come next in each sequence that has one.

Grammars compile in one thread and masks are made in another, both without the interpreter lock, while the engine
computes. Knows neither requests nor the model; a constraint is what `runner.constraint` asks for.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from octavo.core.errors import InvalidRequestError
from octavo.structured.compiler import GrammarCompiler, plain

if TYPE_CHECKING:
    from llguidance import LLMatcher

Mask = NDArray[np.uint32]  # [ceil(vocab_size / 32)]

STACK_BYTES = 64 << 20  # of each thread: more than the checker's, so what passed there passes here
END_SECONDS = 5.0  # for a thread to end what it is doing; a compilation that the checker let through takes one


class Constraint:
    """One sequence held to a grammar. ready: it may be scheduled. error: why its output cannot go on, or None.

    Once it is ready, `error` changes in `fill` alone: which token is the last does not depend on how soon a mask fails.
    """

    def __init__(self, worker: _Worker, vocab_size: int, banned: Sequence[int]) -> None:
        """banned: ids that do not come while the grammar allows others."""
        self.ready = threading.Event()
        self.error: str | None = None
        self._worker = worker
        self._mask: Mask = np.zeros(-(-vocab_size // 32), np.uint32)
        self._banned: Mask = np.zeros_like(self._mask)
        for token_id in banned:
            self._banned[token_id // 32] |= np.uint32(1 << token_id % 32)
        self._matcher: LLMatcher | None = None
        self._mask_error: str | None = None  # why there is no mask
        self._done = threading.Event()

    def begin(self, matcher: LLMatcher) -> None:
        """Called once, with a matcher of this sequence's own, by whichever thread has it."""
        self._matcher = matcher
        self._worker.put(self._make_mask)
        self.ready.set()

    def refuse(self, error: str) -> None:
        """There will be no matcher."""
        self.error = error
        self.ready.set()

    def close(self) -> None:
        """Nobody will ask again: the matcher's memory goes as soon as no thread is at it."""
        if self.ready.is_set() and self.error is None:
            self._worker.put(self._drop)

    def fill(self, mask: Mask) -> bool:
        """Waits for the mask. False with an error: the token that comes does not count."""
        self._done.wait()
        self.error = self._mask_error
        if self.error is not None:
            return False
        mask[:] = self._mask
        return True

    def accept(self, token_id: int) -> None:
        if self.error is None:
            self._done.clear()
            self._worker.put(lambda: self._make_mask(token_id))

    def _drop(self) -> None:
        self._matcher = None

    def _make_mask(self, token_id: int | None = None) -> None:
        """The mask after one more token, or the first."""
        matcher = self._matcher
        assert matcher is not None
        try:
            if token_id is not None:
                matcher.consume_token(token_id)
            if not matcher.is_error():
                matcher.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
            if matcher.is_error():
                self._mask_error = f"the output cannot go on in its form: {plain(matcher.get_error())}"
            elif self._banned.any():
                rest = self._mask & ~self._banned
                if rest.any():
                    self._mask[:] = rest
        except BaseException as error:  # a panic of llguidance is no Exception; the request that waits must hear of it
            self._mask_error = f"the output cannot go on in its form: {_broken(error)}"
        finally:
            self._done.set()


class Grammars:
    """All grammars of one engine. Its threads start with the first one.

    They end with `close`, with this object, or with the interpreter: a thread that outlived it would keep what it was
    doing, and with that the engine, beyond the end of the native module.
    """

    def __init__(self, make_compiler: Callable[[], GrammarCompiler], vocab_size: int) -> None:
        self._make_compiler = make_compiler
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None  # of the compiling thread
        self._compiling = _Worker("octavo-grammars", STACK_BYTES)
        self._masking = _Worker("octavo-masks", STACK_BYTES)
        self.close = weakref.finalize(self, _close_all, self._compiling, self._masking)

    def constrain(self, grammar: str, banned: Sequence[int] = ()) -> Constraint:
        """A constraint that gets ready soon."""
        constraint = Constraint(self._masking, self._vocab_size, banned)
        self._compiling.put(lambda: self._begin(constraint, grammar))
        return constraint

    def _begin(self, constraint: Constraint, grammar: str) -> None:
        try:
            if self._compiler is None:
                self._compiler = self._make_compiler()
            # Each time anew: copies of a matcher share its lexer, so its limits and what it has learnt, and a request
            # could end otherwise than alone. Most take 1 to 15 ms.
            constraint.begin(self._compiler.compile(grammar))
        except InvalidRequestError as error:
            constraint.refuse(str(error))
        except BaseException as error:  # a panic of llguidance is no Exception
            constraint.refuse(f"the output cannot be held to this form: {_broken(error)}")


class _Worker:
    """A thread that does one thing after the other. It starts with the first."""

    def __init__(self, name: str, stack_bytes: int) -> None:
        self._name = name
        self._stack_bytes = stack_bytes
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, job: Callable[[], None]) -> None:
        if self._thread is None:
            before = threading.stack_size(self._stack_bytes)
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
            threading.stack_size(before)
        self._jobs.put(job)

    def close(self) -> None:
        """What has not begun is left undone."""
        with suppress(Empty):
            while True:
                self._jobs.get_nowait()
        self._jobs.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_SECONDS)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
            del job  # which may hold the whole engine


def _broken(error: BaseException) -> str:
    return f"octavo's grammars fail on it ({type(error).__name__}); make it simpler"


def _close_all(*workers: _Worker) -> None:
    for worker in workers:
        worker.close()
