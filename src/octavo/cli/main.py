"""The `octavo` command: picks the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Sequence

from octavo.cli import chat, collect_env, models, pull, quantize, serve, terminal
from octavo.cli.bench import command as bench
from octavo.cli.options import Parser
from octavo.core.errors import EngineDeadError, OctavoError
from octavo.core.version import version

INTERRUPTED = 130  # as shells report a program that ctrl-C ended
READER_GONE = 141  # and one that SIGPIPE ended


def main(argv: Sequence[str] | None = None) -> int:
    parser = Parser(prog="octavo", description="Serve large language models to many users at once.")
    parser.add_argument("--version", action=_Version)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=Parser)
    commands: dict[str, Parser] = {}

    def command(name: str, text: str) -> Parser:
        commands[name] = subparsers.add_parser(name, help=text, description=text)
        return commands[name]

    serve.add_flags(command("serve", "Serve a model over HTTP with the OpenAI API."))
    chat.add_flags(command("chat", "Chat with a model in the terminal."))
    terminal.add_complete_flags(command("complete", "Print the continuation of a prompt."))
    pull.add_flags(command("pull", "Download a model of the Hugging Face hub."))
    models.add_flags(command("models", "List the models on this machine."))
    quantize.add_flags(command("quantize", "Write a GGUF model in another weight format."))
    commands |= bench.add_flags(command("bench", "Measure a model in this process, or a running server."))
    command("info", "Show what octavo sees of this machine.")
    collect_env.add_flags(command("collect-env", "Show all that a bug report should say of this machine."))

    def run() -> int:
        args = parser.parse_all(argv, commands)
        if args.command is None:
            parser.error(f"name a command: {', '.join(subparsers.choices)}; each has --help")
        return _run(args)

    for stream in (sys.stdin, sys.stdout):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal's encoding is no reason to fail
    return exit_code(run)


def exit_code(command: Callable[[], int]) -> int:
    """What `command` returns; else one line on standard error, and 2 for what the user can mend, 1 for a dead engine
    or a standard output that takes nothing."""
    try:
        try:
            return _code(command)
        finally:
            _flush()
    except BrokenPipeError:  # as in `octavo complete ... | head`
        _drop_output()
        return READER_GONE
    except OSError as error:
        try:
            print(flush=True)  # fails again if it was this that failed
        except OSError:
            _drop_output()
            print(f"octavo: cannot write to standard output: {error.strerror}", file=sys.stderr)
            return 1
        raise


def _code(command: Callable[[], int]) -> int:
    try:
        return command()
    except OctavoError as error:
        print(f"octavo: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineDeadError) else 2
    except KeyboardInterrupt:
        return INTERRUPTED


def _flush() -> None:
    if sys.stdout is not None:  # it is, where the shell closed it
        sys.stdout.flush()


def _drop_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at its end


def _run(args: argparse.Namespace) -> int:
    match args.command:
        case "serve":
            return serve.run(args)
        case "chat":
            return chat.run(args)
        case "complete":
            return terminal.complete(args)
        case "pull":
            return pull.run(args)
        case "models":
            return models.run(args)
        case "quantize":
            return quantize.run(args)
        case str(name) if name.startswith("bench "):
            return bench.run(args)
        case "collect-env":
            return collect_env.run(args)
        case _:
            from octavo.cli import info  # loads the kernels

            return info.run()


class _Version(argparse.Action):
    """Like argparse's own "version", but the version is looked up only when asked for."""

    def __init__(self, option_strings: Sequence[str], dest: str) -> None:
        super().__init__(option_strings, dest, nargs=0, help="show the version and end")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        print(f"octavo {version()}")
        parser.exit()
