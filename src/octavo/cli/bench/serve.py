"""`octavo bench serve`: the flags and what they say. Names and defaults are those of `vllm bench serve`."""

from __future__ import annotations

import argparse
import math
import os
import re
from dataclasses import dataclass
from typing import Any

from octavo.cli.bench.report import parse_percentiles, prepare_folder
from octavo.cli.bench.workload import DISTRIBUTIONS, ramp
from octavo.cli.values import json_object
from octavo.core.errors import ConfigError

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions", "vllm": "/v1/completions"}
POSITIVE = (
    *("num_prompts", "max_concurrency", "output_len", "random_input_len", "random_output_len"),
    *("prefix_repetition_num_prefixes", "prefix_repetition_prefix_len", "prefix_repetition_suffix_len"),
    "prefix_repetition_output_len",
)
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
GOODPUT_NAMES = ("ttft", "tpot", "e2el")
NAMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "latency",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    def flag(*names: str, **options: Any) -> None:
        group.add_argument(*names, **options)

    group = parser.add_argument_group("server")
    flag(
        "--backend",
        "--endpoint-type",
        choices=tuple(ENDPOINTS),
        default="openai",
        help="the kind of request (openai: completions)",
    )
    flag("--base-url", metavar="URL", help="as http://127.0.0.1:8000; default: from --host and --port")
    flag("--host", default="127.0.0.1", help="(127.0.0.1)")
    flag("--port", type=int, default=8000, metavar="N", help="(8000)")
    flag("--endpoint", metavar="PATH", help="default: that of the backend")
    flag("--model", metavar="NAME", help="to ask for; default: the first that the server lists")
    flag("--served-model-name", metavar="NAME", help="to ask for instead, --model then is what results call it")
    flag("--api-key", metavar="KEY", help="if the server asks for one (OPENAI_API_KEY)")
    flag("--header", action="append", default=[], metavar="NAME=VALUE", help="sent with each request; repeatable")
    flag("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields for each request")
    flag("--ready-check-timeout-sec", type=float, default=60, metavar="S", help="wait so long for the server (60)")

    group = parser.add_argument_group("load")
    flag("--num-prompts", type=int, default=1000, metavar="N", help="requests (1000)")
    flag("--request-rate", type=float, default=math.inf, metavar="R", help="requests a second (inf: all at once)")
    flag("--burstiness", type=float, default=1.0, metavar="B", help="1: a Poisson process; less: bursts (1)")
    flag("--max-concurrency", type=int, metavar="N", help="requests in flight, at most")
    flag("--num-warmups", type=int, default=1, metavar="N", help="requests before the first (1)")
    flag("--seed", type=int, default=0, metavar="N", help="of prompts, lengths and arrivals (0)")
    strategies = ("linear", "exponential")
    flag("--ramp-up-strategy", choices=strategies, help="the rate grows from the first request to the last")
    flag("--ramp-up-start-rps", type=float, metavar="R", help="requests a second at the start of it")
    flag("--ramp-up-end-rps", type=float, metavar="R", help="and at its end")
    flag("--temperature", type=float, metavar="T", help="default: the server's own, as of the next six")
    flag("--top-p", type=float, metavar="P", help="sent with each request")
    flag("--top-k", type=int, metavar="K", help="sent with each request")
    flag("--min-p", type=float, metavar="P", help="sent with each request")
    flag("--frequency-penalty", type=float, metavar="P", help="sent with each request")
    flag("--presence-penalty", type=float, metavar="P", help="sent with each request")
    flag("--repetition-penalty", type=float, metavar="P", help="sent with each request")
    flag("--logprobs", type=int, metavar="N", help="ask for so many alternatives of each token")
    flag("--ignore-eos", action="store_true", help="answers have exactly the length that is asked for")

    group = parser.add_argument_group("prompts")
    kinds = ("random", "prefix_repetition", "sharegpt", "custom")
    flag("--dataset-name", choices=kinds, default="random", help="where prompts come from (random)")
    flag("--dataset-path", metavar="FILE", help='sharegpt: its JSON; custom: {"prompt", "output_tokens"} a line')
    flag("--random-input-len", type=int, default=1024, metavar="N", help="tokens of a prompt (1024)")
    flag("--random-output-len", type=int, default=128, metavar="N", help="tokens of an answer (128)")
    flag("--random-prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share (0)")
    flag("--random-range-ratio", type=float, default=0.0, metavar="R", help="spread of both lengths, 0 to 1 (0)")
    flag("--length-distribution", choices=DISTRIBUTIONS, default="uniform", help="of random lengths (uniform)")
    flag("--prefix-repetition-prefix-len", type=int, default=256, metavar="N", help="(256)")
    flag("--prefix-repetition-suffix-len", type=int, default=256, metavar="N", help="(256)")
    flag("--prefix-repetition-num-prefixes", type=int, default=10, metavar="N", help="(10)")
    flag("--prefix-repetition-output-len", type=int, default=128, metavar="N", help="(128)")
    flag(
        "--output-len",
        "--sharegpt-output-len",
        "--custom-output-len",
        type=int,
        metavar="N",
        help="tokens of an answer, for sharegpt and custom",
    )

    group = parser.add_argument_group("result")
    flag("--percentile-metrics", default="ttft,tpot,itl", metavar="NAMES", help="of ttft, tpot, itl, e2el")
    flag("--metric-percentiles", default="99", metavar="P,...", help="as 50,90,99 (99)")
    flag("--goodput", nargs="+", default=[], metavar="NAME:MS", help="count requests that keep to this, as ttft:200")
    flag("--save-result", action="store_true", help="write JSON into --result-dir")
    flag("--save-detailed", action="store_true", help="with each request's own figures")
    flag("--label", metavar="NAME", help="of this run, in the JSON and the name of its file")
    flag("--metadata", nargs="+", default=[], metavar="KEY=VALUE", help="put into the JSON, as version=0.1")
    flag("--result-dir", default=".", metavar="FOLDER", help="(here)")
    flag("--result-filename", metavar="NAME", help="default: from backend, rate and time")
    flag("--disable-tqdm", action="store_true", help="no progress bar")


