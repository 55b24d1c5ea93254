"""The `octavo` command: picks the subcommand, and turns errors into one line and an exit code."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from octavo.cli.parser import Parser
from octavo.core.errors import EngineDeadError, OctavoError
from octavo.core.version import version
from octavo.core.vllm_flags import VllmFlag, vllm_bench_flags

INTERRUPTED = 130  # as shells report a program that ctrl-C ended
READER_GONE = 141  # and one that SIGPIPE ended

EXAMPLES = """examples:
  octavo serve                                    the built-in model at 127.0.0.1:8000
  octavo serve Qwen/Qwen3-0.6B --max-model-len 4K a model of the Hugging Face hub
  octavo chat models/Qwen3-4B-Q4_K_M.gguf         a GGUF file, in the terminal
  octavo serve --help                             the most used flags, and how to see all
"""


class Command(NamedTuple):
    add_flags: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]
    common: Sequence[str] = ()  # flags that its short help shows; all if there are none
    with_config: bool = False  # it takes --config, and knows vLLM's flags
    of_vllm: Callable[[], Mapping[str, VllmFlag]] | None = None  # flags of vLLM that it knows instead
    shows_notes: bool = False  # it shows the parser's notes itself


# Each imports its own module only: the command line must start in milliseconds.
def _serve() -> Command:
    from octavo.cli import serve

    return Command(serve.add_flags, serve.run, serve.COMMON_FLAGS, with_config=True, shows_notes=True)


def _chat() -> Command:
    from octavo.cli import chat

    return Command(chat.add_flags, chat.run, with_config=True)


def _complete() -> Command:
    from octavo.cli import terminal

    return Command(terminal.add_complete_flags, terminal.complete, with_config=True)


def _pull() -> Command:
    from octavo.cli import pull

    return Command(pull.add_flags, pull.run)


def _models() -> Command:
    from octavo.cli import models

    return Command(models.add_flags, models.run)


def _quantize() -> Command:
    from octavo.cli import quantize

    return Command(quantize.add_flags, quantize.run)


def _bench_latency() -> Command:
    from octavo.cli.bench import offline

    return Command(offline.add_latency_flags, offline.latency, with_config=True)


def _bench_throughput() -> Command:
    from octavo.cli.bench import offline

    return Command(offline.add_throughput_flags, offline.throughput, with_config=True)


def _bench_serve() -> Command:
    from octavo.cli.bench import serve

    return Command(serve.add_flags, serve.run, of_vllm=vllm_bench_flags)


def _run_batch() -> Command:
    from octavo.cli.batch import command

    return Command(command.add_flags, command.run, with_config=True)


def _info() -> Command:
    def run(_: argparse.Namespace) -> int:
        from octavo.cli import info  # loads the kernels

        return info.run()

    return Command(lambda _: None, run)


def _collect_env() -> Command:
    from octavo.cli import collect_env

    return Command(collect_env.add_flags, collect_env.run)


COMMANDS: dict[str, tuple[str, Callable[[], Command]]] = {
    "serve": ("serve a model over HTTP with the OpenAI API", _serve),
    "chat": ("chat with a model in the terminal", _chat),
    "complete": ("print the continuation of a prompt", _complete),
    "pull": ("download a model of the Hugging Face hub", _pull),
    "models": ("list the models on this machine", _models),
    "quantize": ("write a GGUF model in another weight format", _quantize),
    "bench latency": ("time a batch of random prompts in this process", _bench_latency),
    "bench throughput": ("measure the tokens a second of many prompts at once", _bench_throughput),
    "bench serve": ("load a running OpenAI-compatible server and time its answers", _bench_serve),
    "run-batch": ("answer a file of requests", _run_batch),
    "info": ("show what octavo sees of this machine", _info),
    "collect-env": ("show all that a bug report should say of this machine", _collect_env),
}


def main(argv: Sequence[str] | None = None) -> int:
    def run() -> int:
        return _run(list(sys.argv[1:] if argv is None else argv))

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


def make_parser(name: str) -> Parser:
    """The parser of a command."""
    text, load = COMMANDS[name]
    return _parser(name, text, load())


def _parser(name: str, text: str, command: Command) -> Parser:
    with_config = command.with_config
    parser = Parser(
        prog=f"octavo {name}",
        description=f"{text[0].upper()}{text[1:]}.",
        epilog="A flag may also be set in the environment, --max-model-len as OCTAVO_MAX_MODEL_LEN, or in a YAML file "
        "that --config names. The command line wins over the environment, and that over the file."
        if with_config
        else None,
        common=command.common,
        with_config=with_config,
        of_vllm=command.of_vllm,
        is_known_elsewhere=_is_flag_of_any,
        shares_file_with=None if name == "serve" else lambda: make_parser("serve"),
    )
    command.add_flags(parser)
    return parser


def _is_flag_of_any(name: str) -> bool:
    """Whether some command has a flag of this long name."""
    actions = (make_parser(command).action_of(name) for command in COMMANDS)
    return any(action is not None and action.dest != argparse.SUPPRESS for action in actions)


def _run(argv: list[str]) -> int:
    name, rest = _split(argv)
    if name == "--version":
        print(f"octavo {version()}")
        return 0
    if name not in COMMANDS:
        first = argv[0] if argv else ""
        group = f"{first} " if any(command.startswith(f"{first} ") for command in COMMANDS) else ""
        if {*argv[:2]} & {"-h", "--help"}:
            _show_help(group)
            return 0
        raise _unknown_command(argv[1:2] if group else argv[:1], group)
    text, load = COMMANDS[name]
    chosen = load()
    args = _parser(name, text, chosen).parse_args(rest)
    for note in () if chosen.shows_notes else args.notes:
        print(f"octavo: warning: {note}", file=sys.stderr)
    return chosen.run(args)


def _split(argv: list[str]) -> tuple[str, list[str]]:
    """The command, which has one word or two, and what is behind it."""
    two = " ".join(argv[:2])
    return (two, argv[2:]) if two in COMMANDS else ("".join(argv[:1]), argv[1:])


def _show_help(group: str) -> None:
    width = max(map(len, COMMANDS))
    print(f"usage: octavo {group}COMMAND [--flag VALUE ...]\n\nServe large language models to many users at once.\n")
    for command, (text, _) in COMMANDS.items():
        if command.startswith(group):
            print(f"  {command:<{width}}  {text}")
    print(f"\n{EXAMPLES}\nEach command has --help. octavo --version shows the version.")


def _unknown_command(words: Sequence[str], group: str) -> OctavoError:
    names = [command.removeprefix(group) for command in COMMANDS if command.startswith(group)]
    if not words:
        return OctavoError(f"name a {group}command: {', '.join(names)}; each has --help")
    import difflib

    (word,) = words
    kind = "flag" if word.startswith("-") else f"{group}command"
    near = difflib.get_close_matches(word, (*names, "--help", "--version"), n=1)
    hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(names)}"
    behind = " (flags come behind the command)" if kind == "flag" and not near else ""
    return OctavoError(f"unknown {kind} {word}{behind}: {hint}")


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
