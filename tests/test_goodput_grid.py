"""`cbdisagg bench goodput`: what makes a cell, when it misses, and a grid from end to end, small as it gets."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import cast

import pytest
from cbdisagg_bench import goodput
from cbdisagg_bench.goodput_grid import Cell, _best_split, cells, fleet, left_at, verdict
from cbdisagg_bench.goodput_report import knobs, table
from cbdisagg_bench.goodput_wall import POLICY, Load, WallCell, loads, summary, systems
from cbdisagg_bench.goodput_workloads import TARGETS, WORKLOADS, Workload, prompt_s, step_s
from cbdisagg_bench.options import sums
from rich.console import Console
from typer import BadParameter, Typer

from cbdisagg.config import Config, ConfigError, Targets
from cbdisagg.core.profile import parse_profile
from cbdisagg.sim.arrivals import Lengths
from cbdisagg.sim.goodput import Goal, Lab, Service
from cbdisagg.sim.variants import disaggregate

PATH = Path(__file__).parents[1] / "configs" / "profiles" / "h200-llama3.1-8b.json"
H200 = parse_profile(PATH.read_bytes(), PATH.name)
TINY = Workload("tiny", Lengths(300, "lognormal", 1000), Lengths(4))


def cell(aggregated: float, disaggregated: float, tuned: float, **others: float) -> Cell:
    aggregation, split = (
        {"deadline chunks": 1.5 * aggregated, "chunks of 512": aggregated, "chunks of 256": 0.0},
        {"1P:1D": disaggregated, "2P:1D": 0.0},
    )
    rates = {"default": 1.0, "queued": tuned, "tuned": tuned, "overloaded": 0.98, "queue_left": 0.5, **others}
    return Cell("p", "w", "t", 250.0, 15.0, 0.9, aggregation, split, knobs={"policy.rho": 0.7}, **rates)


def test_a_cell_is_held_against_the_better_baseline_and_balanced_ones_to_more() -> None:
    assert cell(2.0, 4.0, 3.9).ratio == pytest.approx(0.975) and not cell(2.0, 4.0, 3.9).misses
    assert cell(2.0, 4.0, 3.8).misses == "under 0.97" and not cell(2.0, 4.0, 3.8).balanced
    balanced = cell(3.7, 4.0, 4.08)
    assert balanced.balanced and balanced.misses == "balanced, under 1.03"
    assert not cell(3.7, 4.0, 4.2).misses
    assert cell(4.0, 1.0, 6.6).ratio == pytest.approx(1.65) and cell(4.0, 1.0, 6.6).over_deadlines == pytest.approx(1.1)
    refusing = cell(4.0, 1.0, 8.0, queued=6.0)
    assert (refusing.ratio, refusing.tuned_ratio, refusing.over_deadlines) == (1.5, 2.0, 1.0)
    assert cell(2.0, 4.0, 8.0, queued=3.8).misses == "under 0.97"  # what it gains by refusing does not count
    nothing = cell(0.0, 0.0, 0.0)
    assert nothing.ratio == 1.0 and not nothing.balanced and cell(0.0, 0.0, 1.0).ratio == 2.0
    assert cell(2.0, 4.0, 4.0, overloaded=0.94).misses == "overloaded, under 0.95"


def test_the_verdict_counts_every_cell() -> None:
    told = verdict([cell(2.0, 4.0, 3.8), cell(4.0, 4.0, 4.4), cell(4.0, 4.0, 4.8, overloaded=0.96)])
    assert (told.cells, told.missed, told.balanced, told.overloaded) == (3, 1, 2, 0.96) and not told.reached
    assert verdict([cell(4.0, 4.0, 8.0, queued=4.8)]).tuned_median == 2.0 and told.queue_left == 0.5
    assert told.lowest == pytest.approx(0.95) and told.median == pytest.approx(1.15)
    assert verdict([cell(4.0, 4.0, 4.4), cell(4.0, 4.0, 4.9)]).reached
    assert not verdict([cell(4.0, 4.0, 4.4)]).reached  # the median is too low
    assert verdict([cell(2.0, 4.0, 4.0)]).reached and verdict([cell(2.0, 4.0, 4.0)]).median == 0.0


def test_targets_are_stated_in_units_of_the_device() -> None:
    for workload in WORKLOADS:
        goals = [targets.goal(workload, H200, 0.9) for targets in TARGETS]
        assert goals[0].tpot_s < goals[1].tpot_s < goals[2].tpot_s
        assert goals[0].ttft_s > goals[2].ttft_s > prompt_s(workload, H200)
        assert all(goal.tpot_s > step_s(H200) for goal in goals)


def test_a_tiny_grid_from_end_to_end() -> None:
    lab, longer = (Lab(H200, TINY.demand(times * 60, times * 0.5, 0)) for times in (1, 2))
    found = list(cells(fleet(H200, 2, 10.0), lab, longer, TINY, TARGETS[1], (0.9, 0.5), turns=2))
    assert [one.part for one in found] == [0.9, 0.5]
    for one in found:
        assert one.disaggregation.keys() == {"1P:1D"} and len(one.aggregation) == 5
        own = max(one.aggregation["deadline chunks"], one.disaggregated, one.default)
        assert one.tuned >= one.queued >= own > 0  # what the search began with
        assert 0 < one.overloaded <= 1 and 0 < one.queue_left <= 1
    assert found[1].aggregated >= found[0].aggregated


def test_a_split_has_the_chunks_that_suit_it_best() -> None:
    """Of four sizes the one in the middle is best; the search for each begins at what the best so far keeps up with."""
    sizes = {2048: 3.0, 1024: 5.0, 512: 4.0, 256: 1.0}
    asked: list[tuple[int, float | None]] = []

    class Rated:
        def __init__(self, config: Config) -> None:
            self.chunk = config.scheduler.token_budget
            assert (config.policy.mode, config.policy.pin_prefill) == ("disaggregate", 1)

        def sustained(self, goal: Goal, near: float | None) -> float:
            asked.append((self.chunk, near))
            return sizes[self.chunk]

    class Rating:
        def service(self, config: Config) -> Rated:
            return Rated(config)

    values, rate = _best_split(Config(), cast(Lab, Rating()), Goal(1.0, 1.0), disaggregate(1, 1))
    assert (values["scheduler.token_budget"], values["policy.pin_decode"], rate) == (1024, 1, 5.0)
    assert asked == [(2048, None), (1024, 3.0), (512, 5.0), (256, 5.0)]


def test_what_an_overload_leaves_is_a_part_of_the_best_at_any_load() -> None:
    class Collapsing:
        """Serves up to 10 requests per second, and of more ever fewer."""

        def rate(self, rung: float) -> float:
            return rung

        def rung(self, rate: float) -> float:
            return rate

        def within(self, rung: int, goal: object) -> float:
            return 1.0 if rung <= 10 else 60 / rung**2

    service, goal = cast(Service, Collapsing()), Goal(1.0, 1.0)
    assert left_at(2.0, service, goal, 10.0) == pytest.approx(60 / 20 / 10)
    assert left_at(2.0, service, goal, 0.0) == 1.0  # it keeps up with nothing: there is nothing to lose


def test_a_table_tells_all_cells_and_what_was_turned() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table([cell(2.0, 4.0, 3.8), cell(4.0, 4.0, 4.4)]))
    said = " ".join(console.export_text().split())
    assert (
        "0.95" in said
        and "98%" in said
        and "1.10" in said
        and "50%" in said
        and "1 miss a figure" in said
        and "B" in said
        and "…" not in said
    )
    turned = {"policy.mode": "auto", "policy.pin_prefill": 1, "policy.pin_decode": 0, "policy.eta": 0.5}
    made = cell(1.0, 1.0, 1.0)
    assert knobs(made) == "rho 0.7"
    assert knobs(type(made)(**{**_fields(made), "knobs": turned})) == "1P:0D eta 0.5"
    assert knobs(type(made)(**{**_fields(made), "knobs": {}})) == "as it comes"


def _fields(one: Cell) -> dict[str, object]:
    return {name: getattr(one, name) for name in one.__struct_fields__}


def test_the_command_writes_what_it_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(goodput, "WORKLOADS", (TINY, dataclasses.replace(TINY, name="other")))
    monkeypatch.setattr(goodput, "FEWEST", 40)
    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(goodput.goodput)
    out = tmp_path / "grid.json"
    given = ["--quick", "--turns", "1", "--only", "tiny", "--out", str(out)]
    status = app([*given, "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(out.read_text()) and told["verdict"]["cells"] == len(told["cells"]) == 2
    assert bool(status) != told["verdict"]["reached"]
    kept = tmp_path / "kept.json"
    kept.write_text(json.dumps({"cells": [dict(told["cells"][0], queued=0.0), told["cells"][1]]}))
    assert app(["--read", str(kept), "--json"], standalone_mode=False) == 1  # a cell that misses
    again = json.loads(capsys.readouterr().out)
    assert (again["verdict"]["missed"], again["verdict"]["lowest"], again["runs"]) == (1, 0.0, 0)
    with pytest.raises(ConfigError, match=r"grid\.txt: not written by bench goodput"):
        (tmp_path / "grid.txt").write_text("[]")
        app(["--read", str(tmp_path / "grid.txt")], standalone_mode=False)
    with pytest.raises(BadParameter, match="'nobody' is not one of"):
        app(["--only", "nobody"], standalone_mode=False)
    with pytest.raises(BadParameter, match=r"must end in \.png or \.svg"):
        app(["--plot", str(tmp_path / "map.txt")], standalone_mode=False)


@pytest.mark.parametrize(
    ("given", "option", "clock"),
    [(["--rates", "1"], "--rates", "virtual"), (["--clock", "wall", "--fine"], "--fine", "wall")],
)
def test_an_option_that_would_change_nothing_is_refused(given: list[str], option: str, clock: str) -> None:
    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(goodput.goodput)
    with pytest.raises(BadParameter, match=f"has no effect by the {clock} clock") as refused:
        app(given, standalone_mode=False)
    assert refused.value.param_hint == f"'{option}'"


def test_by_the_wall_clock_the_policy_is_held_against_the_best_less_the_spread() -> None:
    load = Load(2.0, 128, 32, 1000.0, 50.0)
    good = {"one": [1.9, 2.0, 1.8], "two": [1.0, 1.0, 1.0], POLICY: [1.7, 1.75, 1.6]}
    ttft_ms = {"half": [200.0, 210.0, 190.0], POLICY: [150.0, 214.0, 208.0]}
    met = WallCell(load, good, ttft_ms)
    assert met.later == pytest.approx(1.04)
    assert (met.best, met.median("one"), met.spread) == ("one", 1.9, pytest.approx(0.2 / 1.9))
    assert met.ratio == pytest.approx(1.7 / 1.9) and met.holds
    assert not WallCell(load, {**good, "one": [1.9, 1.9, 1.9]}, ttft_ms).holds
    nobody = WallCell(load, {"one": [0.0], POLICY: [0.0]}, ttft_ms)
    assert nobody.ratio == 1.0 and nobody.spread == 0.0 and summary(nobody)["holds"]


def test_by_the_wall_clock_all_systems_have_the_same_cores_and_targets() -> None:
    targets = Targets(ttft_ms=500, tpot_ms=40)
    found = systems(Config(), targets, threads=4)
    assert list(found) == ["one", "two", "1P1D", POLICY, "half"]
    for name, config in found.items():
        threads = sum(group.count * group.threads for group in config.workers)
        assert threads == (2 if name == "half" else 4) and config.targets == targets
    modes = [config.policy.mode for config in found.values()]
    assert modes == ["aggregate", "aggregate", "disaggregate", "auto", "aggregate"]
    assert sums("--lengths", "128+32,512+16") == [(128, 32), (512, 16)]
    with pytest.raises(BadParameter, match="as 128"):
        sums("--lengths", "128+0")
    assert [load.rate for load in loads([1, 2], [(128, 32)], targets)] == [1, 2]
