"""The latency experiment: requests that arrive one by one, and how long each waits, is prefilled and is decoded.

Knows arrivals and systems; by the virtual clock the whole service is simulated, by the wall clock it is started and
asked over HTTP (batching_http.py). Prompts are of any length up to the scale's, answers have its largest cap. A rate is
one of the article's, in queries per second, or a part of what the system can serve: its capacity is that of a burst of
the same requests.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from cbdisagg_bench.batching_lengths import SEED, Request, mixed, poisson
from cbdisagg_bench.batching_scales import Scale
from cbdisagg_bench.batching_systems import SYSTEMS
from msgspec.structs import replace

from cbdisagg.config import Config
from cbdisagg.core.profile import Profile
from cbdisagg.sim.simulation import Outcome, simulate
from cbdisagg.sim.workload import Ask

ARTICLE_QPS = (1.0, 4.0)
FRACTIONS = (0.5, 0.8, 0.95)
TAILED = ("S4r", "S4")
"""Whose tails are shown, whatever systems are compared: the same two workers, colocated and not."""


@dataclass(frozen=True, slots=True)
class Rate:
    """`fraction` of the system's capacity, 0 if the rate is one of the article's."""

    qps: float
    fraction: float = 0.0

    @property
    def label(self) -> str:
        """Of an axis, in two lines."""
        return f"{self.fraction:.0%}\n{self.qps:.3g}/s" if self.fraction else f"article\n{self.qps:g}/s"


@dataclass(frozen=True, slots=True)
class Latencies:
    """Of one system at one rate, in seconds. `e2e`, `ttft` by request; `gaps` between tokens, of all.

    `queue`, `prefill`, `decode`: means over the requests.
    """

    system: str
    rate: Rate
    e2e: list[float]
    ttft: list[float]
    gaps: list[float]
    queue: float
    prefill: float
    decode: float

    @property
    def median(self) -> float:
        return float(np.median(self.e2e))

    def p99(self, values: Sequence[float]) -> float:
        return float(np.percentile(values, 99)) if values else 0.0


def requests_of(scale: Scale, count: int, vocab: int, seed: int = SEED) -> list[Request]:
    return mixed(count, scale.prompt, scale.mean, scale.caps[-1], vocab, seed)


def config_of(scale: Scale, system: str, requests: Sequence[Request]) -> Config:
    return SYSTEMS[system].config(scale, scale.caps[-1], max(request.output for request in requests))


def capacity(scale: Scale, system: str, requests: Sequence[Request], profile: Profile) -> float:
    """Requests per second when all are there from the start."""
    outcome = _simulate(config_of(scale, system, requests), profile, requests, [0.0] * len(requests))
    return len(requests) / outcome.seconds


def rates_of(capacity_qps: float, qps: Sequence[float], fractions: Sequence[float]) -> list[Rate]:
    return [*map(Rate, qps), *(Rate(capacity_qps * fraction, fraction) for fraction in fractions)]


def simulated(scale: Scale, system: str, requests: Sequence[Request], rate: Rate, profile: Profile) -> Latencies:
    """By the virtual clock: production cores, priced steps and transfers."""
    arrivals = poisson(len(requests), rate.qps)
    return latencies(system, rate, _simulate(config_of(scale, system, requests), profile, requests, arrivals))


def latencies(system: str, rate: Rate, outcome: Outcome) -> Latencies:
    records = outcome.records
    return Latencies(
        system,
        rate,
        e2e=[record.last - record.arrival for record in records],
        ttft=[record.ttft_s for record in records],
        gaps=list(outcome.gaps),
        queue=float(np.mean([record.queue_s for record in records])),
        prefill=float(np.mean([record.ttft_s - record.queue_s for record in records])),
        decode=float(np.mean([record.last - record.first for record in records])),
    )


@dataclass(frozen=True, slots=True)
class Tail:
    """One point of the trade between first tokens and gaps: `chunk` tokens of budget, 0 for whole prompts."""

    system: str
    chunk: int
    ttft_p99: float
    gap_p99: float


def tails(
    scale: Scale,
    requests: Sequence[Request],
    profile: Profile,
    load: float,
    chunks: Sequence[int],
    progress: Callable[[str], None],
) -> list[Tail]:
    """S4 and two colocated replicas, at the same rate: `load` of what the replicas can serve, for each chunk size."""
    qps = load * capacity(scale, "S4r", requests, profile)
    arrivals = poisson(len(requests), qps)
    found = []
    for system in TAILED:
        for chunk in chunks:
            progress(f"{system}, chunks of {chunk or 'whole prompts'}")
            config = config_of(scale, system, requests)
            if chunk:
                config = replace(config, scheduler=replace(config.scheduler, token_budget=chunk))
            seen = latencies(system, Rate(qps), _simulate(config, profile, requests, arrivals))
            found.append(Tail(system, chunk, seen.p99(seen.ttft), seen.p99(seen.gaps)))
    return found


def _simulate(config: Config, profile: Profile, requests: Sequence[Request], arrivals: Sequence[float]) -> Outcome:
    asks = [
        Ask(arrival, request.output, prompt_ids=request.prompt)
        for arrival, request in zip(arrivals, requests, strict=True)
    ]
    return simulate(config, profile, asks)
