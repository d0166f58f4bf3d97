"""The goodput grid by the virtual clock: every baseline and the tuned policy, cell by cell.

Knows what is compared, on equal workers: aggregation with chunks of the best of some fixed sizes, and the best split
into prefill and decode workers with the best of the same sizes, which are the baselines; the policy with its default
knobs, and with knobs that the tuner has found for the cell. What is held against the figures to reach is the policy
that, like the baselines, refuses nobody; what it gains by refusing is told beside. Aggregation with deadline chunks is
the policy's own, at the end of its range, and told beside. All of them are settings of one engine; goodput is the
highest rate at which enough requests meet both targets, refused ones counted as misses. Nothing is dropped: a cell that
misses its figure is a cell like the others.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence

from cbdisagg_bench.goodput_workloads import Targets, Workload
from msgspec import Struct

from cbdisagg.config import Config, Kv, Policy, Scheduler, Workers
from cbdisagg.core.profile import Profile
from cbdisagg.sim.goodput import Goal, Lab, Service
from cbdisagg.sim.tune import KNOBS, POLICY, Search, targeted
from cbdisagg.sim.variants import AGGREGATE, FREE, Values, changed

BALANCED = 0.10
"""The two baselines are this near to each other, as a part of the better one."""
FLOOR, MEDIAN, LEAST = 0.97, 1.15, 1.03
"""Figures to reach, times the better baseline: in every cell; in balanced ones, their median, and each of them."""
DEADLINES = "deadline chunks"
OVERLOAD, LEFT = 2.0, 0.95
"""At so many times what it keeps up with, the tuned service is to have so much left of its best goodput."""
LOADS = (1.0, 1.25, 1.5, OVERLOAD)
"""Where that best goodput is looked for, in the same units."""
CHUNKS = (256, 512, 1024, 2048)
LOOSE: Values = {"targets.ttft_ms": 1e7, "targets.tpot_ms": 1e6}
"""With targets that nobody misses, a step takes as many prompt tokens as its budget has room for."""
TURNED = tuple(knob for knob in KNOBS if knob.key not in ("kv.page_size", "scheduler.max_batch"))
QUEUED = tuple(knob for knob in TURNED if knob.key != "policy.admission")


class Cell(Struct, frozen=True):
    """One workload, pair of targets and part of the requests: requests per second and worker, by system. Of the
    baselines the best, and those that were the best until it was found.

    `queued`: the policy tuned so that every request waits its turn; `tuned`: it may also refuse, which is a miss, what
    would be late, and does so even if a few fewer are in time (sim/tune.py: PRICE). `knobs`: those of `tuned`.
    `overloaded`: what is left of its goodput at OVERLOAD times that rate, as a part of the most that it reaches at any
    load; `queue_left`: the same of the policy as it comes, which refuses nobody.
    """

    profile: str
    workload: str
    targets: str
    ttft_ms: float
    tpot_ms: float
    part: float
    aggregation: dict[str, float]
    disaggregation: dict[str, float]
    default: float
    queued: float
    tuned: float
    knobs: dict[str, object]
    overloaded: float
    queue_left: float

    @property
    def aggregated(self) -> float:
        """With chunks of the best of the fixed sizes."""
        return max(rate for name, rate in self.aggregation.items() if name != DEADLINES)

    @property
    def disaggregated(self) -> float:
        return max(self.disaggregation.values())

    @property
    def baseline(self) -> float:
        """Of what others ship, tuned: chunks of one size, or a split."""
        return max(self.aggregated, self.disaggregated)

    @property
    def balanced(self) -> bool:
        return min(self.aggregated, self.disaggregated) >= (1 - BALANCED) * self.baseline > 0

    @property
    def ratio(self) -> float:
        """Of the tuned policy, with nobody refused, to the better baseline: what the figures to reach are about."""
        return _times(self.queued, self.baseline)

    @property
    def tuned_ratio(self) -> float:
        """The same where it may refuse."""
        return _times(self.tuned, self.baseline)

    @property
    def over_deadlines(self) -> float:
        """With nobody refused, over its own setting that only aggregates, with deadline chunks."""
        return _times(self.queued, self.aggregation[DEADLINES])

    @property
    def default_ratio(self) -> float:
        return _times(self.default, self.baseline)

    @property
    def misses(self) -> str:
        """Which figure it misses, "" for none."""
        if self.ratio < FLOOR:
            return f"under {FLOOR}"
        if self.balanced and self.ratio < LEAST:
            return f"balanced, under {LEAST}"
        if self.overloaded < LEFT:
            return f"overloaded, under {LEFT}"
        return ""


def _times(rate: float, other: float) -> float:
    """`rate` over `other`; 1 where nothing keeps the targets, 2 where only `rate` does."""
    return rate / other if other else 1.0 + (rate > 0)


class Verdict(Struct, frozen=True):
    """`median`, `balanced_lowest`: of the balanced cells, 0 if there are none; `tuned_median` where the policy may
    refuse. `tuned`, `over_deadlines`: medians of all, as `Cell` says. `overloaded`, `queue_left`: the least of all.
    """

    cells: int
    lowest: float
    balanced: int
    median: float
    balanced_lowest: float
    missed: int
    tuned_median: float
    tuned: float
    over_deadlines: float
    overloaded: float
    queue_left: float

    @property
    def reached(self) -> bool:
        return not self.missed and (not self.balanced or self.median >= MEDIAN)


def verdict(cells: Sequence[Cell]) -> Verdict:
    balanced = [cell for cell in cells if cell.balanced]
    return Verdict(
        cells=len(cells),
        lowest=min(cell.ratio for cell in cells),
        balanced=len(balanced),
        median=statistics.median(cell.ratio for cell in balanced) if balanced else 0.0,
        balanced_lowest=min((cell.ratio for cell in balanced), default=0.0),
        missed=sum(bool(cell.misses) for cell in cells),
        tuned_median=statistics.median(cell.tuned_ratio for cell in balanced) if balanced else 0.0,
        tuned=statistics.median(cell.tuned_ratio for cell in cells),
        over_deadlines=statistics.median(cell.over_deadlines for cell in cells),
        overloaded=min(cell.overloaded for cell in cells),
        queue_left=min(cell.queue_left for cell in cells),
    )


def fleet(profile: Profile, workers: int, kv_gb: float) -> Config:
    """Equal workers of the profile, with large batches and a pool of `kv_gb` each; requests wait as long as need be."""
    pages = int(kv_gb * 1e9 / profile.kv_bytes / 64)
    return Config(
        workers=(Workers(role="any", count=workers),),
        kv=Kv(page_size=64, pages=pages, prefix_cache=False),  # made prompts share nothing
        scheduler=Scheduler(max_batch=256, token_budget=2048),
        policy=Policy(queue_limit=1_000_000),
    )


def cells(
    config: Config, lab: Lab, longer: Lab, workload: Workload, targets: Targets, parts: Sequence[float], turns: int
) -> Iterator[Cell]:
    """One for each part of the requests. `turns`: simulations that the tuner may use for each.

    `longer`: the same requests for several times as long. What has been found is judged by these runs: chance weighs
    less in them, has not been chosen by, and an overload has come to stay.
    """
    workers = sum(group.count for group in config.workers)
    first = targets.goal(workload, lab.profile, parts[0])
    for part in parts:
        goal = dataclasses.replace(first, part=part)
        own = targeted(goal)
        search = Search(config, lab, goal, QUEUED)
        starts = search.starts()
        split = best_of(_services(config, lab, _splits(starts), own), goal)
        begun = {name: values for name, values in starts.items() if ":" not in name}
        queued = search.run(turns, begun | {name: _splits(starts)[name] for name in list(split)[-1:]})
        tuned = Search(config, lab, goal, TURNED).run(turns, {"queued": queued.best})
        chunks = best_of(_services(config, lab, _chunks(AGGREGATE), LOOSE), goal, queued.sustained)

        ours = {DEADLINES: AGGREGATE, POLICY: FREE, "queued": queued.best, "tuned": tuned.best}
        services = _services(config, longer, ours, own)
        rates = _judge(services, goal, dict.fromkeys(ours, queued.sustained) | {"tuned": tuned.sustained})
        chunks = _judge(_services(config, longer, _chunks(AGGREGATE), LOOSE), goal, _last(chunks))
        split = _judge(_services(config, longer, _splits(starts), own), goal, _last(split))
        yield Cell(
            profile=lab.profile.model,
            workload=workload.name,
            targets=targets.name,
            ttft_ms=1e3 * goal.ttft_s,
            tpot_ms=1e3 * goal.tpot_s,
            part=part,
            aggregation={name: rate / workers for name, rate in {**chunks, DEADLINES: rates[DEADLINES]}.items()},
            disaggregation={name: rate / workers for name, rate in split.items()},
            default=rates[POLICY] / workers,
            queued=rates["queued"] / workers,
            tuned=rates["tuned"] / workers,
            knobs=dict(tuned.best),
            overloaded=left_at(OVERLOAD, services["tuned"], goal, rates["tuned"]),
            queue_left=left_at(OVERLOAD, services[POLICY], goal, rates[POLICY]),
        )


def _last(found: Mapping[str, float]) -> dict[str, float]:
    """The best two, which chance may have put in this order."""
    return dict(list(found.items())[-2:])


def _judge(services: Mapping[str, Service], goal: Goal, near: Mapping[str, float]) -> dict[str, float]:
    """What those of them keep up with that are said to be `near` a rate."""
    return {name: services[name].sustained(goal, near=rate or None) for name, rate in near.items()}


def _chunks(values: Values, name: str = "") -> dict[str, Values]:
    """The same with each size of chunks, the largest first."""
    return {f"{name}chunks of {chunk}": {**values, "scheduler.token_budget": chunk} for chunk in reversed(CHUNKS)}


def _splits(starts: Mapping[str, Values]) -> dict[str, Values]:
    return {
        name: values
        for split, given in starts.items()
        if ":" in split
        for name, values in _chunks(given, f"{split}, ").items()
    }


def _services(config: Config, lab: Lab, named: Mapping[str, Values], also: Values) -> dict[str, Service]:
    return {name: lab.service(changed(config, {**also, **values})) for name, values in named.items()}


def best_of(services: Mapping[str, Service], goal: Goal, near: float = 0.0) -> dict[str, float]:
    """What the first keeps up with, and each that keeps up with more than all before it; the last one is the best.

    Of the others it is not looked for: each was asked at the lowest rate that is too much for the best so far, and had
    no more requests in time there. `near`: a rate to begin at.
    """
    found: dict[str, float] = {}
    best: Service | None = None
    for name, service in services.items():
        most = max(found.values(), default=0.0)
        if best is not None:
            rung = math.floor(best.rung(most)) + 1
            if service.within(rung, goal) <= best.within(rung, goal):
                continue
        rate = service.sustained(goal, near=most or near or None)
        if best is None or rate > most:
            found[name], best = rate, service
    return found


def left_at(times: float, service: Service, goal: Goal, rate: float) -> float:
    """The requests per second in time at so many `times` the `rate`, as a part of the most at any of the LOADS."""
    rungs = {load: round(service.rung(load * rate)) for load in {*LOADS, times}} if rate else {}
    good = {load: service.rate(rung) * service.within(rung, goal) for load, rung in rungs.items()}
    best = max(good.values(), default=0.0)
    return good[times] / best if best else 1.0