def run(args: argparse.Namespace) -> int:
    plan = Plan.of(args)
    import asyncio

    from octavo.cli.bench.load import measure

    return asyncio.run(measure(args, plan))


@dataclass(frozen=True, slots=True)
class Plan:
    """What the flags say, checked before anything is sent."""

    url: str
    path: str
    headers: dict[str, str]
    metrics: list[str]
    percentiles: list[float]
    goodput: dict[str, float]  # milliseconds
    rates: float | list[float]  # requests a second, of all or of each
    metadata: dict[str, str]

    @classmethod
    def of(cls, args: argparse.Namespace) -> Plan:
        """Raises ConfigError."""
        for name in POSITIVE:
            if (value := getattr(args, name)) is not None and value < 1:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        for name in ("num_warmups", "random_prefix_len"):
            if (value := getattr(args, name)) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}; it must be at least 0")
        if args.endpoint is not None and not re.fullmatch(r"/[!-~]*", args.endpoint):
            raise ConfigError(f"--endpoint is {args.endpoint!r}; it must look like /v1/completions")
        if not args.request_rate > 0 or not args.burstiness > 0:
            raise ConfigError("--request-rate and --burstiness must be greater than 0")
        if args.logprobs is not None and args.logprobs < 0:
            raise ConfigError(f"--logprobs is {args.logprobs}; it must be at least 0")
        metadata = dict(_pair("--metadata", text) for text in args.metadata)
        if args.save_result or args.save_detailed:
            prepare_folder(args.result_dir)
        if args.label is not None and not re.fullmatch(r"[^/\0]+", args.label):
            raise ConfigError(f"--label is {args.label!r}; it is part of a file's name: leave slashes out")
        if not 0 <= args.random_range_ratio <= 1:
            raise ConfigError(f"--random-range-ratio is {args.random_range_ratio}; it must be between 0 and 1")
        if (args.dataset_name in ("sharegpt", "custom")) != (args.dataset_path is not None):
            raise ConfigError("--dataset-path goes with --dataset-name sharegpt or custom, and they with it")
        metrics = [name.strip() for name in args.percentile_metrics.split(",")]
        for name in metrics:
            if name not in NAMES:
                raise ConfigError(f"--percentile-metrics has {name!r}; it must be of {', '.join(NAMES)}")
        try:
            percentiles = parse_percentiles(args.metric_percentiles)
        except ValueError as error:
            raise ConfigError(f"--metric-percentiles: {error}") from None
        key = args.api_key or os.environ.get("OPENAI_API_KEY") or os.environ.get("OCTAVO_API_KEY")
        if key is not None and not key.isprintable():
            raise ConfigError("the API key has characters that no header can have: look for a line break at its end")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return cls(
            args.base_url or f"http://{args.host}:{args.port}",
            args.endpoint or ENDPOINTS[args.backend],
            headers | dict(_pair("--header", text) for text in args.header),
            metrics,
            percentiles,
            dict(_objective(text) for text in args.goodput),
            _rates(args),
            metadata,
        )


def _rates(args: argparse.Namespace) -> float | list[float]:
    start, end = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy is None:
        if start is not None or end is not None:
            raise ConfigError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy: name it too")
        return float(args.request_rate)
    if not math.isinf(args.request_rate):
        raise ConfigError("--ramp-up-strategy has rates of its own: leave --request-rate out")
    if start is None or end is None or not 0 < start < math.inf or not 0 < end < math.inf:
        raise ConfigError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps, both greater than 0")
    return ramp(args.num_prompts, start, end, args.ramp_up_strategy)


def _pair(flag: str, text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals or any(c in text for c in "\r\n"):
        raise ConfigError(f"{flag} has {text!r}; it must look like NAME=VALUE")
    return name, value


def _objective(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        if name in GOODPUT_NAMES and float(value) >= 0:
            return name, float(value)
    except ValueError:
        pass
    raise ConfigError(f"--goodput has {text!r}; it must look like ttft:200, with one of {', '.join(GOODPUT_NAMES)}")
