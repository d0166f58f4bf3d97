"""The parts of the experiment beside the burst, in order, with their progress and a forecast of their time.

Knows which systems meet which rates. By the wall clock a rate beyond a system's capacity is still asked for: the
article did so, and the queue that grows is what it shows.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
from cbdisagg_bench.batching_http import served
from cbdisagg_bench.batching_latency import (
    Latencies,
    Tail,
    capacity,
    config_of,
    rates_of,
    requests_of,
    simulated,
    tails,
)
from cbdisagg_bench.batching_live import live_burst
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_scales import Scale
from cbdisagg_bench.batching_systems import ALONE, SYSTEMS
from rich.progress import Progress

from cbdisagg.config import Config
from cbdisagg.core.profile import Profile

PARTS = ("throughput", "latency", "tails")
CHUNKS = (0.125, 0.25, 0.5, 1.0, 2.0)
"""Token budgets of the tails, in parts of the scale's chunk; whole prompts besides."""
START_S = 10.0
"""About what a service needs to start, for the forecast."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What one command is to measure. `rates`: arrivals per second, and parts of each system's capacity.

    `model`, `dtype`, `device`, `threads`, `port`: of the wall clock.
    """

    clock: str
    scale: Scale
    parts: list[str]
    systems: list[str]
    requests: int
    rates: tuple[list[float], list[float]]
    seed: int
    model: str
    dtype: str
    device: str
    threads: int
    port: int


def virtual_latencies(plan: Plan, profile: Profile, bar: Progress) -> list[Latencies]:
    scale = plan.scale
    requests = requests_of(scale, scale.arrivals, scale.vocab, plan.seed)
    seen: list[Latencies] = []
    task = bar.add_task("latency", total=len(plan.systems) * sum(map(len, plan.rates)))
    for system in plan.systems:
        bar.update(task, description=f"latency, {system}")
        for rate in rates_of(capacity(scale, system, requests, profile), *plan.rates):
            seen.append(simulated(scale, system, requests, rate, profile))
            bar.advance(task)
    bar.remove_task(task)
    return seen


def virtual_tails(plan: Plan, profile: Profile, load: float, bar: Progress) -> list[Tail]:
    """Always by the virtual clock: a service for each chunk size would take long, and show the machine's own tails."""
    scale = plan.scale
    requests = requests_of(scale, scale.arrivals, scale.vocab, plan.seed)
    chunks = [*sorted({max(scale.max_batch, round(part * scale.chunk)) for part in CHUNKS}), 0]
    task = bar.add_task("tails", total=2 * len(chunks))
    points = tails(scale, requests, profile, load, chunks, lambda text: bar.update(task, advance=1, description=text))
    bar.remove_task(task)
    return points


def wall_seconds(plan: Plan, results: Results, profile: Profile) -> float:
    """What a wall-clock experiment will take, by the cost model: bursts, and services with their arrivals."""
    scale = plan.scale
    seconds = sum(run.virtual.seconds for run in results.runs.values())
    seconds += START_S * sum(run.system not in ALONE for run in results.runs.values())
    if "latency" in plan.parts:
        requests = requests_of(scale, scale.arrivals, scale.vocab, plan.seed)
        for system in plan.systems:
            most = capacity(scale, system, requests, profile)
            seconds += START_S + sum(scale.arrivals / min(rate.qps, most) for rate in rates_of(most, *plan.rates))
    return seconds


def wall_bursts(plan: Plan, results: Results, folder: Path, bar: Progress) -> None:
    """Systems of two workers at each cap, as services with the model in `folder`. Raises ServiceFailed."""
    pairs = [run for run in results.runs.values() if run.system not in ALONE]
    task = bar.add_task("services", total=len(pairs) * plan.requests)
    for run in pairs:
        bar.update(task, description=f"burst over HTTP, cap {run.cap}, {run.system}")
        requests = results.requests[run.cap]
        config = _served(plan, SYSTEMS[run.system].config(plan.scale, run.cap, 0))
        done = live_burst(run.system, config, folder, requests, plan.port, lambda: bar.advance(task))
        results.runs[run.cap, run.system] = replace(run, wall=asyncio.run(done))
    bar.remove_task(task)


def wall_latencies(plan: Plan, profile: Profile, folder: Path, vocab: int, bar: Progress) -> list[Latencies]:
    """Over HTTP, a service for each system, with the model in `folder`. Raises ServiceFailed."""
    scale = plan.scale
    requests = requests_of(scale, scale.arrivals, vocab, plan.seed)
    task = bar.add_task("latency", total=len(plan.systems) * sum(map(len, plan.rates)) * len(requests))
    seen: list[Latencies] = []
    for system in plan.systems:
        bar.update(task, description=f"latency over HTTP, {system}")
        config = _served(plan, config_of(scale, system, requests))
        mine = rates_of(capacity(scale, system, requests, profile), *plan.rates)
        seen += asyncio.run(served(system, config, folder, requests, mine, plan.port, lambda: bar.advance(task)))
    bar.remove_task(task)
    return seen


def _served(plan: Plan, config: Config) -> Config:
    """As a service has it: with the experiment's dtype and device, and its threads divided among the workers."""
    workers = sum(group.count for group in config.workers)
    own = {"threads": max(1, plan.threads // workers), "device": plan.device}
    groups = tuple(msgspec.structs.replace(group, **own) for group in config.workers)
    return msgspec.structs.replace(
        config, model=msgspec.structs.replace(config.model, dtype=plan.dtype), workers=groups
    )
