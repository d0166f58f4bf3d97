"""The rate that a service keeps up with: demands at any rate, the search for it, and that runs are kept."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_world import config, costs

from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.clients import Record
from cbdisagg.sim.demand import FEWEST, demand
from cbdisagg.sim.goodput import HIGHEST, LOWEST, RUNG, Goal, Lab, climb, guess, see
from cbdisagg.sim.variants import AGGREGATE, changed, disaggregate, equal_workers, splits
from cbdisagg.sim.workload import Ask


def some(count: int = 300, rate: float = 7.0) -> list[Ask]:
    return make_workload(count, rate, Lengths(60, "exponential", 200), Lengths(5, "exponential", 20), 0)


def test_a_demand_keeps_its_pattern_at_any_rate() -> None:
    asked = demand(some(rate=7.0), seconds=10.0)
    slow, fast = asked.at(20.0), asked.at(80.0)
    assert (len(slow), len(fast)) == (FEWEST, 300)
    assert slow[-1].arrival_s == pytest.approx(FEWEST / 20, rel=0.2)
    for one, other in zip(slow, fast, strict=False):
        assert one.arrival_s == pytest.approx(4 * other.arrival_s)
        assert (one.length, one.output_tokens) == (other.length, other.output_tokens)
    again = demand(some(rate=700.0), seconds=10.0).at(20.0)
    assert [ask.arrival_s for ask in again] == pytest.approx([ask.arrival_s for ask in slow])


def test_requests_that_all_come_at_once_are_spread() -> None:
    asked = demand(some(rate=0.0), seconds=1.0)
    assert [ask.arrival_s for ask in asked.at(2.0)][:3] == [0.0, 0.5, 1.0]


@given(st.integers(LOWEST - 20, HIGHEST + 20), st.integers(-400, 400), st.floats(0.5, 0.99))
def test_the_last_rung_that_holds_is_found_from_anywhere(start: int, last: int, part: float) -> None:
    """`within` falls from 1 to 0.4 after the rung `last`."""
    asked: list[int] = []

    def within(rung: int) -> float:
        asked.append(rung)
        return 1.0 if rung <= last else 0.4

    found = climb(within, part, start)
    if last < LOWEST:
        assert found is None
    elif last >= HIGHEST:
        assert found == HIGHEST
    else:
        assert found == pytest.approx(last + (1 - part) / 0.6)
    assert all(LOWEST <= rung <= HIGHEST for rung in asked) and len(asked) < 60


def test_what_was_not_served_well_counts_and_own_targets_go_before() -> None:
    def record(ttft_s: float, tpot_s: float, status: str = "done", **own: float) -> Record:
        made = Record(Ask(0.0, 11, 10, **own), None, 0.0, ttft_s, ttft_s + 10 * tpot_s, 11)  # type: ignore[arg-type]
        made.status = status  # type: ignore[assignment]
        return made

    goal = Goal(1.0, 0.1)
    seen = see([record(0.9, 0.09), record(1.1, 0.09), record(0.9, 0.11), record(0.5, 0.05, "rejected")])
    assert seen.within(goal) == 0.25
    assert see([record(1.1, 0.15, ttft_ms=1200.0, tpot_ms=200.0), record(0.5, 0.05, ttft_ms=400)]).within(goal) == 0.5


def test_more_is_sustained_by_more_workers_and_under_looser_targets_from_the_same_runs() -> None:
    asked = demand(some(), seconds=2.0)
    lab = Lab(costs(), asked)
    one, two = (lab.service(equal_workers(config("any"), count)) for count in (1, 2))
    tight, loose = Goal(0.1, 0.02), Goal(0.5, 0.05)
    rates = [one.sustained(tight), one.sustained(loose), two.sustained(tight)]
    assert 0 < rates[0] < rates[1] and 1.6 < rates[2] / rates[0] < 2.4
    assert (
        one.within(math.floor(one.rung(rates[0])), tight) >= 0.9 > one.within(math.floor(one.rung(rates[0])) + 1, tight)
    )
    runs = lab.runs
    assert one.sustained(tight) == rates[0] and lab.runs == runs  # nothing is run twice
    assert lab.service(equal_workers(config("any"), 1)) is one
    assert one.sustained(Goal(1e-4, 1.0)) == 0.0
    assert one.rate(1) / one.rate(0) == pytest.approx(RUNG)


def test_a_guess_is_near_what_is_sustained_when_nobody_hurries() -> None:
    asked = demand(some(), seconds=2.0)
    service = config("any", "any")
    lab = Lab(costs(), asked)
    assert 0.5 < lab.service(service).sustained(Goal(0.3, 1.0)) / guess(2, costs(), asked) < 2.0


def test_variants_change_what_they_name() -> None:
    before = config("prefill", "decode")
    after = changed(equal_workers(before, 5), {**disaggregate(2, 3), "scheduler.token_budget": 64})
    assert (after.policy.mode, after.policy.pin_prefill, after.policy.pin_decode) == ("disaggregate", 2, 3)
    assert after.scheduler.token_budget == 64 and after.scheduler.max_batch == before.scheduler.max_batch
    assert [(group.role, group.count) for group in after.workers] == [("any", 5)]
    assert changed(before, AGGREGATE).policy.mode == "aggregate" and list(splits(3)) == [(1, 2), (2, 1)]
