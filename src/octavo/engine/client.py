"""The asyncio side of an engine process: start it, give it requests, hand each client its outputs, notice its death.

Knows nothing of HTTP or of text.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import subprocess
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from octavo.core import errors
from octavo.core.config import EngineConfig
from octavo.core.errors import EngineDeadError, InvalidRequestError, OctavoError
from octavo.core.records import EngineStats, FinishReason, Request, RequestOutput
from octavo.engine.async_channel import AsyncChannel
from octavo.engine.messages import Abort, EngineInfo, Failed, FromEngine, Outputs, Ready, Shutdown, Submit
from octavo.engine.process import ENGINE_COMMAND, EngineProcess, launch_engine

logger = logging.getLogger(__name__)

SHUTDOWN_SECONDS = 2.0  # how long a closing engine may finish its step before it is killed
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


class OutputStream:
    """The outputs of one request, in order, the last one with a finish reason: an async iterator for one consumer.

    Iterating raises EngineDeadError when the engine dies and InvalidRequestError when the engine refuses the request.
    Abandoning it (`aclose`, `abort`, or cancelling the task that waits in it) aborts the request.
    """

    def __init__(self, client: EngineClient, request_id: str, observer: Observer | None) -> None:
        self._client = client
        self._request_id = request_id
        self._observer = observer
        self._outputs: deque[RequestOutput] = deque()
        self._error: OctavoError | None = None
        self._finished = False  # nothing more will be put
        self._waiter: asyncio.Future[None] | None = None

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> RequestOutput:
        while not self._outputs:
            if self._error is not None:
                raise self._error
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

    def _fail(self, error: OctavoError) -> None:
        if self._observer is not None and not isinstance(error, InvalidRequestError):
            self._observer.observe(RequestOutput(request_id=self._request_id, finish_reason=FinishReason.ERROR), 0.0)
        self._error = error
        self._finished = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """One running engine. `info` is what was loaded; `stats` is the newest snapshot it sent.

    `on_stats`, if set, is called with each snapshot.
    """

    info: EngineInfo
    on_stats: Callable[[EngineStats], None] | None = None

    def __init__(self, process: EngineProcess) -> None:
        self._popen = process.popen
        self._channel: AsyncChannel
        self._ready: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._streams: dict[str, OutputStream] = {}
        self._death: EngineDeadError | None = None
        self._death_report: asyncio.Task[None] | None = None
        self._loaded = False
        self._closing = False
        self.stats = EngineStats()
        self._past_stats = EngineStats()  # of engines that ended: only its totals count

    @classmethod
    async def start(cls, config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> EngineClient:
        """Launch an engine process and wait until its model is loaded. Raises as `connect` does."""
        return await cls.connect(launch_engine(config, command))

    @classmethod
    async def connect(cls, process: EngineProcess) -> EngineClient:
        """Wait until a launched engine is ready.

        Raises the engine's own OctavoError if it could not load, EngineDeadError if it died while loading.
        """
        client = cls(process)
        client._channel = await AsyncChannel.open(process.socket, client._receive, client._lost)
        try:
            client.info = await client._ready
        except BaseException:
            await client.close()
            raise
        return client

    @property
    def is_alive(self) -> bool:
        return self._death is None

    @property
    def pid(self) -> int:
        return self._popen.pid

    @property
    def totals(self) -> EngineStats:
        """`stats`, with totals since the first engine started."""
        return self.stats.with_totals_of(self._past_stats)

    def generate(self, request: Request, observer: Observer | None = None) -> OutputStream:
        """Submit a validated request, whose id no request to this client had before. Raises EngineDeadError.

        An id is never used again because outputs of an aborted request may still be on their way.
        """
        if self._death is not None:
            raise self._death
        assert request.request_id not in self._streams
        stream = OutputStream(self, request.request_id, observer)
        self._streams[request.request_id] = stream
        self._channel.send(Submit(request))
        return stream

    def abort_all(self) -> None:
        """Abort every running request; each stream ends with FinishReason.ABORT."""
        for stream in list(self._streams.values()):
            stream.abort()

    async def close(self) -> None:
        """Abort what runs and end the engine process; kill it if it does not end by itself."""
        if self._closing:
            return
        self._closing = True
        self.abort_all()
        if not self._loaded:  # it listens to nobody yet
            self._popen.kill()
        elif self._death is None:
            self._channel.send(Shutdown())
        self._channel.close()
        await asyncio.to_thread(self._reap)

    def _reap(self) -> int:
        try:
            return self._popen.wait(SHUTDOWN_SECONDS)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            return self._popen.wait()

    def _abandon(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        if self._death is None:
            self._channel.send(Abort(request_id))

    def _receive(self, message: FromEngine) -> None:
        match message:
            case Outputs(outputs, stats, refusals, step_time):
                if stats is not None:
                    self.stats = stats
                    if self.on_stats is not None:
                        self.on_stats(stats)
                for refusal in refusals:
                    stream = self._streams.pop(refusal.request_id, None)
                    if stream is not None:
                        stream._fail(InvalidRequestError(refusal.error, refusal.param, refusal.code))
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
                if not self._ready.done():
                    self._ready.set_exception(_loading_error(kind, error))

    def _lost(self) -> None:
        """The channel ended: unless we closed it, the engine is dead."""
        self._past_stats = self.totals
        self.stats = EngineStats(num_blocks=self.stats.num_blocks)
        self._death = EngineDeadError(
            "the engine process ended unexpectedly; its log (standard error) says why. Start the server again"
        )
        if not self._closing and (self._loaded or not self._ready.done()):
            self._death_report = asyncio.create_task(self._report_death())
        for stream in self._streams.values():
            stream._fail(self._death)
        self._streams.clear()

    async def _report_death(self) -> None:
        code = await asyncio.to_thread(self._reap)
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        why = DEATHS.get(-code, "the log above says why")
        if self._loaded:
            logger.error("the engine process %s (%s); all requests are refused from now on", how, why)
        elif not self._ready.done():
            self._ready.set_exception(EngineDeadError(f"the engine process {how} while it loaded the model: {why}"))


def _loading_error(kind: str, text: str) -> OctavoError:
    error_class = getattr(errors, kind, None)
    if isinstance(error_class, type) and issubclass(error_class, OctavoError):
        return error_class(text)
    return EngineDeadError(f"the engine could not start: {kind}: {text}")
