"""What Prometheus reads: names and labels that dashboards made for vLLM know, under the prefix `pageframe:`.

Gauges are read from the engine's counters when they are scraped; histograms are observed here, where the tokens
arrive. Each server has its own registry. Knows nothing of HTTP.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pageframe.api.latencies import RecentLatencies
from pageframe.runtime.config import ResolvedConfig
from pageframe.runtime.inspection import EngineStats

PREFIX = "pageframe:"
# A time of creation beside every sample would double what is scraped, and no dashboard reads it.
disable_created_metrics()  # type: ignore[no-untyped-call]

FINISH_REASONS = ("stop", "length", "abort", "error")
#: Seconds. A token of a small model takes about a millisecond, so that is where the buckets start.
TIME_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
TOKEN_BUCKETS = tuple(float(2**power) for power in range(18))


class Metrics:
    """The counters of one server.

    Args:
        model_name: the label every sample carries.
        stats: the engine's latest counters, asked at each scrape.
    """

    def __init__(self, model_name: str, resolved: ResolvedConfig, stats: Callable[[], EngineStats]) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(model_name, resolved, stats))
        self._model_name = model_name
        #: The last minute's, for whoever watches.
        self.latencies = RecentLatencies()
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got their first token.")
        self._generation_tokens = self._counter("generation_tokens", "Output tokens.")
        self._num_refused = self._counter("num_refused", "Requests refused because the queue was full.")
        finished = Counter(
            f"{PREFIX}request_success",
            "Choices that ended, by how.",
            ["model_name", "finished_reason"],
            registry=self.registry,
        )
        self._finished = {reason: finished.labels(model_name, reason) for reason in FINISH_REASONS}
        self._first_token = self._histogram(
            "time_to_first_token_seconds", "From the request's arrival to its first token.", TIME_BUCKETS
        )
        self._between_tokens = self._histogram(
            "inter_token_latency_seconds",
            "Between a choice's tokens; tokens that come together share it.",
            TIME_BUCKETS,
        )
        self._request_time = self._histogram(
            "e2e_request_latency_seconds", "From a request's arrival to a choice's last token.", TIME_BUCKETS
        )
        self._queue_time = self._histogram(
            "request_queue_time_seconds", "From a request's arrival at the engine to its first step.", TIME_BUCKETS
        )
        self._prefill_time = self._histogram(
            "request_prefill_time_seconds", "From a request's first step to its first token.", TIME_BUCKETS
        )
        self._step_tokens = self._histogram(
            "iteration_tokens_total", "Tokens that a step computed, of prompts and of answers.", TOKEN_BUCKETS
        )
        self._decode_time = self._histogram(
            "request_decode_time_seconds", "From a choice's first token to its last.", TIME_BUCKETS
        )
        self._request_prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", TOKEN_BUCKETS)
        self._request_output = self._histogram("request_generation_tokens", "Output tokens of a choice.", TOKEN_BUCKETS)

    def exposition(self) -> bytes:
        """All samples in Prometheus' text format."""
        return generate_latest(self.registry)

    def step(self, num_tokens: int) -> None:
        """The engine made a step of so many tokens."""
        self._step_tokens.observe(num_tokens)

    def first_token(
        self, seconds: float, num_prompt_tokens: int, *, queued_seconds: float, prefill_seconds: float
    ) -> None:
        """A request got its first token, so many seconds after it arrived; the engine's share of them beside."""
        self._first_token.observe(seconds)
        self.latencies.first_token.add(seconds)
        self._queue_time.observe(queued_seconds)
        self._prefill_time.observe(prefill_seconds)
        self._prompt_tokens.inc(num_prompt_tokens)
        self._request_prompt.observe(num_prompt_tokens)

    def tokens(self, num_tokens: int, seconds: float | None) -> None:
        """Output tokens of a choice came, so many seconds after the ones before; None for its first.

        None at all where an end token ended it and is no part of it, since a stop string did before.
        """
        self._generation_tokens.inc(num_tokens)
        if seconds is not None and num_tokens:
            self.latencies.between_tokens.add(seconds / num_tokens, num_tokens)
            for _ in range(num_tokens):
                self._between_tokens.observe(seconds / num_tokens)

    def completed(self, reason: str, *, request_seconds: float, decode_seconds: float, num_tokens: int) -> None:
        """A choice came to its own end."""
        self._finished[reason].inc()
        self._request_time.observe(request_seconds)
        self.latencies.requests.add(request_seconds)
        self._decode_time.observe(decode_seconds)
        self._request_output.observe(num_tokens)

    def cut_short(self, reason: str) -> None:
        """A choice ended before its own end: "abort" or "error"."""
        self._finished[reason].inc()

    def refused(self) -> None:
        """A request found the queue full."""
        self._num_refused.inc()

    def _counter(self, name: str, help: str) -> Counter:
        return Counter(f"{PREFIX}{name}", help, ["model_name"], registry=self.registry).labels(self._model_name)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        histogram = Histogram(f"{PREFIX}{name}", help, ["model_name"], registry=self.registry, buckets=buckets)
        return histogram.labels(self._model_name)


