"""`octavo serve`: open the port, start the engine process, and load the HTTP side while the engine loads the model."""

from __future__ import annotations

import argparse
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from octavo.cli.options import add_engine_flags, engine_config
from octavo.cli.server_options import add_server_flags, server_settings
from octavo.cli.table import format_table
from octavo.core.config import ALL_THAT_FITS, EngineConfig
from octavo.engine.frontend import Frontend
from octavo.engine.messages import EngineInfo
from octavo.engine.process import ENGINE_COMMAND, EngineProcess, launch_engine
from octavo.engine.text_side import TextSide, load_text_side, with_template
from octavo.server.settings import ServerSettings
from octavo.server.sockets import address, listening, tls_context

if TYPE_CHECKING:
    import ssl

    from octavo.engine.supervisor import EngineSupervisor
    from octavo.server.service import Service

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
    """Serve until ctrl-C or SIGTERM (0), or until no engine can be kept alive (1).

    Raises OctavoError if it cannot start. `config.model` has been located; `command` starts the engine process; `notes`
    are warnings about the command line.
    """
    tls = tls_context(settings)
    with listening(settings) as sock:
        launch = partial(launch_engine, command=command, pipe_stderr=settings.log_format == "json")
        process = launch(config)
        try:
            import asyncio

            return asyncio.run(_serve(config, settings, sock, tls, process, launch, load_text, notes))
        finally:
            if process.popen.poll() is None:
                process.popen.kill()


async def _serve(
    config: EngineConfig,
    settings: ServerSettings,
    sock: socket.socket,
    tls: ssl.SSLContext | None,
    process: EngineProcess,
    launch: Callable[[EngineConfig], EngineProcess],
    load_text: Callable[[EngineConfig], TextSide],
    notes: Sequence[str],
) -> int:
    import asyncio

    from octavo.server.stopping import Stopping

    # Before the imports, which take longer than a hasty ctrl-C.
    stopping = Stopping()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopping.ask)

    from octavo.server.app import create_app
    from octavo.server.logs import configure_logs
    from octavo.server.run import run_until

    configure_logs(settings.log_format, settings.access_log_level)
    _warn(notes, settings.log_format)
    engine = supervised(launch, config, settings, stopping.ask)
    asked = asyncio.create_task(stopping.asked.wait())
    starting = asyncio.create_task(engine.start(process))
    try:
        text = await asyncio.to_thread(load_text, config)
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        if stopping.asked.is_set():
            return 0
        await starting
        service = make_service(engine, text, config, settings)
        warnings = [*text.warnings, *engine.info.warnings]
        _greet(engine.info, warnings, address(sock, tls=settings.tls) + settings.root_path, settings.log_format)
        try:
            await run_until(stopping, create_app(service), engine, sock, settings, tls)
        finally:
            await service.close()
    finally:
        starting.cancel()  # does nothing if it is done
        await asyncio.gather(starting, return_exceptions=True)
        await engine.close()
    return 1 if engine.gave_up else 0


def supervised(
    launch: Callable[[EngineConfig], EngineProcess],
    config: EngineConfig,
    settings: ServerSettings,
    on_give_up: Callable[[], None],
) -> EngineSupervisor:
    """The one who keeps an engine alive, not started yet."""
    from octavo.core.clock import SystemClock
    from octavo.engine.supervisor import EngineSupervisor

    engine = EngineSupervisor(
        lambda: launch(for_another_engine(config, engine.info)),
        SystemClock(),
        engine_timeout=settings.engine_timeout,
        max_restarts=settings.max_engine_restarts,
        on_give_up=on_give_up,
    )
    return engine


def for_another_engine(config: EngineConfig, info: EngineInfo) -> EngineConfig:
    """For one that follows on that of `info`: the length that clients were told must fit again, whatever memory there
    is by now."""
    if config.max_model_len != ALL_THAT_FITS:
        return config
    return replace(config, num_gpu_blocks_override=info.num_blocks)


def make_service(engine: EngineSupervisor, text: TextSide, config: EngineConfig, settings: ServerSettings) -> Service:
    """What the routes need, around an engine that has started."""
    from octavo.core.clock import SystemClock
    from octavo.server.service import Service

    if settings.chat_template is not None:
        text = with_template(text, settings.chat_template)
    content_format = settings.chat_template_content_format
    frontend = Frontend(text.tokenizer, text.template, engine.info, config.seed, content_format)
    return Service(engine, frontend, SystemClock(), text.defaults.sampling, settings)


def _greet(info: EngineInfo, warnings: Sequence[str], url: str, log_format: str) -> None:
    kernels = ("kernels", f"{info.isa}, {info.threads} threads, up to {info.max_num_seqs} requests at once")
    greeting = f"octavo serves {info.served_model_name!r} at {url}/v1"
    _warn(warnings, log_format)
    if log_format == "json":
        import logging

        logging.getLogger(__name__).info(greeting, extra={"fields": dict([kernels, *info.memory_table])})
        return
    print(format_table([kernels, *info.memory_table]))
    print(f"{greeting} (ctrl-C ends it)", flush=True)


def _warn(warnings: Sequence[str], log_format: str) -> None:
    import logging

    for warning in warnings:
        if log_format == "json":
            logging.getLogger(__name__).warning(warning)
        else:
            print(f"octavo: warning: {warning}", file=sys.stderr)
