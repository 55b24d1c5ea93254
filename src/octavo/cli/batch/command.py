"""`octavo run-batch`: the flags, and an engine with the server's routes for as long as the batch takes."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from octavo.cli.batch.files import Entry, Reply, ReplyFile, check_entries, read_entries
from octavo.cli.options import add_engine_flags, engine_config
from octavo.cli.serve import make_service, supervised
from octavo.cli.server_options import add_chat_flags, chat_settings
from octavo.core.config import EngineConfig
from octavo.core.errors import ConfigError, EngineDeadError
from octavo.engine.process import launch_engine
from octavo.engine.text_side import load_text_side
from octavo.server.settings import ServerSettings

POLL_SECONDS = 0.1
MAX_RESTARTS = 20  # in a row; the last ones have half a minute between them


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batch")
    group.add_argument("--input-file", "-i", required=True, metavar="FILE", help="requests, one a line")
    group.add_argument("--output-file", "-o", required=True, metavar="FILE", help="replies; an earlier run's are kept")
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests in flight (twice --max-num-seqs)")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
    add_engine_flags(parser)
    add_chat_flags(parser)


def run(args: argparse.Namespace) -> int:
    """Raises ConfigError, ModelFileError, EngineDeadError."""
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"--max-concurrency is {args.max_concurrency}; it must be at least 1")
    custom_ids = check_entries(args.input_file)
    with ReplyFile(args.output_file, custom_ids) as output:
        if len(output.done) == len(custom_ids):
            print(f"all {len(custom_ids):,} requests have their reply in {args.output_file}")
            return 0
        import asyncio

        settings = ServerSettings(access_log=False, max_engine_restarts=MAX_RESTARTS, **chat_settings(args))
        try:
            return asyncio.run(_run(args, engine_config(args), settings, output, len(custom_ids)))
        except KeyboardInterrupt:
            told = f"{len(output.done):,} of {len(custom_ids):,} requests have their reply"
            print(f"octavo: {told}; run it again to go on", file=sys.stderr)
            raise


async def _run(
    args: argparse.Namespace, config: EngineConfig, settings: ServerSettings, output: ReplyFile, num_entries: int
) -> int:
    import asyncio

    from tqdm import tqdm  # type: ignore[import-untyped]

    from octavo.cli.batch.asgi import post
    from octavo.cli.batch.run import run_batch
    from octavo.server.app import create_app
    from octavo.server.logs import configure_logs

    configure_logs(settings.log_format)
    task = asyncio.current_task()
    assert task is not None

    def stop() -> None:
        task.cancel()

    process = launch_engine(config)
    engine = supervised(launch_engine, config, settings, stop)
    try:
        text, _ = await asyncio.gather(asyncio.to_thread(load_text_side, config), engine.start(process))
        service = make_service(engine, text, config, settings)
        for warning in (*text.warnings, *engine.info.warnings):
            print(f"octavo: warning: {warning}", file=sys.stderr)
        app = create_app(service)

        async def ask(entry: Entry) -> Reply:
            while not engine.is_alive:  # a large model takes longer to load than any number of attempts
                await asyncio.sleep(POLL_SECONDS)
            return await post(app, entry)

        bar = tqdm(total=num_entries, initial=len(output.done), disable=args.disable_tqdm or None, unit=" requests")
        with bar:
            counts = await run_batch(
                partial(read_entries, args.input_file),
                ask,
                output,
                max_concurrency=args.max_concurrency or 2 * config.max_num_seqs,
                on_reply=bar.update,
            )
        await service.close()
    except asyncio.CancelledError:
        if not engine.gave_up:
            raise
        raise EngineDeadError("no engine can be kept alive; its log says why. Run it again to go on") from None
    finally:
        await engine.close()
        if process.popen.poll() is None:
            process.popen.kill()
    print(f"{counts.answered:,} answered, {counts.refused:,} refused, {counts.failed:,} failed: {args.output_file}")
    return 1 if counts.failed else 0
