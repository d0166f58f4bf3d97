"""What /metrics shows: latencies of sequences, counted here, and the workers' own numbers as they are told.

Knows the names (all begin with `cbdisagg:`) and Prometheus' rules for them. One sequence is one observation: a request
with n choices counts n times. One instance per process; it is scraped, it never sends.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import accumulate

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from cbdisagg.api.choice import Choice
from cbdisagg.api.totals import ERROR_LABELS, Rising, WorkerTotals
from cbdisagg.messages import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
WINDOW_S = 60.0

_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 131072)

prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]  # one line less for every series; nobody reads them


class Metrics:
    """The process's registry, and one verb for each thing that can be observed."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._window = AttainmentWindow()
        self._workers = WorkerMetrics()
        self._registry.register(self._workers)
        self._registry.register(self._window)
        self._ttft = self._histogram("time_to_first_token_seconds", "From the request to its first token.", _SECONDS)
        self._gap = GapHistogram("inter_token_latency_seconds", "Between two tokens of a sequence.")
        self._registry.register(self._gap)
        self._tpot = self._histogram(
            "request_time_per_output_token_seconds", "Mean time between a sequence's tokens, after the first.", _SECONDS
        )
        self._e2e = self._histogram("e2e_request_latency_seconds", "From the request to a sequence's end.", _SECONDS)
        self._queue = self._histogram("request_queue_time_seconds", "From the request to its first step.", _SECONDS)
        self._prefill = self._histogram(
            "request_prefill_time_seconds", "From its first step to its first token.", _SECONDS
        )
        self._decode = self._histogram("request_decode_time_seconds", "From the first token to the end.", _SECONDS)
        self._prompt = self._histogram("request_prompt_tokens", "Prompt tokens of a sequence.", _TOKENS)
        self._generated = self._histogram("request_generation_tokens", "Generated tokens of a sequence.", _TOKENS)
        self._success = Counter(
            "cbdisagg:request_success_total", "Sequences that ended well.", ["finished_reason"], registry=self._registry
        )
        self._http = Counter(
            "cbdisagg:http_requests_total",
            "HTTP requests that ended, by path and status; 499 is a client that left.",
            ["path", "status"],
            registry=self._registry,
        )
        for reason in ("stop", "length"):
            self._success.labels(reason)

    def first_token(self, seconds: float) -> None:
        self._ttft.observe(seconds)

    def gap(self, seconds: float, tokens: int) -> None:
        """`tokens` came together, `seconds` after the ones before them."""
        self._gap.observe(seconds / tokens, tokens)

    def finished(self, choice: Choice) -> None:
        """A sequence has ended well."""
        self._success.labels(choice.ended_by).inc()
        self._e2e.observe(time.monotonic() - choice.started_s)
        self._prompt.observe(len(choice.prompt.ids))
        self._generated.observe(choice.tokens)
        if choice.finish is not None:
            self._queue.observe(choice.finish.queue_s)
            self._prefill.observe(choice.finish.prefill_s)
            self._decode.observe(choice.finish.decode_s)
        if not choice.first_s:
            return
        tpot = (choice.last_s - choice.first_s) / (choice.tokens - 1) if choice.tokens > 1 else 0.0
        if choice.tokens > 1:
            self._tpot.observe(tpot)
        self._window.add(choice.first_s - choice.started_s <= choice.targets.ttft_s, tpot <= choice.targets.tpot_s)

    def http(self, path: str, status: int) -> None:
        """`path` is a route's pattern, not what the client wrote: labels are few."""
        self._http.labels(path, str(status)).inc()

    def observe(self, stats: Stats) -> None:
        """The coordinator's newest word."""
        self._workers.observe(stats)

    def observe_resumed(self, resumed: Mapping[str, int]) -> None:
        """How many sequences have gone on elsewhere, by cause; only grows."""
        self._workers.resumed = dict(resumed)

    def text(self) -> bytes:
        """The text exposition format, version 0.0.4."""
        return prometheus_client.generate_latest(self._registry)

    def _histogram(self, name: str, help: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"cbdisagg:{name}", help, buckets=buckets, registry=self._registry)


