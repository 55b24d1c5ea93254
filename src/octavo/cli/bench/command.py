"""The three benchmarks as subcommands of `octavo bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from octavo.cli.bench import offline, serve
from octavo.cli.options import Parser

BENCHMARKS: dict[str, tuple[Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int], str]] = {
    "latency": (offline.add_latency_flags, offline.latency, "Time a batch of random prompts in this process."),
    "throughput": (offline.add_throughput_flags, offline.throughput, "Tokens a second of many prompts at once."),
    "serve": (serve.add_flags, serve.run, "Load a running OpenAI-compatible server and time its answers."),
}


def add_flags(parser: Parser) -> dict[str, Parser]:
    """The parsers of the benchmarks, by the whole command's name."""
    subparsers = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", parser_class=Parser, required=True)
    parsers = {}
    for name, (add_own_flags, _, text) in BENCHMARKS.items():
        own = subparsers.add_parser(name, help=text, description=text)
        own.set_defaults(command=f"bench {name}")
        add_own_flags(own)
        parsers[f"bench {name}"] = own
    return parsers


def run(args: argparse.Namespace) -> int:
    return BENCHMARKS[args.benchmark][1](args)
