"""`octavo bench latency` and `octavo bench throughput`: the engine in this process, without HTTP and without text."""

from __future__ import annotations

import argparse
import dataclasses
import os
import random
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.cli.bench.report import percentile, prepare_folder, write_json
from octavo.cli.bench.workload import DISTRIBUTIONS, Lengths
from octavo.cli.options import add_engine_flags, engine_config
from octavo.cli.table import format_table
from octavo.core.errors import ConfigError
from octavo.core.records import SamplingParams

if TYPE_CHECKING:
    from octavo.llm import LLM

LATENCY_PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_latency_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--input-len", type=int, default=32, metavar="N", help="tokens of a prompt (32)")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (128)")
    group.add_argument("--batch-size", type=int, default=8, metavar="N", help="prompts at once (8)")
    group.add_argument("--num-iters-warmup", type=int, default=2, metavar="N", help="batches before the first (2)")
    group.add_argument("--num-iters", type=int, default=10, metavar="N", help="batches that are measured (10)")
    group.add_argument("--output-json", metavar="FILE", help="write the result there too")
    add_engine_flags(parser)


def add_throughput_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("benchmark")
    group.add_argument("--num-prompts", type=int, default=100, metavar="N", help="requests (100)")
    group.add_argument("--input-len", type=int, default=256, metavar="N", help="tokens of a prompt (256)")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="tokens of an answer (128)")
    group.add_argument("--prefix-len", type=int, default=0, metavar="N", help="tokens that all prompts share (0)")
    group.add_argument("--random-range-ratio", type=float, default=0.0, metavar="R", help="spread of both lengths (0)")
    group.add_argument("--length-distribution", choices=DISTRIBUTIONS, default="uniform", help="of lengths (uniform)")
    group.add_argument("--output-json", metavar="FILE", help="write the result there too")
    add_engine_flags(parser)


def latency(args: argparse.Namespace) -> int:
    """How long a batch takes from its first prompt to its last token."""
    _check(args, positive=("input_len", "output_len", "batch_size", "num_iters"), others=("num_iters_warmup",))
    llm = _load(args)
    params = SamplingParams(max_tokens=args.output_len, ignore_eos=True, seed=0)
    generator = random.Random(args.seed or 0)
    _check_length(llm, args.input_len + args.output_len)
    seconds = []
    for i in range(args.num_iters_warmup + args.num_iters):
        prompts = [_token_ids(llm, args.input_len, generator) for _ in range(args.batch_size)]
        start = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        if i >= args.num_iters_warmup:
            seconds.append(time.perf_counter() - start)
    llm.close()
    seconds.sort()
    mean = sum(seconds) / len(seconds)
    points = {str(p): percentile(seconds, p) for p in LATENCY_PERCENTILES}
    print(format_table([("mean latency", f"{mean:.4f} s"), *((f"p{p}", f"{s:.4f} s") for p, s in points.items())]))
    if args.output_json:
        write_json(args.output_json, {"avg_latency": mean, "latencies": seconds, "percentiles": points})
    return 0


def throughput(args: argparse.Namespace) -> int:
    """How many tokens a second come out if everything is asked at once."""
    _check(args, positive=("num_prompts", "input_len", "output_len"), others=("prefix_len", "random_range_ratio"))
    generator = random.Random(args.seed or 0)
    inputs = Lengths(args.input_len, args.random_range_ratio, args.length_distribution)
    outputs = Lengths(args.output_len, args.random_range_ratio, args.length_distribution)
    llm = _load(args)
    prefix = _token_ids(llm, args.prefix_len, generator)
    prompts = [prefix + _token_ids(llm, inputs.draw(generator), generator) for _ in range(args.num_prompts)]
    lengths = [outputs.draw(generator) for _ in prompts]
    _check_length(llm, max(len(prompt) + length for prompt, length in zip(prompts, lengths, strict=True)))
    params = [SamplingParams(max_tokens=length, ignore_eos=True, seed=i) for i, length in enumerate(lengths)]
    llm.generate(_token_ids(llm, 8, generator), SamplingParams(max_tokens=4, ignore_eos=True))
    start = time.perf_counter()
    results = llm.generate(prompts, params, use_tqdm=False)
    elapsed = time.perf_counter() - start
    llm.close()
    output_tokens = sum(len(result.outputs[0].token_ids) for result in results)
    prompt_tokens = sum(map(len, prompts))
    cached = sum(result.num_cached_tokens for result in results)
    result = {
        "elapsed_time": elapsed,
        "num_requests": len(prompts),
        "total_prompt_tokens": prompt_tokens,
        "total_cached_tokens": cached,
        "total_output_tokens": output_tokens,
        "total_num_tokens": prompt_tokens + output_tokens,
        "requests_per_second": len(prompts) / elapsed,
        "output_tokens_per_second": output_tokens / elapsed,
        "tokens_per_second": (prompt_tokens + output_tokens) / elapsed,
    }
    print(
        format_table(
            [
                ("requests", f"{len(prompts)} in {elapsed:.2f} s, {result['requests_per_second']:.2f} a second"),
                ("prompt tokens", f"{prompt_tokens:,}, {cached:,} of them from the prefix cache"),
                ("output tokens", f"{output_tokens:,}, {result['output_tokens_per_second']:,.1f} a second"),
                ("all tokens", f"{result['tokens_per_second']:,.1f} a second"),
            ]
        )
    )
    if args.output_json:
        write_json(args.output_json, result)
    return 0


def _load(args: argparse.Namespace) -> LLM:
    from octavo.llm import LLM

    config = engine_config(args)
    start = time.perf_counter()
    llm = LLM(**{field.name: getattr(config, field.name) for field in dataclasses.fields(config)})
    info = llm.info
    print(
        f"{info.served_model_name}: {info.isa}, {info.threads} threads, loaded in {time.perf_counter() - start:.2f} s",
        file=sys.stderr,
    )
    return llm


def _token_ids(llm: LLM, count: int, generator: random.Random) -> list[int]:
    """Random tokens, away from the ends of the vocabulary, where special ones are."""
    vocab_size = llm.info.vocab_size
    return generator.choices(range(vocab_size // 50, vocab_size * 9 // 10), k=count)


def _check_length(llm: LLM, longest: int) -> None:
    limit = llm.info.max_model_len
    if longest > limit:
        raise ConfigError(
            f"a prompt and its answer have {longest:,} tokens, the model's length is {limit:,}: ask for shorter ones"
        )


def _check(args: argparse.Namespace, positive: Sequence[str], others: Sequence[str]) -> None:
    """Before a model is loaded. Raises ConfigError."""
    for name in (*positive, *others):
        least = 1 if name in positive else 0
        if not getattr(args, name) >= least:
            raise ConfigError(f"--{name.replace('_', '-')} is {getattr(args, name)}; it must be at least {least}")
    if args.output_json:
        prepare_folder(os.path.dirname(args.output_json) or ".")
