"""Flags of the engine that several commands share, and how they become an EngineConfig."""

from __future__ import annotations

import argparse
import dataclasses
import os
from typing import Any

from octavo.cli.values import human_int, json_object, length, number, whole_number
from octavo.core.config import ACTIVATION_DTYPES, DTYPES, KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from octavo.core.errors import ConfigError
from octavo.core.reasoning import REASONING_PARSERS
from octavo.engine.model_location import locate_model
from octavo.server.parsers import AnswerParsers
from octavo.server.tools.registry import TOOL_PARSERS


def add_engine_flags(parser: argparse.ArgumentParser, *, positional: bool = True) -> None:
    if positional:
        parser.add_argument(
            "model_argument",
            nargs="?",
            metavar="MODEL",
            help="a GGUF file, a model's folder, or org/name of the hub; default: the built-in model",
        )
    flag = parser.add_argument_group("model").add_argument
    flag("--model", metavar="MODEL", help="the same as the positional MODEL")
    flag(
        "--served-model-name",
        nargs="+",
        metavar="NAME",
        help="the model's names in the API, the first one in replies; default: from the file",
    )
    flag("--tokenizer", metavar="MODEL", help="take the tokenizer from these files or this repository")
    flag("--revision", metavar="NAME", help="branch, tag or commit of the model's hub repository (main)")
    flag("--tokenizer-revision", metavar="NAME", help="the same of the tokenizer; default: the model's")
    flag("--download-dir", metavar="FOLDER", help="where downloads are kept; default: HF_HOME's cache")
    flag("--dtype", choices=DTYPES, help="of weights that are floats; auto: as they come (auto)")
    flag(
        "--quantization",
        "-q",
        choices=QUANTIZATIONS,
        metavar="TYPE",
        help=f"pack float weights so, or what the files are: {', '.join(QUANTIZATIONS)}",
    )
    flag("--hf-overrides", type=json_object, metavar="JSON", help="settings that replace those of config.json")
    flag(
        "--max-model-len",
        type=length,
        metavar="N",
        help="prompt and output tokens, as 4K; auto, -1: what fits",
    )
    flag("--generation-config", metavar="WHERE", help="sampling defaults: auto (the model's), vllm (none), or a path")
    flag("--override-generation-config", type=json_object, metavar="JSON", help='as {"temperature": 0.5}')
    flag(
        "--max-logprobs",
        type=whole_number,
        metavar="N",
        help="alternatives of a token in logprobs, at most; -1: no limit (20)",
    )
    flag("--seed", type=whole_number, metavar="N", help="where the seeds of requests without a seed start (0)")

    flag = parser.add_argument_group("cache").add_argument
    flag(
        "--gpu-memory-utilization",
        "--memory-utilization",
        type=number,
        metavar="F",
        help="share of all memory that weights, workspace and KV cache may take, up to 1",
    )
    flag("--kv-cache-memory-bytes", type=human_int, metavar="N", help="size of the KV cache, as 2G")
    flag("--num-gpu-blocks-override", type=human_int, metavar="N", help="size of the KV cache in blocks")
    flag("--kv-cache-dtype", metavar="TYPE", help=f"how K and V are stored: {', '.join(KV_CACHE_DTYPES)} (auto)")
    flag("--block-size", type=human_int, metavar="N", help="tokens in a block of the KV cache, a power of two (16)")
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
    flag("--kv-cache-metrics-sample", type=number, metavar="F", help="the share of blocks that are watched (0.01)")

    flag = parser.add_argument_group("scheduler").add_argument
    flag("--max-num-seqs", type=human_int, metavar="N", help="requests that run at once, at most (64)")
    flag("--max-num-batched-tokens", type=human_int, metavar="N", help="tokens computed in one step, at most (512)")
    flag(
        "--long-prefill-token-threshold",
        type=human_int,
        metavar="N",
        help="tokens of one prompt in a step, at most, so that others can pass; 0: no limit (0)",
    )

    flag = parser.add_argument_group("kernels").add_argument
    flag("--threads", type=human_int, metavar="N", help="threads that compute; default: one for each core")
    flag("--isa", metavar="NAME", help="force an instruction set; 'octavo info' lists them")
    flag("--activation-dtype", choices=ACTIVATION_DTYPES, help="float32: quantize no activations (auto)")


def add_answer_flags(group: argparse._ArgumentGroup) -> None:
    """How answers are taken apart; names and values are vLLM's."""
    group.add_argument(
        "--enable-auto-tool-choice", action="store_true", help="let the model call tools; needs --tool-call-parser"
    )
    group.add_argument(
        "--tool-call-parser",
        choices=tuple(TOOL_PARSERS),
        metavar="NAME",
        help=f"how the model writes calls (docs/tools.md): {', '.join(TOOL_PARSERS)}",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=tuple(REASONING_PARSERS),
        metavar="NAME",
        help=f"how the model marks its reasoning: {', '.join(REASONING_PARSERS)}; default: none",
    )


def answer_parsers(args: argparse.Namespace) -> AnswerParsers:
    """Raises ConfigError."""
    if args.enable_auto_tool_choice and args.tool_call_parser is None:
        raise ConfigError(f"--enable-auto-tool-choice needs --tool-call-parser: name one of {', '.join(TOOL_PARSERS)}")
    return AnswerParsers(args.tool_call_parser if args.enable_auto_tool_choice else None, args.reasoning_parser)


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Raises ConfigError, ModelFileError."""
    named = args.model_argument
    if args.model is not None and named not in (None, args.model):
        raise ConfigError(f"two models are named, {named!r} and {args.model!r}: name one")
    names = args.served_model_name or []
    if named is None and args.model is None and len(names) > 1 and (os.path.exists(names[-1]) or "/" in names[-1]):
        raise ConfigError(
            f"--served-model-name took {names[-1]!r} as one more name: name the model before the flags, or with --model"
        )
    return locate_model(EngineConfig(**{**_settings(args), "model": args.model or named}))


def given_settings(args: argparse.Namespace) -> dict[str, Any]:
    """The fields of EngineConfig that the command line itself names."""
    return {name: value for name, value in _settings(args).items() if name in args.given}


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    values = {field.name: getattr(args, field.name) for field in dataclasses.fields(EngineConfig)}
    return {name: value for name, value in values.items() if value is not None}
