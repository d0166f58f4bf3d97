"""The settings under which a service keeps up with the most: a coordinate search in the simulator.

Knows one demand and one goal. Begins with the baselines (aggregation, the splits into prefill and decode workers) and
the policy as it stands; then turns one knob at a time, as long as that gains. What is kept is never worse than the
better baseline, for that has been tried: it can lose to it only by what the simulator does not know.

A trial costs one run: the new setting is asked at the lowest rate at which the best one so far fails; only if it meets
the goal there, or comes nearer to it, its own rate is looked for.

At the rate that a service keeps up with nobody has to be refused, so often that gains nothing; but with more requests
than that, one that refuses nobody has almost none in time. So at the end refusing is asked once more, at a PRICE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeAlias

from cbdisagg.config import Config
from cbdisagg.sim.goodput import Goal, Lab, Service
from cbdisagg.sim.variants import AGGREGATE, FREE, Values, changed, disaggregate, splits, value_of

SET_BY_MODE = ("policy.rho", "policy.eta")
TOKENS = ("scheduler.token_budget", "scheduler.max_batch")
"""How large a step may be: never larger than those whose cost is known."""
MANY = 8
"""Of more workers, only some of the splits are baselines: those around the one that the demand's lengths suggest."""


@dataclass(frozen=True, slots=True)
class Knob:
    """`values` are tried in this order; those that the config has already are left out. `meaning`: for a comment."""

    key: str
    values: tuple[object, ...]
    meaning: str


ADMISSION = "policy.admission"
REFUSING: Values = MappingProxyType({ADMISSION: "early-reject"})
PRICE = 0.01
"""What refusing may cost, as a part of the requests in time at the same rate. Near 99 % the rate that is kept up with
says little: where that part falls by a tenth of a percent from one rung to the next, chance decides among many rungs.
"""
KNOBS = (
    Knob(ADMISSION, ("queue", "early-reject"), "whether a request that would be late is refused at once"),
    Knob("policy.catch_up", (0, 8), "tokens within which a stream makes up for the time that a prompt took from it"),
    Knob("policy.rho", (0.0, 0.5, 0.7, 0.8, 0.9, 1.0), "how full a decode step may be, as a part of the TPOT target"),
    Knob("policy.eta", (0.0, 0.25, 0.5, 0.75, 0.9, 1.0, 2.0), "what a mixed chunk must save of a step of its own"),
    Knob("policy.gamma", (0.9, 0.95, 0.98, 1.0), "each token's deadline, as a part of the TPOT target"),
    Knob("scheduler.token_budget", (256, 512, 1024, 2048, 4096), "most tokens of one step"),
    Knob("scheduler.max_batch", (32, 64, 128, 256), "sequences that run at once in a worker"),
    Knob("kv.page_size", (16, 32, 64), "tokens in a page"),
)


@dataclass(frozen=True, slots=True)
class Trial:
    """`values` in place of the best so far, at `rate`: the part of the requests within the targets there.

    `before`: that of the best so far at the same rate; `best`: what that one keeps up with. `sustained`: what this one
    does, if it was looked for. `what`: a knob's key, or "pins". `price`: by what part of `before` fewer may be in time,
    for what it is worth otherwise.
    """

    what: str
    values: Values
    rate: float
    within: float
    before: float
    best: float
    sustained: float | None
    price: float = 0.0

    @property
    def kept(self) -> bool:
        """It keeps up with more, or costs no more than it may, or nothing has kept up so far and this comes nearer."""
        if self.sustained is None:
            return False
        cheap = self.price > 0 and self.sustained > 0 and self.within >= (1 - self.price) * self.before
        return self.sustained > self.best or not self.best or cheap

    @property
    def gain(self) -> str:
        """In words, for a text or a comment."""
        if not self.kept:
            return "no better"
        if self.best:
            return f"{self.raised:+.1%} requests/s" + (", for an overload" if self.raised <= 0 else "")
        return "the first that keeps up" if self.sustained else "nearer to the goal, which nothing reached before"

    @property
    def raised(self) -> float:
        """By what part of what the best so far keeps up with, below 0 for a price; 0 if it was not kept."""
        return self.sustained / self.best - 1 if self.sustained is not None and self.kept and self.best else 0.0


@dataclass(slots=True)
class Tuned:
    """`best` holds the values that differ from the config given; `sustained` requests per second.

    `starts`: name -> rate that it keeps up with. `trials`: all, in order.
    """

    best: Values
    sustained: float
    starts: dict[str, float] = field(default_factory=dict)
    trials: list[Trial] = field(default_factory=list)

    @property
    def baseline(self) -> float:
        """Of the best one that does not choose: aggregation or a split."""
        return max((rate for name, rate in self.starts.items() if name != POLICY), default=0.0)


POLICY = "policy"
Told: TypeAlias = Callable[[Trial], None]


