"""The engine process: how it is launched, and the loop it runs: messages in, one step, outputs out.

Knows nothing of HTTP or of text. Started as a fresh `python -m octavo.engine.process FD`, not forked, so that threads
and memory of the parent do not come along. It ends when its channel does, and is killed with the thread that launched
it, so it can never outlive its parent, not even while it hangs.
"""

from __future__ import annotations

import faulthandler
import os
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
from octavo.core.records import EngineStats, Request, RequestOutput
from octavo.engine.channel import BlockingChannel, ChannelClosedError, encode_frame
from octavo.engine.messages import Abort, Configure, EngineInfo, Failed, Outputs, Ping, Ready, Refusal, Shutdown, Submit
from octavo.engine.pulse import Pulse

# -P: a file in the user's directory that is named like one of our imports must not be imported instead.
ENGINE_COMMAND = (sys.executable, "-P", "-m", "octavo.engine.process")
PR_SET_PDEATHSIG = 1  # of linux/prctl.h
SHOW_STACKS = signal.SIGUSR1  # tells an engine to write where its threads are to standard error


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
    """A launched engine, seen from its parent: the process, the parent's end of the channel, and the pulse.

    `popen.stderr` is a pipe if it was launched so.
    """

    popen: subprocess.Popen[bytes]
    socket: socket.socket
    pulse: Pulse


def launch_engine(
    config: EngineConfig, command: Sequence[str] = ENGINE_COMMAND, *, pipe_stderr: bool = False
) -> EngineProcess:
    """Start an engine process and hand it `config`; it loads while the caller does something else.

    Raises OSError if the system gives no process.
    """
    ours, theirs = socket.socketpair()
    pulse, pulse_fd = Pulse.create()
    try:
        popen = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno(), pulse_fd],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE if pipe_stderr else None,
            start_new_session=True,  # ctrl-C in the terminal is for the parent alone
        )
    except OSError:
        ours.close()
        pulse.close()
        raise
    finally:
        theirs.close()
        os.close(pulse_fd)
    with suppress(OSError):  # if it is dead already, whoever connects will be told
        ours.sendall(encode_frame(Configure(config, pulse_fd)))
    return EngineProcess(popen, ours, pulse)


def run_loop(engine: EngineLike, channel: BlockingChannel, pulse: Pulse) -> None:
    """Serve requests until told to shut down. Raises ChannelClosedError, or whatever broke the engine."""
    live: set[str] = set()
    clock = SystemClock()
    while True:
        outputs: list[RequestOutput] = []
        refusals: list[Refusal] = []
        for message in channel.receive(wait=not engine.has_work):
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
                case Ping():
                    pass  # what follows is the answer
                case Shutdown():
                    return
        if engine.has_work:
            outputs = engine.step()
        live.difference_update(output.request_id for output in outputs if output.finish_reason is not None)
        pulse.beat()
        channel.send(Outputs(outputs, engine.stats(), refusals, clock.now()))


def engine_main(make_engine: Callable[[EngineConfig, Pulse], EngineLike], fd: int) -> int:
    """Life of an engine process whose channel is the socket `fd`. Returns its exit code."""
    import ctypes  # numpy brings it along here, and the parent need not wait for it

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.enable()  # a fatal signal tells where Python was
    faulthandler.register(SHOW_STACKS)
    channel = BlockingChannel(socket.socket(fileno=fd))
    try:
        (configure,) = channel.receive(wait=True)
        assert isinstance(configure, Configure), "the first message is the configuration"
        pulse = Pulse(configure.pulse_fd)
        os.close(configure.pulse_fd)
        try:
            engine = make_engine(configure.config, pulse)
        except Exception as error:
            if not isinstance(error, OctavoError):
                traceback.print_exc()
            channel.send(Failed(type(error).__name__, str(error)))
            return 1
        try:
            channel.send(Ready(engine.info))
            run_loop(engine, channel, pulse)
        except ChannelClosedError:
            raise
        except Exception as error:
            channel.send(Failed(type(error).__name__, str(error)))
            raise
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
