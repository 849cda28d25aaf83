"""Prometheus metrics under the names that vLLM dashboards read (`vllm:`), and our own (`srv:`).

Observing is on the path of every token, so it is plain Python: a histogram is a list of counts
found by bisection (0.4 us; the client library's takes a lock for each observation). The client
library only writes the text, from a collector that reads these numbers when asked.
"""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from engine.api.messages import EngineStats
from engine.api.process import resident_bytes
from server.health import EngineStatus

if TYPE_CHECKING:
    from server.stream import Choice

# Seconds. The last buckets reach further than vLLM's, because queues do.
TTFT_BUCKETS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
TOKEN_GAP_BUCKETS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
LATENCY_BUCKETS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0,
)  # fmt: skip
STEP_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
TOKEN_BUCKETS = tuple(float(m * 10**e) for e in range(6) for m in (1, 2, 5))
N_BUCKETS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 128.0)

LABELS = ("model_name", "engine")


class Histogram:
    """Counts of observations by upper bound, and their sum."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def buckets(self) -> list[tuple[str, float]]:
        """Cumulative, as the exposition format wants them."""
        rows: list[tuple[str, float]] = []
        running = 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            running += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(running)))
        return rows


@dataclass
class Metrics:
    """Everything counted in the server.

    Times are seconds: to the first token, e2e and in the queue from the request's arrival, inference and
    prefill from its start in the engine, decode from its first token.
    """

    time_to_first_token: Histogram = field(default_factory=partial(Histogram, TTFT_BUCKETS))
    inter_token_latency: Histogram = field(default_factory=partial(Histogram, TOKEN_GAP_BUCKETS))
    time_per_output_token: Histogram = field(default_factory=partial(Histogram, TOKEN_GAP_BUCKETS))
    e2e_latency: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    queue_time: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    inference_time: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    prefill_time: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    decode_time: Histogram = field(default_factory=partial(Histogram, LATENCY_BUCKETS))
    prompt_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    generation_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    params_n: Histogram = field(default_factory=partial(Histogram, N_BUCKETS))
    params_max_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    iteration_tokens: Histogram = field(default_factory=partial(Histogram, TOKEN_BUCKETS))
    step_seconds: Histogram = field(default_factory=partial(Histogram, STEP_BUCKETS))
    finished: Counter[str] = field(default_factory=Counter)  # by reason
    rejected: Counter[str] = field(default_factory=Counter)  # by code; counted where answered
    aborted: Counter[str] = field(default_factory=Counter)  # by phase
    http_requests: Counter[tuple[str, str]] = field(default_factory=Counter)  # by path and status
    late_messages: int = 0
    startup_seconds: dict[str, float] = field(default_factory=dict)  # by phase
    start_time: float = field(default_factory=time.time)  # Unix time

    def request_started(self, queue_us: int) -> None:
        self.queue_time.observe(queue_us * 1e-6)

    def tokens_arrived(self, choice: "Choice", count: int, now: int) -> None:
        """`count` tokens of one choice arrived together."""
        if choice.first_token_ns:
            gap = (now - choice.last_token_ns) * 1e-9 / count
            self.inter_token_latency.observe(gap, count)
        else:
            choice.first_token_ns = now
            self.time_to_first_token.observe((now - choice.stream.arrival_ns) * 1e-9)
            if choice.started_ns:
                self.prefill_time.observe((now - choice.started_ns) * 1e-9)
        choice.last_token_ns = now
        choice.num_tokens += count

    def request_finished(self, choice: "Choice", reason: str, now: int) -> None:
        self.finished[reason] += 1
        self.e2e_latency.observe((now - choice.stream.arrival_ns) * 1e-9)
        self.inference_time.observe((now - choice.started_ns) * 1e-9)
        self.generation_tokens.observe(choice.num_tokens)
        self.prompt_tokens.observe(choice.stream.num_prompt_tokens[choice.prompt_index])
        if choice.first_token_ns:
            decode = (now - choice.first_token_ns) * 1e-9
            self.decode_time.observe(decode)
            if choice.num_tokens > 1:
                self.time_per_output_token.observe(decode / (choice.num_tokens - 1))

    def request_aborted(self, choice: "Choice", failed: bool) -> None:
        self.finished["error" if failed else "abort"] += 1
        self.aborted[choice.phase] += 1

    def request_rejected(self, status: int) -> None:
        """A request ended before its start; clients' own mistakes are not counted."""
        if status >= 500:
            self.finished["error"] += 1

    def engine_stats(self, before: EngineStats | None, now: EngineStats) -> None:
        """Steps since the last report, as their mean: the engine reports at most ten a second."""
        if before is None or before.epoch != now.epoch or now.steps <= before.steps:
            return
        steps = now.steps - before.steps
        tokens = (now.prompt_tokens - before.prompt_tokens) + (
            now.generation_tokens - before.generation_tokens
        )
        self.iteration_tokens.observe(tokens / steps, steps)
        self.step_seconds.observe((now.step_seconds - before.step_seconds) / steps, steps)