class Search:
    """For one config in a lab; its targets are those of the goal. `knobs`: those turned. `told` hears of each trial."""

    def __init__(
        self, config: Config, lab: Lab, goal: Goal, knobs: Sequence[Knob] = KNOBS, told: Told | None = None
    ) -> None:
        self._config = changed(config, targeted(goal))
        self._lab, self._goal, self._knobs, self._told = lab, goal, knobs, told
        self._workers = sum(group.count for group in config.workers)

    def starts(self) -> dict[str, Values]:
        """By name: the policy, aggregation, and splits."""
        named: dict[str, Values] = {POLICY: FREE, "aggregate": AGGREGATE}
        for prefills, decodes in self._splits():
            named[f"{prefills}P:{decodes}D"] = disaggregate(prefills, decodes)
        return named

    def run(self, most: int, starts: Mapping[str, Values] | None = None) -> Tuned:
        """`most` simulations for the knobs, beside those for the `starts`, and a few to see what refusing costs."""
        found = Tuned(FREE, 0.0)
        for name, values in (self.starts() if starts is None else starts).items():
            rate = self._service(values).sustained(self._goal, near=found.sustained or None)
            found.starts[name] = rate
            if rate > found.sustained:
                found.best, found.sustained = values, rate
        last = self._lab.runs + most
        while self._lab.runs < last and self._turn_all(found, last):
            pass
        if most and found.sustained and any(knob.key == ADMISSION for knob in self._knobs):
            self._try(found, ADMISSION, {**found.best, **REFUSING}, PRICE)
        return found

    def _service(self, values: Values) -> Service:
        return self._lab.service(changed(self._config, values))

    def _splits(self) -> Iterable[tuple[int, int]]:
        """All of few; of many, those nearest to the share of prompts in the work."""
        every = list(splits(self._workers))
        if self._workers <= MANY:
            return every
        cost, scheduler = self._lab.profile.cost, self._config.scheduler
        prompts = self._lab.demand.prompt_tokens * cost.linear_s(scheduler.token_budget) / scheduler.token_budget
        outputs = self._lab.demand.output_tokens * cost.linear_s(scheduler.max_batch) / scheduler.max_batch
        share = self._workers * prompts / (prompts + outputs)
        return sorted(sorted(every, key=lambda split: abs(split[0] - share))[:MANY])

    def _turn_all(self, found: Tuned, last: int) -> bool:
        """Each knob once. True if one of them has gained."""
        kept = False
        for what, values in self._moves(found.best):
            if self._lab.runs >= last:
                break
            # A knob turned earlier in this round stays turned: the change is to the best so far.
            kept |= self._try(found, what, {**found.best, **values})
        return kept

    def _moves(self, best: Values) -> Iterator[tuple[str, Values]]:
        """Changes of the best: other values of the first knob, pins by one worker, other values of the other knobs."""
        yield from self._other_values(self._knobs[:1], best)
        yield from self._other_pins(best)
        yield from self._other_values(self._knobs[1:], best)

    def _other_values(self, knobs: Sequence[Knob], best: Values) -> Iterator[tuple[str, Values]]:
        free = value_of(changed(self._config, best), "policy.mode") == "auto"
        for knob in knobs:
            if free or knob.key not in SET_BY_MODE:
                yield from ((knob.key, {knob.key: value}) for value in knob.values if self._known(knob.key, value))

    def _known(self, key: str, value: object) -> bool:
        """The profile has seen such steps."""
        (most, _) = self._lab.profile.L[-1]
        return key not in TOKENS or int(str(value)) <= most

    def _other_pins(self, best: Values) -> Iterator[tuple[str, Values]]:
        prefills = int(str(best.get("policy.pin_prefill", 0)))
        decodes = int(str(best.get("policy.pin_decode", 0)))
        near = [(-1, 0), (0, -1), (1, 0), (0, 1), (1, -1), (-1, 1), (0, 0), (-1, -1)]
        for more, other in near:
            x, y = prefills + more, decodes + other
            if x >= 0 and y >= 0 and x + y <= self._workers and (x, y) not in ((self._workers, 0), (0, self._workers)):
                yield "pins", {"policy.mode": "auto", "policy.pin_prefill": x, "policy.pin_decode": y}

    def _try(self, found: Tuned, what: str, values: Values, price: float = 0.0) -> bool:
        """True if they are the best from now on."""
        service, best = self._service(values), self._service(found.best)
        if service is best or not _possible(service.config):
            return False
        rung = math.floor(best.rung(found.sustained)) + 1
        within, before = service.within(rung, self._goal), best.within(rung, self._goal)
        sustained = service.sustained(self._goal, near=service.rate(rung)) if price or within > before else None
        trial = Trial(what, values, service.rate(rung), within, before, found.sustained, sustained, price)
        found.trials.append(trial)
        if self._told is not None:
            self._told(trial)
        if trial.kept and sustained is not None:
            found.best, found.sustained = values, sustained
        return trial.kept


def targeted(goal: Goal) -> Values:
    """The targets that a service has which is to reach the goal."""
    return {"targets.ttft_ms": 1e3 * goal.ttft_s, "targets.tpot_ms": 1e3 * goal.tpot_s}


def _possible(config: Config) -> bool:
    """As validate.py demands it of the keys that are turned here."""
    return config.scheduler.token_budget >= config.scheduler.max_batch