class _EngineCollector(Collector):
    """The engine's own counters, as they are at the moment of the scrape."""

    def __init__(self, model_name: str, resolved: ResolvedConfig, stats: Callable[[], EngineStats]) -> None:
        self._model_name = model_name
        self._resolved = resolved
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        in_use = stats.blocks_used + stats.blocks_pinned
        yield self._gauge("num_requests_running", "Requests in the running batch.", stats.num_running)
        yield self._gauge("num_requests_waiting", "Requests that wait to run.", stats.num_waiting)
        yield self._gauge("kv_cache_usage_perc", "Part of the KV blocks in use; 1 is all.", in_use / stats.num_blocks)
        yield self._gauge("kv_slots_written", "Token slots that hold K and V in use.", stats.slots_written)
        yield self._gauge("kv_slots_wasted", "Token slots of used blocks that hold nothing.", stats.slots_wasted)
        yield self._gauge(
            "kv_blocks_saved_by_sharing", "Blocks that sharing saves at this moment.", stats.blocks_saved_by_sharing
        )
        yield self._blocks(stats)
        yield self._waits(stats)
        yield self._config()
        yield self._counter("num_preemptions", "Requests whose blocks were taken back.", stats.num_preemptions)
        yield self._counter("num_aborts", "Requests that ended because nobody wanted them.", stats.num_aborts)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", stats.lookup_tokens)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", stats.hit_tokens)

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{PREFIX}{name}", help, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family

    def _blocks(self, stats: EngineStats) -> Metric:
        family = GaugeMetricFamily(f"{PREFIX}kv_blocks", "KV blocks by state.", labels=["model_name", "state"])
        for state in ("free", "cached", "used", "pinned"):
            family.add_metric([self._model_name, state], getattr(stats, f"blocks_{state}"))
        return family

    def _waits(self, stats: EngineStats) -> Metric:
        family = CounterMetricFamily(
            f"{PREFIX}request_waits", "Waits begun, by what was waited for.", labels=["model_name", "reason"]
        )
        for reason, count in stats.num_waits.items():
            family.add_metric([self._model_name, reason], count)
        return family

    def _config(self) -> Metric:
        # `num_gpu_blocks` is the label dashboards divide by, whatever the device.
        values = {
            "model_name": self._model_name,
            "block_size": str(self._resolved.block_size),
            "num_gpu_blocks": str(self._resolved.num_blocks),
            "cache_dtype": self._resolved.kv_dtype,
        }
        family = GaugeMetricFamily(f"{PREFIX}cache_config_info", "The KV cache's settings.", labels=list(values))
        family.add_metric(list(values.values()), 1)
        return family