@dataclass(eq=False)  # the registry wants it hashable
class Exporter:
    """Writes `Metrics` and the engine's own counters as Prometheus text."""

    metrics: Metrics
    status: EngineStatus
    model_name: str
    queue_limit: int
    registry: CollectorRegistry = field(
        default_factory=lambda: CollectorRegistry(auto_describe=False)
    )
    num_queued: int = 0

    def __post_init__(self) -> None:
        self.registry.register(self)

    def text(self, num_queued: int) -> bytes:
        """`num_queued`: completions the engine has not started, as the server sees them."""
        self.num_queued = num_queued
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._engine_metrics()
        yield from self._histograms()
        yield from self._server_metrics()

    @property
    def _labels(self) -> tuple[str, str]:
        return (self.model_name, "0")

    def _gauge(self, name: str, help: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _counter(self, name: str, help: str, value: float) -> Metric:
        family = CounterMetricFamily(name, help, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _engine_metrics(self) -> Iterator[Metric]:
        stats = self.status.stats
        running, waiting, swapped, usage, host_usage = 0, 0, 0, 0.0, 0.0
        if stats is not None:
            running, waiting, swapped = stats.num_running, stats.num_waiting, stats.num_swapped
            if stats.num_blocks:
                usage = 1.0 - stats.num_free_blocks / stats.num_blocks
            if stats.num_host_blocks:
                host_usage = stats.num_used_host_blocks / stats.num_host_blocks
        # A request on its way through tokenizer_proc waits, too, but no engine counts it yet.
        waiting = max(waiting, self.num_queued)
        yield self._gauge("vllm:num_requests_running", "Requests in the running batch.", running)
        yield self._gauge("vllm:num_requests_waiting", "Requests waiting to be started.", waiting)
        yield self._gauge(
            "vllm:num_requests_swapped", "Waiting, with their KV kept in host memory.", swapped
        )
        for name in ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"):
            yield self._gauge(name, "Share of KV blocks in use; 1 is full.", usage)
        yield self._gauge(
            "vllm:cpu_cache_usage_perc", "Share of the host's KV blocks in use.", host_usage
        )
        counters = (
            (
                "vllm:prompt_tokens",
                "Prompt tokens computed or found in the cache.",
                "prompt_tokens",
            ),
            ("vllm:generation_tokens", "Tokens generated.", "generation_tokens"),
            ("vllm:num_preemptions", "Requests preempted for want of KV blocks.", "preemptions"),
            ("vllm:prefix_cache_queries", "Prompt tokens looked up.", "prefix_query_tokens"),
            ("vllm:prefix_cache_hits", "Prompt tokens found cached.", "prefix_hit_tokens"),
            ("vllm:gpu_prefix_cache_queries", "As prefix_cache_queries.", "prefix_query_tokens"),
            ("vllm:gpu_prefix_cache_hits", "As prefix_cache_hits.", "prefix_hit_tokens"),
            ("vllm:prompt_tokens_cached", "As prefix_cache_hits.", "prefix_hit_tokens"),
        )
        for name, help, attribute in counters:
            yield self._counter(name, help, getattr(stats, attribute) if stats else 0)
        yield self._gauge(
            "srv:free_blocks",
            "KV blocks that a new request could take.",
            stats.num_free_blocks if stats else 0,
        )
        yield self._counter(
            "srv:nan_events",
            "Steps with logits that were NaN or infinite.",
            stats.nan_events if stats else 0,
        )
        yield self._counter(
            "srv:failed_steps",
            "Steps that did not run for lack of GPU memory; their requests failed.",
            stats.failed_steps if stats else 0,
        )
        yield self._gauge(
            "srv:engine_last_step_age_seconds",
            "Since the last step ended; grows while there is nothing to do.",
            self.status.last_step_age_s,
        )
        yield self._gauge(
            "srv:gpu_memory_used_bytes",
            "GPU memory held by the engine's allocator.",
            self.status.gpu_memory_bytes,
        )
        lora = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "LoRA adapters in use: there are none.",
            labels=(*LABELS, "max_lora", "running_lora_adapters", "waiting_lora_adapters"),
        )
        lora.add_metric((*self._labels, "0", "", ""), 1)
        yield lora
        limits = self.status.limits
        if limits is not None:
            info = InfoMetricFamily("vllm:cache_config", "Settings of the KV cache.", labels=LABELS)
            info.add_metric(
                self._labels,
                {
                    "block_size": str(limits.block_size),
                    "num_gpu_blocks": str(limits.num_blocks),
                    "num_cpu_blocks": str(stats.num_host_blocks if stats else 0),
                    "enable_prefix_caching": str(limits.enable_prefix_caching),
                },
            )
            yield info

    def _histograms(self) -> Iterator[Metric]:
        m = self.metrics
        table = (
            ("vllm:time_to_first_token_seconds", "Arrival to first token.", m.time_to_first_token),
            ("vllm:inter_token_latency_seconds", "Gap between tokens.", m.inter_token_latency),
            ("vllm:time_per_output_token_seconds", "Gap between tokens.", m.inter_token_latency),
            (
                "vllm:request_time_per_output_token_seconds",
                "Mean gap between the tokens of a request.",
                m.time_per_output_token,
            ),
            ("vllm:e2e_request_latency_seconds", "Arrival to last token.", m.e2e_latency),
            (
                "vllm:request_queue_time_seconds",
                "Time from arrival to the start in the engine.",
                m.queue_time,
            ),
            ("vllm:request_inference_time_seconds", "Start to last token.", m.inference_time),
            ("vllm:request_prefill_time_seconds", "Start to first token.", m.prefill_time),
            ("vllm:request_decode_time_seconds", "First to last token.", m.decode_time),
            ("vllm:request_prompt_tokens", "Prompt length.", m.prompt_tokens),
            ("vllm:request_generation_tokens", "Completion length.", m.generation_tokens),
            ("vllm:request_max_num_generation_tokens", "As asked.", m.params_max_tokens),
            ("vllm:request_params_max_tokens", "max_tokens, where given.", m.params_max_tokens),
            ("vllm:request_params_n", "n of the request.", m.params_n),
            ("vllm:iteration_tokens_total", "Tokens in one step.", m.iteration_tokens),
            ("srv:engine_step_seconds", "Duration of one step.", m.step_seconds),
        )
        for name, help, histogram in table:
            family = HistogramMetricFamily(name, help, labels=LABELS)
            family.add_metric(self._labels, histogram.buckets(), histogram.total)
            yield family

    def _server_metrics(self) -> Iterator[Metric]:
        m = self.metrics
        success = CounterMetricFamily(
            "vllm:request_success", "Requests ended.", labels=(*LABELS, "finished_reason")
        )
        for reason in ("stop", "length", "abort", "error"):
            success.add_metric((*self._labels, reason), m.finished[reason])
        yield success
        yield from self._by_label("srv:rejected_requests", "Requests refused.", "code", m.rejected)
        yield from self._by_label(
            "srv:aborted_requests",
            "Requests ended early, by what they were in.",
            "phase",
            m.aborted,
        )
        http = CounterMetricFamily("srv:http_requests", "Responses.", labels=("path", "status"))
        for (path, status), count in m.http_requests.items():
            http.add_metric((path, status), count)
        yield http
        yield self._counter(
            "srv:late_messages", "Messages for requests that had ended.", m.late_messages
        )
        yield self._gauge(
            "srv:start_time_seconds", "Unix time of this process's start.", m.start_time
        )
        yield self._gauge("srv:queue_limit", "Queued requests before 429.", self.queue_limit)
        memory = GaugeMetricFamily(
            "srv:process_resident_memory_bytes", "Resident memory.", labels=("process",)
        )
        memory.add_metric(("server",), resident_bytes())
        memory.add_metric(("engine",), self.status.rss_bytes)
        yield memory
        startup = GaugeMetricFamily(
            "srv:startup_seconds", "Duration of each phase of the start.", labels=("phase",)
        )
        for phase, seconds in m.startup_seconds.items():
            startup.add_metric((phase,), seconds)
        yield startup

    def _by_label(self, name: str, help: str, label: str, counts: Counter[str]) -> Iterator[Metric]:
        family = CounterMetricFamily(name, help, labels=(label,))
        for value, count in counts.items():
            family.add_metric((value,), count)
        yield family
