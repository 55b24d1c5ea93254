"""`octavo bench serve`: sends a load to a server and makes figures of its answers.

Figures have the names of `vllm bench serve`. Knows neither HTTP (`http_client`) nor how prompts are made (`workload`).
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from octavo.cli.bench.http_client import Answer, Client, RefusedError
from octavo.cli.bench.report import statistics, write_json
from octavo.cli.bench.serve import NAMES, SAMPLING, Plan
from octavo.cli.bench.workload import Lengths, Sample, arrival_times, dataset_samples, random_samples
from octavo.cli.table import format_table
from octavo.core.errors import ConfigError

CALIBRATION_WORDS = 64


async def measure(args: argparse.Namespace, plan: Plan) -> int:
    """Send the load, show the figures. 0 if any request was answered. Raises ConfigError."""
    for name in plan.metadata.keys() & _figures(args, plan, "", [], 1.0).keys():
        raise ConfigError(f"--metadata sets {name!r}, which is a figure of the result: choose another name")
    client = Client(plan.url, plan.headers)
    try:
        model = await _ready(client, args)
        asker = _Asker(client, plan.path, model, args)
        samples = await _samples(args, asker)
        for sample in samples[: args.num_warmups]:
            answer = await asker.ask(sample)
            if answer.error is not None:
                raise ConfigError(f"the first request failed ({answer.error}): mend that before you measure")
        start = time.perf_counter()
        answers = await _send_all(args, plan, asker, samples)
        duration = time.perf_counter() - start
    finally:
        client.close()
    result = _figures(args, plan, model, answers, duration)
    _show(result, plan)
    if args.save_result or args.save_detailed:
        _save(args, plan.metadata | result, answers, start)
    return 0 if result["completed"] else 1


async def _ready(client: Client, args: argparse.Namespace) -> str:
    """The model's name, once the server answers."""
    deadline = time.monotonic() + args.ready_check_timeout_sec
    while True:
        try:
            listed = await client.get("/v1/models")
            return str(args.served_model_name or args.model or listed["data"][0]["id"])
        except (LookupError, TypeError):
            raise ConfigError("/v1/models lists no model: name one with --model") from None
        except RefusedError as error:
            named = args.served_model_name or args.model
            if named and error.status == 404:  # not every server lists its models
                return str(named)
            if error.status < 500:
                raise
            if time.monotonic() >= deadline:
                raise
        except ConfigError:
            if time.monotonic() >= deadline:
                raise
        await asyncio.sleep(0.2)


class _Asker:
    """Turns samples into requests."""

    def __init__(self, client: Client, path: str, model: str, args: argparse.Namespace) -> None:
        self._client = client
        self._path = path
        self._is_chat = "chat" in path
        self._fields: dict[str, Any] = {
            "model": model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name in SAMPLING if (value := getattr(args, name)) is not None},
            **({} if args.logprobs is None else self._logprobs(args.logprobs)),
            **({"ignore_eos": True} if args.ignore_eos else {}),
            **args.extra_body,
        }

    def _logprobs(self, count: int) -> dict[str, Any]:
        return {"logprobs": True, "top_logprobs": count} if self._is_chat else {"logprobs": count}

    async def ask(self, sample: Sample) -> Answer:
        ask: dict[str, Any]
        if self._is_chat:
            ask = {"messages": [{"role": "user", "content": sample.prompt}]}
        else:
            ask = {"prompt": sample.prompt}
        return await self._client.stream(self._path, {**ask, "max_tokens": sample.output_tokens, **self._fields})


async def _samples(args: argparse.Namespace, asker: _Asker) -> list[Sample]:
    generator = random.Random(args.seed)
    if args.dataset_name in ("sharegpt", "custom"):
        return dataset_samples(args.dataset_path, args.num_prompts, args.output_len, generator)
    words = await _words_for_tokens(asker)
    spread, distribution = args.random_range_ratio, args.length_distribution
    if args.dataset_name == "prefix_repetition":
        return random_samples(
            args.num_prompts,
            Lengths(words(args.prefix_repetition_suffix_len)),
            Lengths(args.prefix_repetition_output_len),
            generator,
            prefix=words(args.prefix_repetition_prefix_len),
            num_prefixes=args.prefix_repetition_num_prefixes,
        )
    return random_samples(
        args.num_prompts,
        Lengths(words(args.random_input_len), spread, distribution),
        Lengths(args.random_output_len, spread, distribution),
        generator,
        prefix=words(args.random_prefix_len) if args.random_prefix_len else 0,
    )


async def _words_for_tokens(asker: _Asker) -> Callable[[int], int]:
    """A function from tokens to the words that make about so many, found by two questions to the server."""
    counts = []
    for num_words in (1, CALIBRATION_WORDS):
        (sample,) = random_samples(1, Lengths(num_words), Lengths(1), random.Random(0))
        answer = await asker.ask(sample)
        if answer.error is not None:
            raise ConfigError(f"the first request failed ({answer.error}): mend that before you measure")
        counts.append(answer.prompt_tokens)
    if counts[1] <= counts[0]:
        raise ConfigError("the server's usage does not say how many tokens a prompt has: use --dataset-name custom")
    tokens_a_word = (counts[1] - counts[0]) / (CALIBRATION_WORDS - 1)
    return lambda num_tokens: max(1, round(num_tokens / tokens_a_word))


