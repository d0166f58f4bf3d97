"""The tuner: it is never worse than the better baseline, turns what gains, and stops in time."""

from __future__ import annotations

import pytest
from sim_world import config, costs

from cbdisagg.config import Config, Scheduler
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.demand import Demand, demand
from cbdisagg.sim.goodput import Goal, Lab, Service
from cbdisagg.sim.tune import ADMISSION, KNOBS, POLICY, PRICE, REFUSING, Knob, Search, Trial
from cbdisagg.sim.variants import changed, equal_workers

GOAL = Goal(0.4, 0.03)


def some(prompt: int, output: int) -> Demand:
    lengths = Lengths(prompt, "exponential", 4 * prompt), Lengths(output, "exponential", 4 * output)
    return demand(make_workload(80, 1.0, *lengths, 0), seconds=2.0)


def fleet(count: int = 2) -> Config:
    return equal_workers(config("any", scheduler=Scheduler(max_batch=16, token_budget=128)), count)


@pytest.mark.parametrize(("prompt", "output"), [(200, 4), (30, 8)])
def test_it_is_never_worse_than_the_better_baseline(prompt: int, output: int) -> None:
    lab = Lab(costs(), some(prompt, output))
    search = Search(fleet(), lab, GOAL)
    found = search.run(most=8)
    assert found.starts.keys() == {POLICY, "aggregate", "1P:1D"}
    assert found.sustained >= found.baseline > 0
    best = lab.service(changed(fleet(), {**found.best, "targets.ttft_ms": 400.0, "targets.tpot_ms": 30.0}))
    assert best.sustained(GOAL, near=found.sustained) == pytest.approx(found.sustained, rel=0.02)


def test_a_knob_that_gains_is_turned_and_one_that_does_not_is_not() -> None:
    heard: list[Trial] = []
    knobs = (Knob("scheduler.token_budget", (16, 512), ""), Knob("scheduler.max_batch", (1,), ""))
    lab = Lab(costs(h=0.05), some(120, 2))  # a step is dear, so large ones are wanted
    small = changed(fleet(1), {"scheduler.token_budget": 16})
    found = Search(small, lab, Goal(0.7, 0.5), knobs, heard.append).run(most=12)
    assert found.best["scheduler.token_budget"] == 512 and "scheduler.max_batch" not in found.best
    assert heard == found.trials
    kept = [trial for trial in heard if trial.kept]
    assert [trial.what for trial in kept] == ["scheduler.token_budget"] and kept[0].best == 0.0  # too small for anybody
    assert all(trial.within <= trial.before or trial.kept for trial in heard if trial.what == "scheduler.max_batch")


def test_no_step_is_tried_that_the_profile_has_not_seen() -> None:
    knobs = (Knob("scheduler.token_budget", (256, 512, 1024), ""),)
    lab = Lab(costs(h=0.05), some(120, 2))
    found = Search(fleet(1), lab, Goal(0.7, 0.5), knobs).run(most=12)
    assert {trial.values["scheduler.token_budget"] for trial in found.trials if trial.what != "pins"} == {256, 512}


@pytest.mark.parametrize(
    ("best", "sustained", "said"),
    [
        (2.0, 2.5, "+25.0% requests/s"),
        (2.0, 1.9, "no better"),
        (2.0, None, "no better"),
        (0.0, 1.5, "the first that keeps up"),
        (0.0, 0.0, "nearer to the goal, which nothing reached before"),
    ],
)
def test_what_a_trial_gained_is_said_as_it_was(best: float, sustained: float | None, said: str) -> None:
    assert Trial("policy.rho", {"policy.rho": 0.5}, 2.1, 0.9, 0.8, best, sustained).gain == said


@pytest.mark.parametrize(
    ("sustained", "within", "kept", "said"),
    [
        (2.1, 0.93, True, "+5.0% requests/s"),
        (2.0, 0.9, True, "+0.0% requests/s, for an overload"),
        (1.5, 0.895, True, "-25.0% requests/s, for an overload"),
        (1.99, 0.88, False, "no better"),
        (0.0, 0.895, False, "no better"),
    ],
)
def test_what_has_its_price_may_have_so_many_fewer_in_time(
    sustained: float, within: float, kept: bool, said: str
) -> None:
    trial = Trial(ADMISSION, REFUSING, 2.1, within, 0.9, 2.0, sustained, PRICE)
    assert (trial.kept, trial.gain) == (kept, said)


class Known(Service):
    """Keeps up with what is known beforehand."""

    def __init__(self, config: Config, rate: float) -> None:
        super().__init__(config, costs(), some(30, 8))
        self._rate = rate

    def within(self, rung: int, goal: Goal) -> float:
        """A hundredth fewer are in time with each further twentieth of the rate that it keeps up with."""
        return goal.part - max(0.0, self.rate(rung) / self._rate - 1) / 5

    def sustained(self, goal: Goal, near: float | None = None) -> float:
        return self._rate


class Sure(Lab):
    """Whoever waits keeps up with 100 requests/s, whoever refuses with `refusing`."""

    def __init__(self, refusing: float) -> None:
        super().__init__(costs(), some(30, 8))
        self._rates = {"queue": 100.0, "early-reject": refusing}

    def service(self, config: Config) -> Service:
        if config not in self._services:
            self._services[config] = Known(config, self._rates[config.policy.admission])
        return self._services[config]


@pytest.mark.parametrize(("refusing", "taken"), [(101.0, True), (100.0, True), (97.0, True), (90.0, False)])
def test_refusing_is_preferred_where_it_costs_few_of_those_in_time(refusing: float, taken: bool) -> None:
    found = Search(fleet(), Sure(refusing), GOAL).run(most=1)
    assert found.best.get(ADMISSION) == ("early-reject" if taken else None)
    assert found.sustained == (refusing if taken else 100.0)
    assert any(trial.kept for trial in found.trials if trial.what == ADMISSION) == taken


def test_who_may_not_turn_admission_never_hears_of_it() -> None:
    for knobs, most in ((KNOBS[1:], 3), (KNOBS, 0)):
        found = Search(fleet(), Sure(100.0), GOAL, knobs).run(most)
        assert ADMISSION not in found.best and not any(trial.what == ADMISSION for trial in found.trials)


def test_it_stops_when_its_runs_are_used_up_or_nothing_is_within_reach() -> None:
    lab = Lab(costs(), some(60, 5))
    search = Search(fleet(), lab, GOAL)
    none = search.run(most=0)
    assert not none.trials and none.sustained == max(none.starts.values())
    before = lab.runs
    search.run(most=3)
    assert lab.runs <= before + 3 + 20  # the last trial may look for its own rate
    hopeless = Search(fleet(), lab, Goal(1e-5, 1e-5)).run(most=5)
    assert hopeless.sustained == hopeless.baseline == 0.0 and not any(trial.kept for trial in hopeless.trials)


def test_of_many_workers_the_splits_that_fit_the_lengths_are_tried() -> None:
    def tried(prompt: int, output: int) -> list[int]:
        search = Search(fleet(40), Lab(costs(), some(prompt, output)), GOAL)
        return [int(name.split("P")[0]) for name in search.starts() if ":" in name]

    long, short = tried(400, 2), tried(20, 100)
    assert len(long) == len(short) == 8 and min(long) > max(short)


def test_equal_searches_find_the_same() -> None:
    first, second = (Search(fleet(), Lab(costs(), some(100, 4)), GOAL).run(most=4) for _ in range(2))
    assert first == second
