"""Prometheus metrics under vLLM's names with a prefix of choice. Counts and times; knows nothing of replies.

What concerns a request is observed when its outputs arrive from the engine, so a client that reads slowly, or not at
all, changes nothing. Times within the engine are the engine's own: both processes have one monotonic clock.
docs/metrics.md has the table.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from octavo.core.clock import Clock
from octavo.core.records import EngineStats, FinishReason, Request, RequestOutput
from octavo.engine.supervisor import EngineSupervisor
from octavo.server.histogram import Histogram, one_two_five

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
DEFAULT_PREFIX = "octavo"
ENGINE_LABEL = "0"  # one engine per server so far
LABELS = ("model_name", "engine")

FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
EACH_TOKEN = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10)
REQUEST = (0.01, 0.02, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
BLOCK = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
SAMPLES = (1, 2, 5, 10, 20)
HTTP_REPLY = (0.001, 0.01, 0.1, 0.5, 1, 5, 10, 60)

# Names of vLLM's own past that dashboards still ask for, and whose meaning has not changed.
ALIASES = {
    "gpu_cache_usage_perc": "kv_cache_usage_perc",
    "gpu_prefix_cache_queries": "prefix_cache_queries",
    "gpu_prefix_cache_hits": "prefix_cache_hits",
    "time_per_output_token_seconds": "inter_token_latency_seconds",
}


class Metrics:
    """Everything that is counted, for one server and the engines that it has one after the other."""

    def __init__(self, client: EngineSupervisor, clock: Clock, prefix: str = DEFAULT_PREFIX) -> None:
        self.clock = clock
        self.prompt_tokens = 0
        self.prompt_tokens_cached = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.http_replies: dict[tuple[str, str, str], int] = {}  # by route, method and class of status
        self.http_seconds: dict[tuple[str, str], Histogram] = {}  # by route and method

        self._texts: dict[Histogram, tuple[str, str]] = {}

        def histogram(name: str, text: str, bounds: tuple[float, ...] | list[float]) -> Histogram:
            made = Histogram(bounds)
            self._texts[made] = (name, text)
            return made

        lengths = one_two_five(client.info.max_model_len)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens of a request.", lengths)
        self.request_generation_tokens = histogram(
            "request_generation_tokens", "Tokens that a request generated.", lengths
        )
        self.request_params_n = histogram("request_params_n", "The parameter n of a request.", SAMPLES)
        self.request_params_max_tokens = histogram(
            "request_params_max_tokens", "The parameter max_tokens of a request, or what takes its place.", lengths
        )
        self.iteration_tokens = histogram("iteration_tokens_total", "Tokens computed in an engine step.", STEP_TOKENS)
        self.first_token = histogram(
            "time_to_first_token_seconds", "From arrival at the server to the first token.", FIRST_TOKEN
        )
        self.inter_token = histogram("inter_token_latency_seconds", "Between two tokens of a request.", EACH_TOKEN)
        self.time_per_output_token = histogram(
            "request_time_per_output_token_seconds", "Decoding time of a request for each token but one.", EACH_TOKEN
        )
        self.e2e = histogram("e2e_request_latency_seconds", "From arrival to the end of a request.", REQUEST)
        self.queue = histogram("request_queue_time_seconds", "From the engine's queue to the first step.", REQUEST)
        self.prefill = histogram("request_prefill_time_seconds", "From the first step to the first token.", REQUEST)
        self.decode = histogram("request_decode_time_seconds", "From the first token to the last.", REQUEST)
        self.inference = histogram("request_inference_time_seconds", "From the first step to the last token.", REQUEST)
        self.block_lifetime = histogram("kv_block_lifetime_seconds", "Of an evicted block since allocated.", BLOCK)
        self.block_idle = histogram(
            "kv_block_idle_before_evict_seconds", "Of an evicted block since its last use.", BLOCK
        )
        self.block_reuse_gap = histogram("kv_block_reuse_gap_seconds", "Between two uses of a cached block.", BLOCK)

        self._client = client
        self._prefix = prefix
        self._labels = (client.info.served_model_name, ENGINE_LABEL)
        self._registry = CollectorRegistry()
        self._registry.register(self)
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        client.on_stats = self._on_stats

    def observer(self, request: Request) -> RequestObserver:
        return RequestObserver(self, request)

    def count_http(self, route: str, method: str, status: int, seconds: float) -> None:
        """An answered request; `route` is a route's path as the router knows it, so there are not many."""
        key = (route, method, f"{status // 100}xx")
        self.http_replies[key] = self.http_replies.get(key, 0) + 1
        histogram = self.http_seconds.get(key[:2])
        if histogram is None:
            histogram = self.http_seconds[key[:2]] = Histogram(HTTP_REPLY)
        histogram.observe(seconds)

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """What prometheus_client asks of a collector."""
        plain = {family.name.removeprefix(f"{self._prefix}:"): family for family in self._families()}
        yield from plain.values()
        for alias, name in ALIASES.items():
            yield _renamed(plain[name], f"{self._prefix}:{name}", f"{self._prefix}:{alias}")
        yield from self._http_families()

    def _families(self) -> Iterator[Metric]:
        stats, live = self._client.totals, self._client.is_alive  # a dead engine runs and holds nothing
        in_use, num_blocks = stats.num_blocks_in_use * live, self._client.info.num_blocks
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_requests_running * live)
        yield self._gauge(
            "num_requests_waiting", "Requests waiting for their first or next turn.", stats.num_requests_waiting * live
        )
        yield self._gauge(
            "kv_cache_usage_perc",
            "Share of KV blocks held by live requests, 0 to 1; idle cached blocks do not count.",
            in_use / num_blocks,
        )
        yield self._gauge("num_free_gpu_blocks", "KV blocks that no live request holds.", num_blocks - in_use)
        yield self._cache_config()
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.prefix_cache_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.prefix_cache_hits)
        yield self._counter(
            "num_preemptions", "Times a running request had to give its blocks back.", stats.num_preemptions
        )
        yield self._counter("engine_restarts", "Times the engine was started again.", self._client.num_restarts)
        yield self._counter("prompt_tokens", "Prompt tokens of requests with a first token.", self.prompt_tokens)
        yield self._counter(
            "prompt_tokens_cached", "Of these, tokens from the prefix cache.", self.prompt_tokens_cached
        )
        yield self._counter("generation_tokens", "Tokens generated.", self.generation_tokens)
        finished = CounterMetricFamily(
            f"{self._prefix}:request_success", "Requests that ended, by reason.", labels=(*LABELS, "finished_reason")
        )
        for reason, count in self.finished.items():
            finished.add_metric((*self._labels, reason.value), count)
        yield finished
        for histogram, (name, text) in self._texts.items():
            family = HistogramMetricFamily(f"{self._prefix}:{name}", text, labels=LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.sum)
            yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _cache_config(self) -> Metric:
        info = self._client.info
        facts = {
            "block_size": info.block_size,
            "cache_dtype": info.kv_cache_dtype,
            "num_gpu_blocks": info.num_blocks,
            "enable_prefix_caching": info.enable_prefix_caching,
        }
        family = GaugeMetricFamily(
            f"{self._prefix}:cache_config_info", "The KV cache's settings, as labels.", labels=(*LABELS, *facts)
        )
        family.add_metric((*self._labels, *map(str, facts.values())), 1)
        return family

    def _http_families(self) -> Iterator[Metric]:
        replies = CounterMetricFamily(
            "http_requests", "HTTP requests answered, by route.", labels=("handler", "method", "status")
        )
        for key, count in self.http_replies.items():
            replies.add_metric(key, count)
        yield replies
        seconds = HistogramMetricFamily(
            "http_request_duration_seconds", "Until the end of the reply.", labels=("handler", "method")
        )
        for labels, histogram in self.http_seconds.items():
            seconds.add_metric(labels, histogram.buckets(), histogram.sum)
        yield seconds

    def _on_stats(self, stats: EngineStats) -> None:
        if stats.num_step_tokens:
            self.iteration_tokens.observe(stats.num_step_tokens)
        if stats.block_times is not None:
            for histogram, times in (
                (self.block_lifetime, stats.block_times.lifetimes),
                (self.block_idle, stats.block_times.idle_times),
                (self.block_reuse_gap, stats.block_times.reuse_gaps),
            ):
                for seconds in times:
                    histogram.observe(seconds)


