"""What /metrics says, compared with what clients counted and with what docs/metrics.md promises."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import httpx
import msgspec
import pytest

from octavo.server.histogram import Histogram, one_two_five
from tests.server.exposition import Scrape, scrape
from tests.server.fake_engine import FAIL, MODEL_NAME
from tests.server.harness import ROOT, ServerProcess, fake_server_command, metric, server, wait_until

REFERENCE = {  # what a user of vLLM looks for: shared/reference/vllm-surface.md
    "gauge": "num_requests_running num_requests_waiting kv_cache_usage_perc cache_config_info",
    "counter": "prefix_cache_queries prefix_cache_hits num_preemptions prompt_tokens prompt_tokens_cached "
    "generation_tokens request_success",
    "histogram": "request_prompt_tokens request_generation_tokens request_params_n request_params_max_tokens "
    "iteration_tokens_total time_to_first_token_seconds inter_token_latency_seconds "
    "request_time_per_output_token_seconds e2e_request_latency_seconds request_queue_time_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds "
    "kv_block_lifetime_seconds kv_block_idle_before_evict_seconds kv_block_reuse_gap_seconds",
}
TIMES = (
    "time_to_first_token",
    "e2e_request_latency",
    "request_queue_time",
    "request_prefill_time",
    "request_decode_time",
)


@dataclass
class Tally:
    """What clients counted."""

    reasons: dict[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generation_tokens: int = 0
    cached_tokens: int = 0
    max_tokens: int = 0
    seconds: float = 0.0

    @property
    def requests(self) -> int:
        return sum(self.reasons.values())

    def add(self, reply: dict, max_tokens: int, num_prompts: int = 1) -> None:
        """A reply, or the last chunk of a stream with its usage."""
        for choice in reply["choices"]:
            reason = choice["finish_reason"]
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
        self.prompt_tokens += reply["usage"]["prompt_tokens"]
        self.generation_tokens += reply["usage"]["completion_tokens"]
        self.cached_tokens += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.max_tokens += max_tokens * num_prompts


@pytest.fixture(scope="module")
def small_server() -> Iterator[ServerProcess]:
    """The built-in model with a pool so small that requests preempt each other and evict what is cached."""
    flags = "--port 0 --max-model-len 256 --num-gpu-blocks-override 24 --max-num-seqs 8 --max-num-batched-tokens 64"
    watched = "--metrics-prefix vllm --kv-cache-metrics --kv-cache-metrics-sample 1"
    with server([sys.executable, "-m", "octavo", "serve", *flags.split(), *watched.split()]) as process:
        yield process


def test_every_name_of_the_reference_is_there_with_its_kind_and_its_labels(quick_server: ServerProcess) -> None:
    kinds = scrape(quick_server).kinds
    for kind, names in REFERENCE.items():
        for name in names.split():
            assert kinds[name] == kind, name
    labelled = [line for line in metrics_text(quick_server).splitlines() if line.startswith("octavo:")]
    assert all(f'model_name="{MODEL_NAME}"' in line and 'engine="0"' in line for line in labelled)
    for fact in ('block_size="16"', 'num_gpu_blocks="4096"', 'enable_prefix_caching="True"', 'cache_dtype="float32"'):
        assert fact in next(line for line in labelled if line.startswith("octavo:cache_config_info"))


def test_the_table_in_the_docs_is_what_the_server_shows(quick_server: ServerProcess) -> None:
    httpx.get(f"{quick_server.url}/health")
    told = {}
    for line in (ROOT / "docs" / "metrics.md").read_text().splitlines():
        if row := re.match(r"\| `(\w+)` \| (gauge|counter|histogram) \|", line):
            told[row[1].removesuffix("_total") if row[2] == "counter" else row[1]] = row[2]
    shown = {name: kind for name, kind in scrape(quick_server).kinds.items() if not re.match("process_|python_", name)}
    assert told == shown


def test_counts_are_exactly_what_the_clients_counted(small_server: ServerProcess) -> None:
    rng = random.Random(1)
    before = scrape(small_server, "vllm")
    tally = Tally()

    def ask(i: int) -> None:
        prompt = [rng.randint(1000, 30000) for _ in range(rng.randint(1, 100))]
        max_tokens = rng.randint(1, 40)
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "seed": i}
        began = time.monotonic()
        match i % 4:
            case 0:
                tally.add(post(small_server, body), max_tokens)
            case 1:
                tally.add(last_chunk(small_server, body), max_tokens)
            case 2:
                prompts = [prompt, prompt[:5], [7, *prompt[1:]]]
                tally.add(post(small_server, body | {"prompt": prompts}), max_tokens, num_prompts=3)
            case 3:
                ended = post(small_server, body | {"stop": ["e", "a", "i"], "temperature": 2})
                tally.add(ended, max_tokens)
        tally.seconds += time.monotonic() - began

    with ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(28)))
    for refused in ({"prompt": "x", "max_tokens": 10_000}, {"prompt": [1] * 400}, {"prompt": ""}, {"prompt": [-1]}):
        assert httpx.post(f"{small_server.url}/v1/completions", json=refused).status_code == 400
    after = scrape(small_server, "vllm")

    def grown(name: str) -> float:
        return after[name] - before[name]

    assert set(tally.reasons) == {"length", "stop"}
    for reason in ("stop", "length", "abort", "error"):
        assert grown(f"request_success_total{{{reason}}}") == tally.reasons.get(reason, 0)
    assert grown("prompt_tokens_total") == grown("request_prompt_tokens_sum") == tally.prompt_tokens
    assert grown("generation_tokens_total") == grown("request_generation_tokens_sum") == tally.generation_tokens
    assert grown("prompt_tokens_cached_total") == grown("prefix_cache_hits_total") == tally.cached_tokens
    assert grown("prefix_cache_queries_total") == tally.prompt_tokens
    assert grown("request_params_max_tokens_sum") == tally.max_tokens
    assert grown("request_params_n_sum") == tally.requests
    assert grown("inter_token_latency_seconds_count") == tally.generation_tokens - tally.requests
    for name in (*TIMES, "request_inference_time"):
        assert grown(f"{name}_seconds_count") == tally.requests, name
    # Preempted requests compute tokens again; what was cached is not computed.
    assert grown("num_preemptions_total") > 0
    assert grown("iteration_tokens_total_sum") > tally.prompt_tokens + tally.generation_tokens - tally.cached_tokens
    assert grown("kv_block_lifetime_seconds_count") == grown("kv_block_idle_before_evict_seconds_count") > 0
    assert_idle(after)
    assert_times_add_up(before, after, tally)


def test_cached_prompts_and_their_reuse_are_counted(small_server: ServerProcess) -> None:
    before = scrape(small_server, "vllm")
    prompt = list(range(2000, 2040))
    cached = [post(small_server, {"prompt": prompt, "max_tokens": 1})["usage"]["prompt_tokens_details"] for _ in "12"]
    after = scrape(small_server, "vllm")
    assert [details["cached_tokens"] for details in cached] == [0, 32]
    assert after["prompt_tokens_cached_total"] - before["prompt_tokens_cached_total"] == 32
    assert after["kv_block_reuse_gap_seconds_count"] - before["kv_block_reuse_gap_seconds_count"] == 2
    assert after["gpu_prefix_cache_hits_total"] == after["prefix_cache_hits_total"]


def test_who_leaves_is_counted_once_as_aborted(steady_server: ServerProcess) -> None:
    before = scrape(steady_server)
    with ThreadPoolExecutor(10) as pool:
        received = list(pool.map(lambda i: leave_after(steady_server, i), range(10)))
    wait_until(lambda: metric(steady_server, "num_requests_running") == 0)
    after = scrape(steady_server)
    grown = after.grown(
        before, "request_success_total{abort}", "request_success_total{length}", "generation_tokens_total"
    )
    assert list(grown.values())[:2] == [10, 0]
    assert sum(received) <= grown["generation_tokens_total"] < 1000
    assert (
        grown["generation_tokens_total"]
        == after["request_generation_tokens_sum"] - before["request_generation_tokens_sum"]
    )
    assert_idle(after)


def test_a_request_that_fails_is_counted_as_an_error(quick_server: ServerProcess) -> None:
    before = scrape(quick_server)
    assert httpx.post(f"{quick_server.url}/v1/completions", json={"prompt": FAIL.decode()}).status_code == 500
    name = "request_success_total{error}"
    assert scrape(quick_server)[name] - before[name] == 1


def test_requests_that_a_killed_engine_loses_are_errors_and_totals_stay(own_server: ServerProcess) -> None:
    post(own_server, {"prompt": "abc", "max_tokens": 5})
    with ThreadPoolExecutor(3) as pool:
        lost = [pool.submit(post, own_server, {"prompt": "abc", "max_tokens": 900}, 500) for _ in range(3)]
        wait_until(lambda: metric(own_server, "generation_tokens_total") > 20)
        before = scrape(own_server)
        os.kill(own_server.engine_pid(), signal.SIGKILL)
        for reply in lost:
            reply.result(10)
    after = scrape(own_server)
    assert after["request_success_total{error}"] == 3
    assert after["request_success_total{length}"] == 1
    assert all(after[name] >= before[name] for name in before.values if re.search("_total$|_count$|_sum$", name))
    assert after["num_requests_running"] == after["kv_cache_usage_perc"] == 0


def test_totals_go_on_where_a_killed_engine_left_them() -> None:
    with server([sys.executable, "-m", "octavo", "serve", "--port", "0", "--max-model-len", "128"]) as process:
        body = {"prompt": list(range(2000, 2040)), "max_tokens": 1}
        for life in (1, 2, 3):
            assert [post(process, body)["usage"]["prompt_tokens"] for _ in "12"] == [40, 40]
            seen = scrape(process)
            assert seen["prefix_cache_queries_total"] == seen["prompt_tokens_total"] == 80 * life
            assert seen["prefix_cache_hits_total"] == seen["prompt_tokens_cached_total"] == 32 * life  # anew in each
            assert seen["iteration_tokens_total_sum"] == 48 * life
            assert seen["request_success_total{length}"] == 2 * life
            os.kill(process.engine_pid(), signal.SIGKILL)
            wait_until(lambda: httpx.get(f"{process.url}/health").status_code == 503)
            assert scrape(process)["prefix_cache_queries_total"] == 80 * life
            wait_until(lambda: httpx.get(f"{process.url}/health").status_code == 200)
            assert scrape(process)["prefix_cache_hits_total"] == 32 * life


def test_times_of_the_engine_are_its_own_and_not_the_readers(own_server: ServerProcess) -> None:
    with httpx.stream(
        "POST", f"{own_server.url}/v1/completions", json={"prompt": "ab", "max_tokens": 20, "stream": True}
    ) as reply:
        time.sleep(1)  # the answer was there long ago
        reply.read()
    seen = scrape(own_server)
    assert 19 * 0.005 <= seen["request_decode_time_seconds_sum"] < 0.9
    assert 0.005 <= seen["request_prefill_time_seconds_sum"] < 0.9
    assert seen["request_prefill_time_seconds_sum"] <= seen["time_to_first_token_seconds_sum"]
    assert seen["e2e_request_latency_seconds_sum"] < 0.9


def test_routes_are_counted_by_status_and_unknown_paths_together(quick_server: ServerProcess) -> None:
    for path in ("/nowhere", "/nowhere/else", "/v1/models/echo"):
        httpx.get(f"{quick_server.url}{path}")
    httpx.get(f"{quick_server.url}/v1/completions")
    shown = metrics_text(quick_server)
    for route, method, status in (
        ("/v1/models/{model:path}", "GET", "2xx"),
        ("/v1/completions", "GET", "4xx"),
        ("none", "GET", "4xx"),
    ):
        assert f'\nhttp_requests_total{{handler="{route}",method="{method}",status="{status}"}} ' in shown
    assert "nowhere" not in shown


def test_another_prefix_changes_every_name() -> None:
    with server(fake_server_command(flags=("--metrics-prefix", "vllm"))) as process:
        lines = metrics_text(process).splitlines()
    assert not any("octavo:" in line for line in lines)
    assert f'vllm:num_requests_running{{engine="0",model_name="{MODEL_NAME}"}} 0.0' in lines


def test_a_histogram_counts_like_prometheus() -> None:
    histogram = Histogram((0.5, 1, 10))
    for value in (0.5, 0.6, 1, 11, 1000):
        histogram.observe(value)
    assert histogram.buckets() == [("0.5", 1), ("1.0", 3), ("10.0", 3), ("+Inf", 5)]
    assert histogram.count == 5
    assert histogram.sum == 1013.1
    assert one_two_five(50) == [1, 2, 5, 10, 20, 50]
    assert one_two_five(49) == [1, 2, 5, 10, 20]


def post(process: ServerProcess, body: dict, status: int = 200) -> dict:
    reply = httpx.post(f"{process.url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == status, reply.text
    return reply.json()


def last_chunk(process: ServerProcess, body: dict) -> dict:
    """The usage and the finish reason that a stream ends with, as one reply."""
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    choices = []
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=30) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {"):
                chunk = msgspec.json.decode(line[6:])
                choices += [choice for choice in chunk["choices"] if choice["finish_reason"]]
    return {"choices": choices, "usage": chunk["usage"]}


def leave_after(process: ServerProcess, num_events: int) -> int:
    """How many tokens came before the client left."""
    body = {"prompt": "leaving", "max_tokens": 900, "stream": True}
    with httpx.stream("POST", f"{process.url}/v1/completions", json=body, timeout=30) as reply:
        lines = reply.iter_lines()
        return sum(1 for _ in zip(range(num_events), (line for line in lines if line), strict=False))


def metrics_text(process: ServerProcess) -> str:
    return httpx.get(f"{process.url}/metrics").text


def assert_idle(seen: Scrape) -> None:
    assert seen["num_requests_running"] == seen["num_requests_waiting"] == seen["kv_cache_usage_perc"] == 0


def assert_times_add_up(before: Scrape, after: Scrape, tally: Tally) -> None:
    spent = after.grown(before, *(f"{name}_seconds_sum" for name in TIMES))
    first_token, whole, queue, prefill, decode = spent.values()
    inference = after["request_inference_time_seconds_sum"] - before["request_inference_time_seconds_sum"]
    assert min(spent.values()) > 0
    assert inference == pytest.approx(prefill + decode)
    assert queue + prefill <= first_token
    assert queue + inference <= whole
    # A batch of three is three requests in the time of one.
    assert whole <= 3 * tally.seconds
