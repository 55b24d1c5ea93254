"""The asyncio side of an engine process: start it, give it requests, hand each client its outputs, notice that it died,
was stopped, or hangs.

Knows nothing of HTTP or of text, nor of what is done about a death (`supervisor`).
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from octavo.core import errors
from octavo.core.config import EngineConfig
from octavo.core.errors import EngineDeadError, InvalidRequestError, OctavoError, shorten
from octavo.core.records import EngineStats, FinishReason, Request, RequestOutput
from octavo.engine.async_channel import AsyncChannel
from octavo.engine.messages import (
    Abort,
    EngineInfo,
    Failed,
    FromEngine,
    Outputs,
    Ping,
    Ready,
    Shutdown,
    Submit,
    ToEngine,
)
from octavo.engine.process import ENGINE_COMMAND, SHOW_STACKS, EngineProcess, launch_engine
from octavo.engine.stderr_lines import StderrLines

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 2.0  # how long a closing engine may finish its step before it is killed
KILLED_SECONDS = 10.0  # how long the system may take to end a killed one, which has much memory to give back
STACKS_SECONDS = 0.2  # for an engine that hangs to write where, before it is killed
LAST_WORDS_SECONDS = 0.5  # for the pipe of a dead engine to end
HEALTH_SECONDS = 0.9  # most load balancers wait a second
WATCH_SECONDS = 0.5  # between two looks at an engine that owes us something
# What most often is behind a signal that ends the engine, and what helps.
DEATHS: dict[int, str] = {
    signal.SIGBUS: "a model file was changed while it was read, or its disk has an error; check both and start again",
    signal.SIGKILL: "likely for lack of memory; try a smaller model, --max-model-len or --max-num-seqs",
}


class Observer(Protocol):
    """Is told at once what comes for a request, whether or not somebody is reading the stream."""

    def observe(self, output: RequestOutput, step_time: float) -> None:
        """Each output in order, the last one with a finish reason; ERROR if the engine dies.

        `step_time` is the engine's Clock.now() at the end of the step that it comes from, 0 if from none. A request
        that the engine refuses is not told of.
        """
        ...


@dataclass(frozen=True, slots=True)
class Death:
    """How an engine ended ("was killed by SIGSEGV"), what may be behind it, and how many requests were running."""

    how: str
    why: str
    num_requests: int


class OutputStream:
    """The outputs of one request, in order, the last one with a finish reason: an async iterator for one consumer.

    If the engine dies, the last output says FinishReason.ERROR and why. Iterating raises InvalidRequestError when the
    engine refuses the request. Abandoning it (`aclose`, `abort`, or cancelling the task that waits in it) aborts the
    request.
    """

    def __init__(self, client: EngineClient, request_id: str, observer: Observer | None) -> None:
        self._client = client
        self._request_id = request_id
        self._observer = observer
        self._outputs: deque[RequestOutput] = deque()
        self._refusal: InvalidRequestError | None = None
        self._finished = False  # nothing more will be put
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._refusal is not None:
                raise self._refusal
            if self._finished:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            except asyncio.CancelledError:
                self.abort()
                raise
            finally:
                self._waiter = None
        return self._outputs.popleft()

    async def aclose(self) -> None:
        self.abort()

    def abort(self) -> None:
        """End the request now, unless it has ended: its last output will say FinishReason.ABORT."""
        if not self._finished:
            self._client._abandon(self._request_id)
            self._put(RequestOutput(request_id=self._request_id, finish_reason=FinishReason.ABORT))

    def _put(self, output: RequestOutput, step_time: float = 0.0) -> None:
        if self._observer is not None:
            self._observer.observe(output, step_time)
        self._outputs.append(output)
        self._finished = output.finish_reason is not None
        self._wake()

    def _refuse(self, refusal: InvalidRequestError) -> None:
        self._refusal = refusal
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One running engine. `info` is what was loaded; `stats` is the newest snapshot it sent; `death` comes at its end.

    on_stats: called with each snapshot.

    engine_timeout: seconds without any progress after which an engine that has work is taken for hung; 0: never.
    """

    info: EngineInfo
    on_stats: Callable[[EngineStats], None] | None = None

    def __init__(self, process: EngineProcess, engine_timeout: float = 0.0) -> None:
        self._process = process
        self._popen = process.popen
        self._engine_timeout = engine_timeout
        self._loop = asyncio.get_running_loop()
        self._channel: AsyncChannel | None = None
        self._stderr: StderrLines | None = None
        self._ready: asyncio.Future[EngineInfo] = self._loop.create_future()
        self._streams: dict[str, OutputStream] = {}
        self._answer: asyncio.Future[None] | None = None  # of the Ping that is on its way
        self._watch_timer: asyncio.TimerHandle | None = None
        self._beats, self._still_seconds = 0, 0.0
        self._last_words: str | None = None
        self._burial: asyncio.Task[None] | None = None
        self._loaded = False
        self._closing: asyncio.Task[None] | None = None
        self.is_alive = True
        self.death: asyncio.Future[Death] = self._loop.create_future()
        self.stats = EngineStats()

    @classmethod
    async def start(
        cls, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND, engine_timeout: float = 0.0
    ) -> EngineClient:
        """Launch an engine process and wait until its model is loaded. Raises as `connect` does."""
        return await cls.connect(launch_engine(config, command), engine_timeout)

    @classmethod
    async def connect(cls, process: EngineProcess, engine_timeout: float = 0.0) -> EngineClient:
        """Wait until a launched engine is ready.

        Raises the engine's own OctavoError if it could not load, EngineDeadError if it died while loading.
        """
        client = cls(process, engine_timeout)
        try:
            if process.popen.stderr is not None:
                client._stderr = await StderrLines.read(process.popen.stderr)
            client._channel = await AsyncChannel.open(process.socket, client._receive, client._lost)
            client._watch()
            client.info = await client._ready
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def num_requests(self) -> int:
        """Requests that have not ended."""
        return len(self._streams)

    def generate(self, request: Request, observer: Observer | None = None) -> OutputStream:
        """Submit a validated request, whose id no request to this client had before, to an engine that is alive.

        An id is never used again because outputs of an aborted request may still be on their way.
        """
        assert self.is_alive
        assert request.request_id not in self._streams
        stream = OutputStream(self, request.request_id, observer)
        self._streams[request.request_id] = stream
        self._send(Submit(request))
        self._watch()
        return stream

    def abort_all(self) -> None:
        """Abort every running request; each stream ends with FinishReason.ABORT."""
        for stream in list(self._streams.values()):
            stream.abort()

    async def is_responsive(self) -> bool:
        """Whether the engine answers, or gets anything done, within HEALTH_SECONDS."""
        if self.is_alive and is_stopped(self.pid):
            self._give_up_on(STOPPED)
        if not self.is_alive:
            return False
        if self._answer is None:
            self._answer = self._loop.create_future()
            self._send(Ping())
            self._watch()
        answer, beats = self._answer, self._process.pulse.beats
        deadline = self._loop.time() + HEALTH_SECONDS
        while not answer.done() and self._loop.time() < deadline:
            await asyncio.wait((answer,), timeout=0.05)
            if self.is_alive and self._process.pulse.beats != beats:
                return True
        return self.is_alive and answer.done()

    async def close(self) -> None:
        """Abort what runs and end the engine process; kill it if it does not end by itself."""
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
        await asyncio.shield(self._closing)  # whoever gives up waiting leaves no half-closed engine behind

    async def _close(self) -> None:
        self.abort_all()
        if not self._loaded:  # it listens to nobody yet
            self._popen.kill()
        elif self.is_alive:
            self._send(Shutdown())
        if self._channel is None:
            self._process.socket.close()
        else:
            self._channel.close()
        self._end()
        if self._burial is None:
            await self._reap()
        else:
            await self._burial
        self._process.pulse.close()

    async def _reap(self) -> int | None:
        """The exit code; None if not even a killed process ends. Waits in no thread, which could not be given up."""
        for seconds in (SHUTDOWN_SECONDS, KILLED_SECONDS):
            deadline = self._loop.time() + seconds
            while (code := self._popen.poll()) is None and self._loop.time() < deadline:
                await asyncio.sleep(0.005)
            if code is not None:
                break
            self._popen.kill()
        if self._stderr is not None:  # its last words come before what we say of its end
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stderr.ended.wait(), LAST_WORDS_SECONDS)
        return code

    def _send(self, message: ToEngine) -> None:
        assert self._channel is not None
        self._channel.send(message)

    def _abandon(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if self.is_alive:
            self._send(Abort(request_id))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs, stats, refusals, step_time):
                self.stats = stats
                if self.on_stats is not None:
                    self.on_stats(stats)
                if self._answer is not None:
                    self._answer.set_result(None)
                    self._answer = None
                for refusal in refusals:
                    stream = self._streams.pop(refusal.request_id, None)
                    if stream is not None:
                        stream._refuse(InvalidRequestError(refusal.error, refusal.param, refusal.code))
                for output in outputs:
                    stream = self._streams.get(output.request_id)
                    if stream is None:  # aborted here while this output was on its way
                        continue
                    if output.finish_reason is not None:
                        del self._streams[output.request_id]
                    stream._put(output, step_time)
            case Ready(info):
                self._loaded = True
                if not self._ready.done():
                    self._ready.set_result(info)
            case Failed(kind, error):
                if self._ready.done():
                    self._last_words = f"{kind}: {shorten(error.rpartition(chr(10))[2], 200)}"
                    self._die(f"the engine failed ({kind})", None)
                else:
                    self._ready.set_exception(_loading_error(kind, error))

    # Its end

    def _lost(self) -> None:
        """The channel ended."""
        self._die("the engine process ended unexpectedly", None)

    def _give_up_on(self, state: str) -> None:
        """It lives, but in a state in which nothing can be expected of it."""
        self._die(f"the engine {state}", state)

    def _die(self, what: str, state: str | None) -> None:
        """Fail every request at once; how the process ended is found out later."""
        if not self.is_alive:
            return
        num_requests = len(self._streams)
        self._end()
        text = f"{what} while it worked on this request; the server's log says why. Try again in a moment"
        for request_id, stream in self._streams.items():
            stream._put(RequestOutput(request_id=request_id, finish_reason=FinishReason.ERROR, error=text))
        self._streams.clear()
        if self._closing is None:
            self._burial = self._loop.create_task(self._bury(state, num_requests))

    def _end(self) -> None:
        """No message is sent or expected any more."""
        self.is_alive = False
        if self._watch_timer is not None:
            self._watch_timer.cancel()
            self._watch_timer = None
        if self._answer is not None:
            self._answer.set_result(None)
            self._answer = None

    async def _bury(self, state: str | None, num_requests: int) -> None:
        assert self._channel is not None
        self._channel.close()
        if state is not None:
            self._popen.send_signal(SHOW_STACKS)
            await asyncio.sleep(STACKS_SECONDS)
            self._popen.kill()
        code = await self._reap()
        how, why = _cause(state, code, self._last_words)
        if self._loaded:
            self.death.set_result(Death(how, why, num_requests))
        elif not self._ready.done():
            self._ready.set_exception(EngineDeadError(f"the engine process {how} while it loaded the model: {why}"))

    # Its pulse

    def _watch(self) -> None:
        """Look after the engine for as long as it owes us something; an idle one is left alone."""
        if self._watch_timer is None:
            self._beats, self._still_seconds = self._process.pulse.beats, 0.0
            self._watch_timer = self._loop.call_later(WATCH_SECONDS, self._look)

    def _look(self) -> None:
        self._watch_timer = None
        if is_stopped(self.pid):
            self._give_up_on(STOPPED)
            return
        beats = self._process.pulse.beats
        # Counted in looks, not by the clock: we may have been stopped ourselves.
        self._still_seconds = self._still_seconds + WATCH_SECONDS if beats == self._beats else 0.0
        self._beats = beats
        if self._loaded and 0 < self._engine_timeout <= self._still_seconds:
            self._give_up_on(f"got nothing done for {self._engine_timeout:g} s")
        elif self._streams or self._answer is not None or not self._loaded:
            self._watch_timer = self._loop.call_later(WATCH_SECONDS, self._look)


STOPPED = "was stopped by a signal"


def is_stopped(pid: int) -> bool:
    """Whether a child is held by SIGSTOP."""
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # it has ended
        return False


def _cause(state: str | None, code: int | None, last_words: str | None) -> tuple[str, str]:
    """How and why a process ended. state: in which we killed it; code: its exit code, None if it lives still."""
    if state is not None:
        return f"{state} and was killed", "the log above shows where its threads were, if they could still say so"
    if code is None:
        return "does not end", "the system holds it in a call that cannot be interrupted, as of a broken disk"
    how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
    return how, last_words or DEATHS.get(-code, "the log above says why")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _loading_error(kind: str, text: str) -> OctavoError:
    error_class = getattr(errors, kind, None)
    if isinstance(error_class, type) and issubclass(error_class, OctavoError):
        return error_class(text)
    return EngineDeadError(f"the engine could not start: {kind}: {text}")