class RequestObserver:
    """Observes one request, output by output; hears of its end exactly once."""

    __slots__ = (
        "_first_step_time",
        "_last_step_time",
        "_last_time",
        "_metrics",
        "_num_tokens",
        "_queued_time",
        "_request",
        "_scheduled_time",
    )

    def __init__(self, metrics: Metrics, request: Request) -> None:
        self._metrics = metrics
        self._request = request
        self._num_tokens = 0
        self._last_time = 0.0

    def observe(self, output: RequestOutput, step_time: float) -> None:
        """As `octavo.engine.client.Observer` has it. Called for each token: keep it cheap."""
        metrics = self._metrics
        if output.token_ids:
            now = metrics.clock.now()
            if self._num_tokens:
                metrics.inter_token.observe(now - self._last_time)
            else:
                self._begin(output, step_time, now)
            self._num_tokens += len(output.token_ids)
            metrics.generation_tokens += len(output.token_ids)
            self._last_time = now
            self._last_step_time = step_time
        if output.finish_reason is not None:
            self._end(output.finish_reason)

    def _begin(self, output: RequestOutput, step_time: float, now: float) -> None:
        self._metrics.first_token.observe(now - self._request.arrival_time)
        self._metrics.prompt_tokens += len(self._request.prompt_token_ids)
        self._metrics.prompt_tokens_cached += output.num_cached_tokens or 0
        self._queued_time = output.queued_time
        self._scheduled_time = output.scheduled_time
        self._first_step_time = step_time

    def _end(self, reason: FinishReason) -> None:
        metrics, request = self._metrics, self._request
        metrics.finished[reason] += 1
        metrics.e2e.observe(metrics.clock.now() - request.arrival_time)
        metrics.request_prompt_tokens.observe(len(request.prompt_token_ids))
        metrics.request_generation_tokens.observe(self._num_tokens)
        metrics.request_params_n.observe(1)  # the only n that the door lets in
        assert request.params.max_tokens is not None, "the door resolves it"
        metrics.request_params_max_tokens.observe(request.params.max_tokens)
        if self._num_tokens:
            metrics.queue.observe(self._scheduled_time - self._queued_time)
            metrics.prefill.observe(self._first_step_time - self._scheduled_time)
            metrics.inference.observe(self._last_step_time - self._scheduled_time)
            decode = self._last_step_time - self._first_step_time
            metrics.decode.observe(decode)
            if self._num_tokens > 1:
                metrics.time_per_output_token.observe(decode / (self._num_tokens - 1))


def _renamed(family: Metric, name: str, alias: str) -> Metric:
    """The same samples under another name."""
    copy = Metric(alias, f"The older name of {name}.", family.type)
    copy.samples = [sample._replace(name=alias + sample.name.removeprefix(name)) for sample in family.samples]
    return copy
