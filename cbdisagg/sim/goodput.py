"""How much a service keeps up with: the highest rate of requests at which enough of them meet both targets.

Knows simulations of one service under one demand, and keeps what came of them: other targets, and other parts of the
requests, are read off the same runs. Rates are rungs of a ladder, RUNG apart; the rate between the last rung that holds
and the first that does not is interpolated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbdisagg.config import Config
from cbdisagg.core.profile import Profile
from cbdisagg.sim.clients import Record
from cbdisagg.sim.demand import Demand
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.workload import Ask

RUNG = 1.04
CHUNK, BATCH = 1024, 64
LOWEST, HIGHEST = -90, 90
"""A thirtieth of what a service can compute, and thirty times: what is missed there is missed at any rate."""


@dataclass(frozen=True, slots=True)
class Goal:
    """`part` of all requests are to have their first token within `ttft_s`, and each later one within `tpot_s`."""

    ttft_s: float
    tpot_s: float
    part: float = 0.9


def lasting_s(goal: Goal, asks: Sequence[Ask]) -> float:
    """For so long requests come in a run: twice as long as one of them may take."""
    outputs = sum(ask.output_tokens for ask in asks) / len(asks)
    return 2 * (goal.ttft_s + goal.tpot_s * outputs)


@dataclass(frozen=True, slots=True)
class Seen:
    """The requests of one run, in order of arrival: seconds, infinite for those that have not ended well."""

    ttft_s: NDArray[np.float64]
    tpot_s: NDArray[np.float64]
    own_ttft_s: NDArray[np.float64]
    own_tpot_s: NDArray[np.float64]

    def within(self, goal: Goal) -> float:
        """The part of the requests that met both targets: their own, where they have some."""
        ttft = np.where(self.own_ttft_s > 0, self.own_ttft_s, goal.ttft_s)
        tpot = np.where(self.own_tpot_s > 0, self.own_tpot_s, goal.tpot_s)
        return float(np.mean((self.ttft_s <= ttft) & (self.tpot_s <= tpot)))


def see(records: Sequence[Record]) -> Seen:
    done = [record.status == "done" for record in records]
    return Seen(
        np.array([record.ttft_s if ok else math.inf for record, ok in zip(records, done, strict=True)]),
        np.array([record.tpot_s if ok else math.inf for record, ok in zip(records, done, strict=True)]),
        np.array([record.ask.ttft_ms / 1e3 for record in records]),
        np.array([record.ask.tpot_ms / 1e3 for record in records]),
    )


class Service:
    """A config on workers of a profile, under a demand. `ran` is called before each simulation."""

    def __init__(self, config: Config, profile: Profile, demand: Demand, ran: Callable[[], None] | None = None) -> None:
        self.config = config
        self.runs = 0
        self._profile, self._demand, self._ran = profile, demand, ran
        self._base = guess(sum(group.count for group in config.workers), profile, demand)
        self._seen: dict[int, Seen] = {}

    def rate(self, rung: float) -> float:
        """Requests per second."""
        return float(self._base * RUNG**rung)

    def rung(self, rate: float) -> float:
        return math.log(rate / self._base, RUNG) if rate > 0 else float(LOWEST)

    def seen(self, rung: int) -> Seen:
        if rung not in self._seen:
            if self._ran is not None:
                self._ran()
            self.runs += 1
            outcome = simulate(self.config, self._profile, self._demand.at(self.rate(rung)))
            self._seen[rung] = see(outcome.records)
        return self._seen[rung]

    def within(self, rung: int, goal: Goal) -> float:
        return self.seen(rung).within(goal)

    def sustained(self, goal: Goal, near: float | None = None) -> float:
        """Requests per second; 0 if the goal is missed at any rate. `near`: a rate to begin the search at."""
        start = 0 if not near else math.floor(self.rung(near))
        rung = climb(lambda rung: self.within(rung, goal), goal.part, start)
        return 0.0 if rung is None else self.rate(rung)


class Lab:
    """Services under one demand, each simulated at most once at a rate: what two searches ask of it, one has paid."""

    def __init__(self, profile: Profile, demand: Demand, ran: Callable[[], None] | None = None) -> None:
        self.profile, self.demand = profile, demand
        self._ran = ran
        self._services: dict[Config, Service] = {}

    @property
    def runs(self) -> int:
        """Simulations so far."""
        return sum(service.runs for service in self._services.values())

    def service(self, config: Config) -> Service:
        if config not in self._services:
            self._services[config] = Service(config, self.profile, self.demand, self._ran)
        return self._services[config]


def guess(workers: int, profile: Profile, demand: Demand) -> float:
    """Requests per second that so many workers could compute, if they did nothing but large chunks and large batches.

    It does not depend on settings: the rungs of services with equal workers are the same rates.
    """
    cost = profile.cost
    prompt_s = demand.prompt_tokens * (profile.h + cost.linear_s(CHUNK)) / CHUNK
    decode_s = demand.output_tokens * (profile.h + cost.linear_s(BATCH)) / BATCH
    return workers / (prompt_s + decode_s)


def climb(within: Callable[[int], float], part: float, start: int) -> float | None:
    """The rung, as a fraction, up to which `within` is at least `part`; None if it is not even at the LOWEST."""
    low = high = min(max(start, LOWEST), HIGHEST)
    stride = 2
    if within(low) >= part:
        while within(high := min(HIGHEST, low + stride)) >= part:
            if high == HIGHEST:
                return float(HIGHEST)
            low, stride = high, 2 * stride
    else:
        while within(low := max(LOWEST, high - stride)) < part:
            if low == LOWEST:
                return None
            high, stride = low, 2 * stride
    while high - low > 1:
        middle = (low + high) // 2
        if within(middle) >= part:
            low = middle
        else:
            high = middle
    above, below = within(low), within(high)
    return low + (above - part) / (above - below)
