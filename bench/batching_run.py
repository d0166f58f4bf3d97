"""All systems at all caps, by one clock: what ran, how long it took, and what the cost model says of it.

Knows the order of the runs and nothing of their tables and pictures. By the wall clock every run is made by the virtual
one too, with the cost model calibrated just before: its iterations must be equal, and its ratios near.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heapreplace
from typing import TYPE_CHECKING

from cbdisagg_bench.batching_burst import Burst, Drive, run_burst
from cbdisagg_bench.batching_lengths import Request, burst
from cbdisagg_bench.batching_pair import run_pair
from cbdisagg_bench.batching_scales import Scale
from cbdisagg_bench.batching_systems import ALONE, SYSTEMS

from cbdisagg.core.cost import CostModel
from cbdisagg.core.profile import Profile

if TYPE_CHECKING:
    from cbdisagg_bench.batching_wall import Lab

DETAIL = 48
"""Steps whose cells are kept, for the slot pictures."""


@dataclass(frozen=True, slots=True)
class Run:
    """`virtual` by the cost model; `wall` with the real model, if that was asked for."""

    system: str
    cap: int
    virtual: Burst
    wall: Burst | None = None

    @property
    def burst(self) -> Burst:
        """By the clock of the experiment."""
        return self.wall or self.virtual


@dataclass(slots=True)
class Results:
    """`runs` by (cap, system); `requests` by cap, in the order in which every system got them."""

    scale: Scale
    clock: str
    profile: Profile
    requests: dict[int, list[Request]]
    runs: dict[tuple[int, str], Run] = field(default_factory=dict)

    @property
    def cost(self) -> CostModel:
        return self.profile.cost

    @property
    def caps(self) -> list[int]:
        return list(self.requests)

    @property
    def systems(self) -> list[str]:
        return [name for name in SYSTEMS if any(system == name for _, system in self.runs)]

    def speedup(self, cap: int, system: str, *, virtual: bool = False) -> float | None:
        """Over S1; None if one of the two was not run."""
        run, base = self.runs.get((cap, system)), self.runs.get((cap, "S1"))
        if run is None or base is None:
            return None
        if virtual:
            return base.virtual.seconds / run.virtual.seconds
        return base.burst.seconds / run.burst.seconds


def workloads(scale: Scale, caps: Sequence[int], count: int, vocab: int, seed: int) -> dict[int, list[Request]]:
    return {cap: burst(count, scale.prompt, scale.mean, cap, vocab, seed) for cap in caps}


def run_virtual(results: Results, systems: Sequence[str], progress: Callable[[str], None]) -> None:
    """`progress` is told before each run what it is."""
    for cap, requests in results.requests.items():
        for name in [name for name in systems if name in ALONE]:
            progress(f"cap {cap}: {name}")
            config = SYSTEMS[name].config(results.scale, cap, max(r.output for r in requests))
            done = run_burst(config, requests, results.cost, DETAIL)
            results.runs[cap, name] = Run(name, cap, done)
        for name in [name for name in systems if name not in ALONE]:
            progress(f"cap {cap}: {name}")
            config = SYSTEMS[name].config(results.scale, cap, max(r.output for r in requests))
            results.runs[cap, name] = Run(name, cap, run_pair(config, results.profile, requests))


def run_wall(results: Results, lab: Lab, progress: Callable[[str, float], None]) -> None:
    """What has been run by the virtual clock, with the model. `progress`: (what runs, predicted seconds done).

    At each cap the systems take turns, step by step, whoever is furthest behind its prediction next: so they end
    together, and whatever else the machine does meanwhile slows all of them alike.
    """
    done_s = 0.0
    for cap, requests in results.requests.items():
        runs = {name: run.virtual for (at, name), run in results.runs.items() if at == cap and name in ALONE}
        drives = {}
        for place, name in enumerate(runs):
            config = SYSTEMS[name].config(results.scale, cap, max(r.output for r in requests))
            drives[name] = Drive(config, requests, lab.runner(place), wall=True, detail=DETAIL)
        turns = [(0.0, n, name, 0) for n, name in enumerate(runs)]  # a heap: (part done, order, name, steps done)
        while turns:
            part, n, name, steps = turns[0]
            if not drives[name].step():
                heappop(turns)
                continue
            virtual = runs[name].trace.steps
            ended = steps + 1 >= len(virtual)
            after = 1.0 if ended else virtual[steps + 1].at_s / runs[name].seconds
            done_s += (after - part) * runs[name].seconds
            heapreplace(turns, (after, n, name, steps + 1))
            progress(f"cap {cap}: {part:.0%} of each system", done_s)
        for name, drive in drives.items():
            results.runs[cap, name] = Run(name, cap, runs[name], drive.burst())