class GapHistogram:
    """A histogram that is observed for every token: a list and a bisection cost a fifth of the library's own."""

    def __init__(self, name: str, help: str) -> None:
        self._name, self._help = f"cbdisagg:{name}", help
        self._counts = [0] * (len(_SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float, times: int) -> None:
        self._counts[bisect_left(_SECONDS, seconds)] += times
        self._sum += seconds * times

    def collect(self) -> Iterator[Metric]:
        bounds = [*map(str, _SECONDS), "+Inf"]
        buckets = list(zip(bounds, accumulate(self._counts), strict=True))
        yield HistogramMetricFamily(self._name, self._help, buckets, self._sum)


class AttainmentWindow:
    """Which of the sequences that ended within the last minute met their targets."""

    def __init__(self) -> None:
        self._ended: deque[tuple[float, bool, bool]] = deque(maxlen=100_000)

    def add(self, ttft_met: bool, tpot_met: bool) -> None:
        self._ended.append((time.monotonic(), ttft_met, tpot_met))

    def collect(self) -> Iterator[Metric]:
        since = time.monotonic() - WINDOW_S
        while self._ended and self._ended[0][0] < since:
            self._ended.popleft()
        ttft = sum(ttft for _, ttft, _ in self._ended)
        tpot = sum(tpot for _, _, tpot in self._ended)
        both = sum(ttft and tpot for _, ttft, tpot in self._ended)
        share = GaugeMetricFamily(
            "cbdisagg:slo_attainment",
            "Share of sequences within target, of those that ended in the last 60 s.",
            labels=["target"],
        )
        for target, met in (("ttft", ttft), ("tpot", tpot), ("both", both)):
            share.add_metric([target], met / len(self._ended) if self._ended else 1.0)
        yield share
        yield GaugeMetricFamily(
            "cbdisagg:goodput_requests_per_second",
            "Sequences a second within both targets, last 60 s.",
            both / WINDOW_S,
        )


class WorkerMetrics:
    """The workers' gauges as they are now, and their counters as totals that never fall."""

    def __init__(self) -> None:
        self._totals = WorkerTotals()
        self._stats = Stats((), (), {}, False, "")
        self.resumed: dict[str, int] = {}

    def observe(self, stats: Stats) -> None:
        self._totals.observe(stats)
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        totals = self._totals
        yield _counter("prompt_tokens", "Prompt tokens computed.", totals.prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", totals.generated_tokens)
        yield _counter("num_preemptions", "Sequences that gave up their pages for others.", totals.preemptions)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", totals.prefix_queries)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.", totals.prefix_hits)
        yield _counter("kv_page_leaks", "Pages that were lost; stays 0.", totals.page_leaks)
        yield _counter("kv_transfer_bytes", "KV bytes moved between workers.", totals.transfer_bytes, "transport")
        yield self._transfer_seconds()
        yield self._step_errors()
        yield _counter("disagg_decision", "Routes chosen, by reason.", totals.decisions, "route", "reason")
        yield _counter(
            "local_prefills",
            "Prompts computed where they decode, though routed elsewhere.",
            totals.local_prefills,
            "reason",
        )
        yield _counter("worker_restarts", "Restarts of workers.", totals.restarts, "worker")
        resumed = CounterMetricFamily("cbdisagg:request_resumed", "Sequences that went on elsewhere.", labels=["cause"])
        for cause, count in self.resumed.items():
            resumed.add_metric([cause], count)
        yield resumed

    def _gauges(self) -> Iterator[Metric]:
        running = _gauge("num_requests_running", "Sequences in the running batch.", "worker", "role")
        waiting = _gauge("num_requests_waiting", "Sequences that wait.", "worker", "role")
        usage = _gauge("kv_cache_usage_perc", "Share of KV pages that are held, 0 to 1.", "worker")
        for address, role, load in self._stats.loads:
            running.add_metric([address.name, role], load.running)
            waiting.add_metric([address.name, role], load.waiting)
            held = load.pages_total - load.pages_free - load.pages_cached
            usage.add_metric([address.name], held / load.pages_total if load.pages_total else 0.0)
        yield from (running, waiting, usage)

    def _transfer_seconds(self) -> Metric:
        family = SummaryMetricFamily(
            "cbdisagg:kv_transfer_seconds", "Time of pushes between workers.", labels=["transport"]
        )
        for labels, count in self._totals.transfers.total.items():
            family.add_metric(labels, count_value=int(count), sum_value=self._totals.transfer_seconds.total[labels])
        return family

    def _step_errors(self) -> Metric:
        errors = self._totals.step_errors.total
        return HistogramMetricFamily(
            "cbdisagg:step_model_error_ratio",
            "How far the predicted time of a step was off, as a part of the measured one.",
            buckets=list(zip(ERROR_LABELS, accumulate(errors[(label,)] for label in ERROR_LABELS), strict=True)),
            sum_value=self._totals.step_error_sum.total[()],
        )


def _gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"cbdisagg:{name}", help, labels=labels)


def _counter(name: str, help: str, rising: Rising, *labels: str) -> CounterMetricFamily:
    family = CounterMetricFamily(f"cbdisagg:{name}", help, labels=labels)
    if not labels:
        family.add_metric((), rising.total[()])
    else:
        for values, total in rising.total.items():
            family.add_metric(values, total)
    return family
