"""`octavo serve`: open the port, start the engine process, and load the HTTP side while the engine loads the model."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from octavo.cli.options import add_engine_flags, engine_config
from octavo.cli.server_options import add_server_flags, server_settings
from octavo.cli.table import format_table
from octavo.core.config import EngineConfig
from octavo.engine.frontend import Frontend
from octavo.engine.messages import EngineInfo
from octavo.engine.process import ENGINE_COMMAND, EngineProcess, launch_engine
from octavo.engine.text_side import TextSide, load_text_side, with_template
from octavo.server.settings import ServerSettings
from octavo.server.sockets import address, listening, tls_context

if TYPE_CHECKING:
    import ssl


COMMON_FLAGS = (
    *("served-model-name", "max-model-len", "quantization", "dtype", "gpu-memory-utilization", "max-num-seqs"),
    *("threads", "host", "port", "api-key", "tool-call-parser", "reasoning-parser", "config"),
)


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_engine_flags(parser)
    add_server_flags(parser)


def run(args: argparse.Namespace) -> int:
    return serve(engine_config(args), server_settings(args), notes=args.notes)


def serve(
    config: EngineConfig,
    settings: ServerSettings,
    command: Sequence[str] = ENGINE_COMMAND,
    load_text: Callable[[EngineConfig], TextSide] = load_text_side,
    notes: Sequence[str] = (),
) -> int:
    """Serve until ctrl-C or SIGTERM. Raises OctavoError if it cannot start.

    `config.model` has been located; `command` starts the engine process; `notes` are warnings about the command line.
    """
    tls = tls_context(settings)
    with listening(settings) as sock:
        process = launch_engine(config, command)
        try:
            import asyncio

            return asyncio.run(_serve(config, settings, sock, tls, process, load_text, notes))
        finally:
            if process.popen.poll() is None:
                process.popen.kill()


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    process: EngineProcess,
    load_text: Callable[[EngineConfig], TextSide],
    notes: Sequence[str],
) -> int:
    import asyncio

    # Before the imports, which take longer than a hasty ctrl-C.
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)

    from octavo.core.clock import SystemClock
    from octavo.engine.client import EngineClient
    from octavo.server.app import create_app
    from octavo.server.logs import configure_logs
    from octavo.server.run import run_until
    from octavo.server.service import Service

    configure_logs(settings.log_format)
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
        if settings.chat_template is not None:
            text = with_template(text, settings.chat_template)
        content_format = settings.chat_template_content_format
        frontend = Frontend(text.tokenizer, text.template, client.info, config.seed, content_format)
        service = Service(client, frontend, SystemClock(), text.defaults.sampling, settings)
        warnings = [*notes, *text.warnings, *client.info.warnings]
        _greet(client.info, warnings, address(sock, tls=settings.tls) + settings.root_path, settings.log_format)
        await run_until(stop, create_app(service), client, sock, settings, tls)
    finally:
        await service.close()
        await client.close()
    return 0


def _greet(info: EngineInfo, warnings: Sequence[str], url: str, log_format: str) -> None:
    kernels = ("kernels", f"{info.isa}, {info.threads} threads, up to {info.max_num_seqs} requests at once")
    greeting = f"octavo serves {info.served_model_name!r} at {url}/v1"
    if log_format == "json":
        import logging

        logger = logging.getLogger(__name__)
        for warning in warnings:
            logger.warning(warning)
        logger.info(greeting, extra={"fields": dict([kernels, *info.memory_table])})
        return
    for warning in warnings:
        print(f"octavo: warning: {warning}", file=sys.stderr)
    print(format_table([kernels, *info.memory_table]))
    print(f"{greeting} (ctrl-C ends it)", flush=True)
