"""Flags that several commands share, a parser that suggests the right one, and flags turned into an EngineConfig."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from octavo.core.config import ACTIVATION_DTYPES, DTYPES, KV_CACHE_DTYPES, MAX_INT, QUANTIZATIONS, EngineConfig
from octavo.core.errors import ConfigError, shorten
from octavo.engine.model_location import locate_model
from octavo.server.parsers import AnswerParsers
from octavo.server.reasoning.registry import REASONING_PARSERS
from octavo.server.tools.registry import TOOL_PARSERS

ISA_VARIABLE = "OCTAVO_ISA"
_SUFFIXES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class Parser(argparse.ArgumentParser):
    """Errors are one line with exit code 2, and a misspelt flag gets the nearest right one."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_all(self, argv: Sequence[str] | None, commands: dict[str, Parser]) -> argparse.Namespace:
        args, unknown = self.parse_known_args(argv)
        if len(unknown) == 1 and not unknown[0].startswith("-") and getattr(args, "model_argument", "") is None:
            args.model_argument = unknown.pop()  # argparse looks for it right behind PROMPT only
        if unknown:
            parser = commands.get(args.command, self)
            flag = unknown[0].split("=", 1)[0]
            near = difflib.get_close_matches(flag, parser._option_string_actions, n=1)
            hint = f"did you mean {near[0]}?" if near else f"'{parser.prog} --help' lists what there is"
            parser.error(f"unknown argument {flag}: {hint}")
        return args


def human_int(text: str) -> int:
    """4096, 4k (4000) or 4K (4096), also 1.5G; vLLM reads these the same way."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmgKMG]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number like 4096, 4k (4000) or 4K (4096)")
    value = float(match[1]) * _SUFFIXES[match[2]]
    if value > MAX_INT:
        raise argparse.ArgumentTypeError(f"{text!r} is more than {MAX_INT:,}")
    if value != int(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(value)


def json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{shorten(text)!r} is not a JSON object")
    return value


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model_argument",
        nargs="?",
        metavar="MODEL",
        help="a GGUF file, a model's folder, or org/name of the hub; default: the built-in model",
    )
    group = parser.add_argument_group("engine")

    def flag(*names: str, **options: Any) -> None:
        group.add_argument(*names, **options)

    flag("--model", metavar="MODEL", help="the same as the positional MODEL")
    flag("--served-model-name", metavar="NAME", help="the model's name in the API; default: from the file")
    flag("--tokenizer", metavar="MODEL", help="take the tokenizer from these files or this repository")
    flag("--revision", metavar="NAME", help="branch, tag or commit of the model's hub repository (main)")
    flag("--download-dir", metavar="FOLDER", help="where downloads are kept; default: HF_HOME's cache")
    flag("--dtype", choices=DTYPES, help="of weights that are floats; auto: as they come (auto)")
    flag("--quantization", "-q", choices=QUANTIZATIONS, help="pack float weights so, or what the files are")
    flag("--hf-overrides", type=json_object, metavar="JSON", help="settings that replace those of config.json")
    flag("--generation-config", metavar="WHERE", help="sampling defaults: auto (the model's), vllm (none), or a path")
    flag("--override-generation-config", type=json_object, metavar="JSON", help='as {"temperature": 0.5}')
    flag("--max-model-len", type=human_int, metavar="N", help="tokens of prompt and output together, as 4096 or 4K")
    flag("--block-size", type=int, metavar="N", help="tokens in a block of the KV cache, a power of two (16)")
    flag("--kv-cache-dtype", choices=KV_CACHE_DTYPES, help="how K and V are stored (auto)")
    flag("--activation-dtype", choices=ACTIVATION_DTYPES, help="float32: quantize no activations (auto)")
    flag("--isa", metavar="NAME", help=f"force an instruction set; 'octavo info' lists them (also {ISA_VARIABLE})")
    flag("--threads", type=int, metavar="N", help="threads that compute; default: one for each core")
    flag("--max-num-batched-tokens", type=human_int, metavar="N", help="tokens computed in one step, at most (512)")
    flag("--max-num-seqs", type=human_int, metavar="N", help="requests that run at once, at most (64)")
    flag(
        "--max-logprobs", type=int, metavar="N", help="alternatives of a token in logprobs, at most; -1: no limit (20)"
    )
    flag(
        "--long-prefill-token-threshold",
        type=human_int,
        metavar="N",
        help="tokens of one prompt in a step, at most, so that others can pass; 0: no limit (0)",
    )
    flag(
        "--gpu-memory-utilization",
        "--memory-utilization",
        dest="memory_utilization",
        type=float,
        metavar="F",
        help="share of all memory that weights, workspace and KV cache may take, up to 1",
    )
    flag("--kv-cache-memory-bytes", type=human_int, metavar="N", help="size of the KV cache, as 2G")
    flag(
        "--num-gpu-blocks-override",
        dest="num_blocks_override",
        type=int,
        metavar="N",
        help="size of the KV cache in blocks",
    )
    flag(
        "--enable-prefix-caching",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="reuse the KV cache of a prompt's beginning that was seen before (on)",
    )
    flag(
        "--kv-cache-metrics",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="how long KV blocks live, lie idle and wait to be used again, at /metrics (off)",
    )
    flag("--kv-cache-metrics-sample", type=float, metavar="F", help="the share of blocks that are watched (0.01)")
    flag("--seed", type=int, metavar="N", help="where the seeds of requests without a seed start (0)")


def add_answer_flags(group: argparse._ArgumentGroup) -> None:
    """How answers are taken apart; names and values are vLLM's."""
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="let the model call tools; needs --tool-call-parser"
    )
    group.add_argument(
        "--tool-call-parser", choices=tuple(TOOL_PARSERS), help="how the model writes calls; see docs/tools.md"
    )
    group.add_argument(
        "--reasoning-parser", choices=tuple(REASONING_PARSERS), help="how the model marks its reasoning; default: none"
    )


def answer_parsers(args: argparse.Namespace) -> AnswerParsers:
    """Raises ConfigError."""
    if args.enable_auto_tool_choice and args.tool_call_parser is None:
        raise ConfigError(f"--enable-auto-tool-choice needs --tool-call-parser: name one of {', '.join(TOOL_PARSERS)}")
    return AnswerParsers(args.tool_call_parser if args.enable_auto_tool_choice else None, args.reasoning_parser)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError, ModelFileError."""
    if args.model is not None and args.model_argument not in (None, args.model):
        raise ConfigError(f"two models are named, {args.model_argument!r} and {args.model!r}: name one")
    given = {"isa": os.environ.get(ISA_VARIABLE) or None, **given_settings(args)}
    return locate_model(EngineConfig(**{**given, "model": args.model or args.model_argument}))


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that flags name."""
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    return {name: value for name, value in values.items() if value is not None}
