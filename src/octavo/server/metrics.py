"""Prometheus metrics under vLLM's names with the prefix `octavo:`. Counts and times; knows nothing of replies.

Gauges and totals come from the engine's newest snapshot when they are asked for; latencies are observed here, where
the client's clock runs.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4

from octavo.core.clock import Clock
from octavo.core.records import RequestOutput
from octavo.engine.client import EngineClient

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
ENGINE_LABEL = "0"  # one engine per server so far
TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160)
INTER_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5, 10)
LATENCY_BUCKETS = (0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class EngineCollector:
    """Shows the engine's snapshot as metric families."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    def collect(self) -> Iterator[Metric]:
        s = self._client.stats
        live = self._client.is_alive  # a dead engine runs and holds nothing; its totals stay
        gauges = (
            ("num_requests_running", "Requests in the running batch.", s.num_requests_running * live),
            ("num_requests_waiting", "Requests waiting for their first or next turn.", s.num_requests_waiting * live),
            (
                "kv_cache_usage_perc",
                "Share of KV blocks held by live requests, 0 to 1; idle cached blocks do not count.",
                s.num_blocks_in_use * live / max(s.num_blocks, 1),
            ),
        )
        counters = (
            ("prompt_tokens", "Prompt tokens processed.", s.prompt_tokens),
            ("generation_tokens", "Tokens generated.", s.generation_tokens),
            ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", s.prefix_cache_queries),
            ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", s.prefix_cache_hits),
            ("num_preemptions", "Times a running request had to give its blocks back.", s.num_preemptions),
        )
        labels = (self._client.info.served_model_name, ENGINE_LABEL)
        for name, text, value in gauges:
            gauge = GaugeMetricFamily(f"octavo:{name}", text, labels=("model_name", "engine"))
            gauge.add_metric(labels, value)
            yield gauge
        for name, text, value in counters:
            counter = CounterMetricFamily(f"octavo:{name}", text, labels=("model_name", "engine"))
            counter.add_metric(labels, value)
            yield counter


class Metrics:
    def __init__(self, client: EngineClient, clock: Clock) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(client))
        self._clock = clock
        self._labels = (client.info.served_model_name, ENGINE_LABEL)

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            family = Histogram(
                f"octavo:{name}", text, ("model_name", "engine"), buckets=buckets, registry=self._registry
            )
            return family.labels(*self._labels)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From arrival to the first token.", TTFT_BUCKETS
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two tokens of one request.", INTER_TOKEN_BUCKETS
        )
        self.e2e_latency = histogram("e2e_request_latency_seconds", "From arrival to the last token.", LATENCY_BUCKETS)
        self._finished = Counter(
            "octavo:request_success",
            "Requests that ended, by reason.",
            ("model_name", "engine", "finished_reason"),
            registry=self._registry,
        )

    def timer(self, arrival_time: float) -> RequestTimer:
        return RequestTimer(self, self._clock, arrival_time)

    def count_finished(self, reason: str) -> None:
        self._finished.labels(*self._labels, reason).inc()

    def render(self) -> bytes:
        """The text exposition format."""
        return generate_latest(self._registry)


class RequestTimer:
    """Observes the latencies of one request, output by output."""

    def __init__(self, metrics: Metrics, clock: Clock, arrival_time: float) -> None:
        self._metrics = metrics
        self._clock = clock
        self._arrival_time = arrival_time
        self._last_token_time: float | None = None

    def observe(self, output: RequestOutput) -> None:
        now = self._clock.now()
        if output.token_ids:
            if self._last_token_time is None:
                self._metrics.time_to_first_token.observe(now - self._arrival_time)
            else:
                self._metrics.inter_token_latency.observe(now - self._last_token_time)
            self._last_token_time = now
        if output.finish_reason is not None:
            self._metrics.e2e_latency.observe(now - self._arrival_time)
            self._metrics.count_finished(output.finish_reason.value)
