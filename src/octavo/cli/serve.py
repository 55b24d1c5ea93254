"""`octavo serve`: open the port, start the engine process, and load the HTTP side while the engine loads the model."""

from __future__ import annotations

import argparse
import errno
import signal
import socket
import sys
from collections.abc import Callable, Sequence

from octavo.cli.options import add_engine_flags, engine_config
from octavo.cli.table import format_table
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError
from octavo.engine.frontend import Frontend
from octavo.engine.messages import EngineInfo
from octavo.engine.process import ENGINE_COMMAND, EngineProcess, launch_engine
from octavo.engine.text_side import TextSide, load_text_side

BACKLOG = 2048


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    group = parser.add_argument_group("server")
    group.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; the default is this machine only, 0.0.0.0 is all"
    )
    group.add_argument("--port", type=int, default=8000, help="port to listen on, 0 for any free one (8000)")


def run(args: argparse.Namespace) -> int:
    return serve(engine_config(args), args.host, args.port)


def serve(
    config: EngineConfig,
    host: str,
    port: int,
    command: Sequence[str] = ENGINE_COMMAND,
    load_text: Callable[[EngineConfig], TextSide] = load_text_side,
) -> int:
    """Serve until ctrl-C or SIGTERM. Raises OctavoError if it cannot start.

    `config.model` has been located; `command` starts the engine process.
    """
    sock = listen(host, port)
    process = launch_engine(config, command)
    try:
        import asyncio

        return asyncio.run(_serve(config, sock, process, load_text))
    finally:
        if process.popen.poll() is None:
            process.popen.kill()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. Raises ConfigError if the address is taken or not ours."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OverflowError:
        raise ConfigError(f"--port is {port}; it must be between 0 and 65535") from None
    except OSError as error:
        match error.errno:
            case errno.EADDRINUSE:
                advice = f"port {port} is in use on {host}: stop what uses it, or choose another with --port"
            case errno.EACCES:
                advice = f"port {port} needs privileges that this user does not have: choose one above 1023 with --port"
            case _:
                reason = str(error.strerror).partition(" (while")[0]  # the rest says again what was tried
                advice = f"cannot listen on {host}:{port} ({reason}): check --host and --port"
        raise ConfigError(advice) from None


async def _serve(
    config: EngineConfig,
    sock: socket.socket,
    process: EngineProcess,
    load_text: Callable[[EngineConfig], TextSide],
) -> int:
    import asyncio

    # Before the imports, which take longer than a hasty ctrl-C.
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    from octavo.core.clock import SystemClock
    from octavo.engine.client import EngineClient
    from octavo.server.app import create_app
    from octavo.server.run import run_until
    from octavo.server.service import Service

    stopping = asyncio.create_task(stop.wait())
    connecting = asyncio.create_task(EngineClient.connect(process))
    try:
        text = await asyncio.to_thread(load_text, config)
        await asyncio.wait((connecting, stopping), return_when=asyncio.FIRST_COMPLETED)
        if stop.is_set():
            return 0
        client = await connecting
    finally:
        connecting.cancel()  # does nothing if it is done
        await asyncio.gather(connecting, return_exceptions=True)
    try:
        frontend = Frontend(text.tokenizer, text.template, client.info, config.seed)
        service = Service(client, frontend, SystemClock(), text.defaults.sampling)
        _greet(client.info, sock)
        await run_until(stop, create_app(service), client, sock)
    finally:
        await client.close()
    return 0


def _greet(info: EngineInfo, sock: socket.socket) -> None:
    for warning in info.warnings:
        print(f"octavo: warning: {warning}", file=sys.stderr)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    kernels = ("kernels", f"{info.isa}, {info.threads} threads, up to {info.max_num_seqs} requests at once")
    print(format_table([kernels, *info.memory_table]))
    print(f"octavo serves {info.served_model_name!r} at http://{shown}:{port}/v1 (ctrl-C ends it)", flush=True)
