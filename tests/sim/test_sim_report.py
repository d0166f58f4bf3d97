"""What is told of a run: definitions on records made by hand, and a report of a real one."""

from __future__ import annotations

from array import array

import pytest
from sim_world import config, costs

from cbdisagg.messages import Targets
from cbdisagg.sim.clients import Record
from cbdisagg.sim.machine import Meter
from cbdisagg.sim.report import good_at, latency, lines, report
from cbdisagg.sim.simulation import Outcome, simulate
from cbdisagg.sim.workload import Ask

TARGETS = Targets(1.0, 0.1)


def record(arrival: float, first: float, last: float, tokens: int, **changes: object) -> Record:
    made = Record(Ask(arrival, tokens, 10), TARGETS, arrival, first, last, tokens, status="done")
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_goodput_counts_what_was_in_time_of_all_that_was_asked() -> None:
    records = [
        record(1.0, 1.5, 2.4, 10),  # TTFT 0.5, TPOT 0.1
        record(2.0, 3.5, 3.5, 1),  # TTFT 1.5; one token has no TPOT to miss
        record(3.0, 3.5, 5.0, 11),  # TPOT 0.15
        record(4.0, -1.0, -1.0, 0, status="rejected"),
    ]
    meter = Meter(steps=4, busy_s=2.5, tokens=40, draws=22, pushed_bytes=7, most_pages=3)
    outcome = Outcome(records, array("f", [0.1, 0.3]), 5.0, {"worker-0": meter}, {("local", "x"): 3}, [], 0, 0)
    told = report(outcome)
    assert (told.requests, told.done, told.rejected, told.failed) == (4, 3, 1, 0)
    assert told.attainment == 0.25 and told.ttft_attainment == 0.5 and told.tpot_attainment == 0.5
    assert told.seconds == 4.0 and told.goodput_per_s == 0.25 and told.requests_per_s == 0.75
    assert told.generated_tokens == 22 and told.generated_per_s == 5.5
    assert told.ttft_s.p50 == 0.5 and told.ttft_s.mean == pytest.approx(2.5 / 3)
    assert told.tpot_s.p50 == pytest.approx(0.125) and told.itl_s.mean == pytest.approx(0.2)
    (use,) = told.workers
    assert (use.busy, use.batch, use.pages) == (0.5, 10.0, 3)
    assert good_at(records, 2.0, 0.1) == 2 and good_at(records, 2.0, 0.2) == 3


def test_routes_are_those_of_the_requests_that_were_served() -> None:
    """Not of those that were placed and then refused by a worker, whose pool is too small for them."""
    asks = [Ask(0.0, 5, 20), Ask(0.1, 5, 10_000_000), Ask(0.2, 5, 30)]
    told = report(simulate(config("any"), costs(), asks))
    assert (told.done, told.rejected) == (2, 1) and sum(told.decisions.values()) == 3
    ((route, count),) = told.routes.items()
    assert count == 2 and f"routes: {route} 2" in lines(told)


def test_nothing_gives_zeros() -> None:
    assert latency([]) == latency([0.0])
    told = report(Outcome([], array("f"), 0.0, {}, {}, [], 0, 0))
    assert told.attainment == 0 and "0 requests" in lines(told)[0]


def test_a_table_fits_a_terminal_and_shortens_many_workers() -> None:
    outcome = simulate(config(*["any"] * 20), costs(), [Ask(0.1 * n, 5, 20) for n in range(30)])
    shown = lines(report(outcome))
    assert max(map(len, shown)) <= 100
    assert sum("worker-" in line for line in shown) == 16 and any("... 4 more ..." in line for line in shown)
    assert any(line.startswith("TTFT") for line in shown)
