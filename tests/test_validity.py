"""What `bench validity` compares, without a service: loads below saturation, and when a prediction holds."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from cbdisagg_bench.load_asks import VOCAB, fill
from cbdisagg_bench.load_client import Answer
from cbdisagg_bench.load_report import summarise
from cbdisagg_bench.validity import PARTS, _loads, compare, figures, predicted, validity
from cbdisagg_bench.validity_each import Firsts, compare_each, read_foreseen, table
from rich.console import Console

from cbdisagg.config import Config, ConfigError
from cbdisagg.core.policy import Decision, Wanted, explain
from cbdisagg.core.profile import parse_profile
from cbdisagg.messages import Address
from cbdisagg.sim.arrivals import Lengths
from cbdisagg.sim.simulation import simulate

PATH = Path(__file__).parents[1] / "configs" / "profiles" / "h200-llama3.1-8b.json"
COSTS = parse_profile(PATH.read_bytes(), PATH.name)


def test_loads_are_parts_of_what_saturates_with_the_same_lengths() -> None:
    loads = _loads(Config(), COSTS, 40, (Lengths(64, "exponential", 200), Lengths(16)), 0)
    rates = list(loads)
    assert len(rates) == len(PARTS) and rates[0] / rates[2] == pytest.approx(PARTS[0] / PARTS[2], rel=0.01)
    lengths = [[(ask.length, ask.output_tokens) for ask in asks] for asks in loads.values()]
    assert lengths[0] == lengths[1] == lengths[2]
    slow, fast = (predicted(simulate(Config(), COSTS, asks)) for asks in (loads[rates[0]], loads[rates[2]]))
    assert 0 < slow["TTFT", "p50"] <= slow["TTFT", "p99"] and slow["TPOT", "p50"] <= fast["TPOT", "p50"]


def test_a_prediction_holds_within_its_bound_of_the_median_run() -> None:
    runs = [{("TTFT", "p50"): value, ("TTFT", "p99"): 2 * value} for value in (90.0, 100.0, 140.0)]
    half, tail = compare(2.0, runs, {("TTFT", "p50"): 116.0, ("TTFT", "p99"): 150.0})
    assert (half.measured, half.spread, half.off) == (100.0, 50.0, pytest.approx(0.16))
    assert not half.holds and tail.holds and tail.off == pytest.approx(-0.25)


@pytest.mark.parametrize(("outputs", "metrics"), [(1, {"TTFT"}), (2, {"TTFT", "TPOT"})])
def test_answers_of_one_token_have_no_tpot_to_compare(outputs: int, metrics: set[str]) -> None:
    (asks, *_) = _loads(Config(), COSTS, 40, (Lengths(64), Lengths(outputs)), 0).values()
    simulated = predicted(simulate(Config(), COSTS, asks))
    times = [1.0 + 0.1 * n for n in range(outputs)]
    answered = [Answer(ask, 0.5, 0.5, times=times) for ask in fill(asks, VOCAB, 0)]
    measured = figures(summarise(answered, 2.0))
    assert {metric for metric, _ in measured} == metrics and measured.keys() == simulated.keys()
    assert {row.metric for row in compare(1.0, [measured], simulated)} == metrics


def test_each_first_token_is_held_against_what_was_foreseen() -> None:
    runs = [Firsts([100.0, 200.0], [110.0, 180.0]), Firsts([120.0, 200.0], [120.0, 200.0])]
    runs += [Firsts([100.0, 210.0], [100.0, 210.0])]
    simulator, coordinator, equal = compare_each(2.0, runs, [100.0, 250.0])
    assert (simulator.median, simulator.p90) == (pytest.approx(0.125), pytest.approx(0.225))
    assert (coordinator.who, coordinator.median, coordinator.p90) == ("coordinator", 0.0, 0.0) and coordinator.holds
    assert not simulator.holds
    assert equal.holds and (equal.median, equal.p90) == (pytest.approx(0.5 / 21), pytest.approx(0.9 / 21))
    lacking = [runs[0], Firsts([120.0, 200.0], [120.0, None])]
    _, coordinator, _ = compare_each(2.0, lacking, [100.0, 250.0])
    assert (coordinator.who, coordinator.p90, coordinator.holds) == ("coordinator", None, False)
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([coordinator, equal]))
    assert "nothing for some" in console.export_text()


def test_a_disturbed_run_is_not_what_a_prediction_is_judged_by() -> None:
    even, disturbed = Firsts([100.0] * 20, [100.0] * 20), Firsts([100.0, 400.0] * 10, [100.0] * 20)
    _, coordinator, equal = compare_each(2.0, [even, disturbed, even], [100.0] * 20)
    assert (coordinator.p90, equal.p90) == (0.0, 0.0)
    (_, alone) = compare_each(2.0, [disturbed], [100.0] * 20)
    assert alone.p90 == pytest.approx(0.75) and not alone.holds


def test_what_the_coordinator_foresaw_is_read_from_its_trace(tmp_path: Path) -> None:
    here, there = Address("decode-0", 3, ""), Address("prefill-0", 4, "")
    decisions = [Decision(here, here, "faster", 0.25, others=(Decision(there, here, "role", 9.0),))]
    decisions += [Decision(there, here, "role", 1.5e-05), Decision(there, here, "role", 12.0)]
    lines = [explain(decision, Wanted(10, 5, 1.0, 0.1)) for decision in decisions]
    log = "".join(f"10:00:00 coordinator: request 7.{n}: {line}\n" for n, line in ((9, lines[0]), (10, lines[1])))
    log = f"10:00:00 coordinator: request 7.2: {lines[2]}\nsomething else\n{log}"
    log += f"10:00:01 coordinator: request 7.9: {lines[2]}\n"  # it moves: what was said at first counts
    file = tmp_path / "log"
    file.write_text(log)
    assert read_foreseen(file, 2) == [pytest.approx(250.0), pytest.approx(0.015)]
    assert read_foreseen(file, 3) == [None, pytest.approx(250.0), pytest.approx(0.015)]  # of 7.8 nothing was said
    file.write_text("nothing was traced\n")
    assert read_foreseen(file, 2) == [None, None]


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        validity(PATH.parents[1] / "1p1d.toml", tmp_path)