async def _send_all(args: argparse.Namespace, plan: Plan, asker: _Asker, samples: Sequence[Sample]) -> list[Answer]:
    from tqdm import tqdm  # type: ignore[import-untyped]

    times = arrival_times(len(samples), plan.rates, args.burstiness, random.Random(args.seed + 1))
    slots = asyncio.Semaphore(args.max_concurrency or len(samples))
    start = time.perf_counter()
    with tqdm(total=len(samples), disable=args.disable_tqdm or None, unit=" requests", file=sys.stderr) as bar:

        async def send(sample: Sample, at: float) -> Answer:
            await asyncio.sleep(at - (time.perf_counter() - start))
            async with slots:
                answer = await asker.ask(sample)
            bar.update()
            return answer

        return await asyncio.gather(*(send(sample, at) for sample, at in zip(samples, times, strict=True)))


def _figures(
    args: argparse.Namespace, plan: Plan, model: str, answers: Sequence[Answer], duration: float
) -> dict[str, Any]:
    good = [answer for answer in answers if answer.error is None]
    times: dict[str, list[float]] = {
        "ttft": [a.chunk_times[0] - a.start for a in good if a.chunk_times],
        "tpot": [_time_per_token(a) for a in good if a.output_tokens > 1 and a.chunk_times],
        "itl": [b - a for answer in good for a, b in itertools.pairwise(answer.chunk_times)],
        "e2el": [a.end - a.start for a in good],
    }
    prompt, output = sum(a.prompt_tokens for a in good), sum(a.output_tokens for a in good)
    result: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": args.backend,
        "endpoint": plan.path,
        "label": args.label,
        "model_id": args.model or model,
        "num_prompts": len(answers),
        "request_rate": args.request_rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **_ramp_figures(args),
        "duration": duration,
        "completed": len(good),
        "failed": len(answers) - len(good),
        "total_input_tokens": prompt,
        "total_output_tokens": output,
        "request_throughput": len(good) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (prompt + output) / duration,
        "num_without_usage": sum(not a.has_usage for a in good),
        "errors": sorted({a.error for a in answers if a.error is not None})[:10],
    }
    if plan.goodput:
        result["request_goodput"] = sum(_is_good(a, plan.goodput) for a in good) / duration
    for name in plan.metrics:
        result |= statistics(times[name], plan.percentiles, name)
    return result


def _ramp_figures(args: argparse.Namespace) -> dict[str, Any]:
    names = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    return {} if args.ramp_up_strategy is None else {name: getattr(args, name) for name in names}


def _time_per_token(answer: Answer) -> float:
    return (answer.chunk_times[-1] - answer.chunk_times[0]) / (answer.output_tokens - 1)


def _is_good(answer: Answer, goodput: dict[str, float]) -> bool:
    measured = {
        "ttft": answer.chunk_times[0] - answer.start if answer.chunk_times else 0.0,
        "tpot": _time_per_token(answer) if answer.output_tokens > 1 and answer.chunk_times else 0.0,
        "e2el": answer.end - answer.start,
    }
    return all(1000 * measured[name] <= limit for name, limit in goodput.items())


def _show(result: dict[str, Any], plan: Plan) -> None:
    rows = [
        ("requests", f"{result['completed']} answered, {result['failed']} failed, in {result['duration']:.2f} s"),
        ("requests a second", f"{result['request_throughput']:.2f}"),
        ("prompt tokens", f"{result['total_input_tokens']:,}"),
        ("output tokens", f"{result['total_output_tokens']:,}, {result['output_throughput']:,.1f} a second"),
        ("all tokens", f"{result['total_token_throughput']:,.1f} a second"),
    ]
    if plan.goodput:
        rows.append(("goodput", f"{result['request_goodput']:.2f} requests a second"))
    for name in plan.metrics:
        figures = ", ".join(
            f"{key.removesuffix(f'_{name}_ms')} {value:,.1f}"
            for key, value in result.items()
            if key.endswith(f"_{name}_ms") and not key.startswith(("std_", "p50_"))
        )
        rows.append((f"{NAMES[name]}, ms", figures))
    print(format_table(rows))
    if count := result["num_without_usage"]:
        print(
            f"octavo: warning: {count} answers came without usage: prompts are not counted, and each chunk as a token",
            file=sys.stderr,
        )
    for error in result["errors"]:
        print(f"octavo: failed: {error}", file=sys.stderr)


def _save(args: argparse.Namespace, result: dict[str, Any], answers: Sequence[Answer], start: float) -> None:
    if args.save_detailed:
        result = result | {
            "input_lens": [a.prompt_tokens for a in answers],
            "output_lens": [a.output_tokens for a in answers],
            "start_times": [a.start - start for a in answers],
            "ttfts": [a.chunk_times[0] - a.start if a.chunk_times else None for a in answers],
            "itls": [[later - earlier for earlier, later in itertools.pairwise(a.chunk_times)] for a in answers],
            "generated_texts": [a.text for a in answers],
            "request_errors": [a.error for a in answers],
        }
    rate = f"{args.request_rate:g}qps"
    name = args.result_filename or f"{args.label or args.backend}-{rate}-{result['date']}.json"
    path = os.path.join(args.result_dir, name)
    write_json(path, result)
    print(f"written to {path}")
