"""The engine process: how it is launched, and the loop it runs: messages in, one step, outputs out.

Knows nothing of HTTP or of text. Started as a fresh `python -m octavo.engine.process FD`, not forked, so that threads
and memory of the parent do not come along. It ends when its channel does, so it can never outlive its parent.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from octavo.core.clock import SystemClock
from octavo.core.config import EngineConfig
from octavo.core.errors import InvalidRequestError, OctavoError
from octavo.core.records import EngineStats, FinishReason, Request, RequestOutput
from octavo.engine.channel import BlockingChannel, ChannelClosedError, encode_frame
from octavo.engine.messages import Abort, Configure, EngineInfo, Failed, Outputs, Ready, Refusal, Shutdown, Submit

# -P: a file in the user's directory that is named like one of our imports must not be imported instead.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "octavo.engine.process")


class EngineLike(Protocol):
    """What the loop, and the offline `LLM`, ask of an engine."""

    @property
    def info(self) -> EngineInfo: ...
    @property
    def has_work(self) -> bool: ...
    def submit(self, request: Request) -> None: ...
    def abort(self, request_id: str) -> None: ...
    def step(self) -> list[RequestOutput]: ...
    def stats(self) -> EngineStats: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineProcess:
    """A launched engine, seen from its parent: the process and the parent's end of the channel."""

    popen: subprocess.Popen[bytes]
    socket: socket.socket


def launch_engine(config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND) -> EngineProcess:
    """Start an engine process and hand it `config`; it loads while the caller does something else."""
    ours, theirs = socket.socketpair()
    with theirs:
        popen = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # ctrl-C in the terminal is for the parent alone
        )
    with suppress(OSError):  # if it is dead already, whoever connects will be told
        ours.sendall(encode_frame(Configure(config)))
    return EngineProcess(popen, ours)


def run_loop(engine: EngineLike, channel: BlockingChannel) -> None:
    """Serve requests until told to shut down. Raises ChannelClosedError, or whatever broke the engine.

    Before a failure is raised, every live request is told of it.
    """
    live: set[str] = set()
    clock = SystemClock()
    while True:
        outputs: list[RequestOutput] = []
        refusals: list[Refusal] = []
        messages = channel.receive(wait=not engine.has_work)
        try:
            for message in messages:
                match message:
                    case Submit(request):
                        live.add(request.request_id)
                        try:
                            engine.submit(request)
                        except InvalidRequestError as error:
                            live.discard(request.request_id)
                            refusals.append(Refusal(request.request_id, str(error), error.param, error.code))
                    case Abort(request_id):
                        if request_id in live:
                            live.discard(request_id)
                            engine.abort(request_id)
                    case Shutdown():
                        return
            if engine.has_work:
                outputs = engine.step()
            stats = engine.stats()
        except Exception as error:
            text = f"the engine failed ({type(error).__name__}); its log says why"
            outputs = [RequestOutput(request_id=i, finish_reason=FinishReason.ERROR, error=text) for i in live]
            channel.send(Outputs(outputs, None, refusals))
            raise
        live.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        channel.send(Outputs(outputs, stats, refusals, clock.now()))


def engine_main(make_engine: Callable[[EngineConfig], EngineLike], fd: int) -> int:
    """Life of an engine process whose channel is the socket `fd`. Returns its exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = BlockingChannel(socket.socket(fileno=fd))
    try:
        (configure,) = channel.receive(wait=True)
        assert isinstance(configure, Configure), "the first message is the configuration"
        try:
            engine = make_engine(configure.config)
        except Exception as error:
            if not isinstance(error, OctavoError):
                traceback.print_exc()
            channel.send(Failed(type(error).__name__, str(error)))
            return 1
        try:
            channel.send(Ready(engine.info))
            run_loop(engine, channel)
        finally:
            engine.close()
    except ChannelClosedError:
        return 0
    except Exception:
        traceback.print_exc()
        return 1
    return 0


def main() -> int:
    from octavo.engine.engine import Engine  # only the child pays for loading kernels and numpy

    return engine_main(Engine, int(sys.argv[1]))


if __name__ == "__main__":
    sys.exit(main())
