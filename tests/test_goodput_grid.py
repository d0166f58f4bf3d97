"""`cbdisagg bench goodput`: what makes a cell, when it misses, and a grid from end to end, small as it gets."""

from __future__ import annotations

import dataclasses
import io
import json
from pathlib import Path
from typing import cast

import pytest
from cbdisagg_bench import goodput
from cbdisagg_bench.goodput_grid import Cell, _splits, best_of, cells, fleet, left_at, verdict
from cbdisagg_bench.goodput_report import knobs, table
from cbdisagg_bench.goodput_wall import drawn, loads, systems
from cbdisagg_bench.goodput_wall_cells import HALF, ONE, POLICY, Load, Runs, kept_up, summary, wall_cells
from cbdisagg_bench.goodput_wall_cells import table as wall_table
from cbdisagg_bench.goodput_workloads import TARGETS, WORKLOADS, Workload, prompt_s, step_s
from cbdisagg_bench.options import amounts, pairs
from msgspec.structs import replace
from rich.console import Console
from typer import BadParameter, Typer

from cbdisagg.config import Config, ConfigError
from cbdisagg.core.profile import parse_profile
from cbdisagg.sim.arrivals import Lengths
from cbdisagg.sim.goodput import Goal, Lab, Service
from cbdisagg.sim.variants import FREE, disaggregate

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
        assert {name.split(",")[0] for name in one.disaggregation} == {"1P:1D"} and len(one.aggregation) >= 2
        own = max(one.aggregation["deadline chunks"], one.disaggregated, one.default)
        assert one.tuned >= one.queued >= own > 0  # what the search began with
        assert 0 < one.overloaded <= 1 and 0 < one.queue_left <= 1
    assert found[1].aggregated >= found[0].aggregated


def test_the_best_is_found_without_looking_for_the_rates_of_the_others() -> None:
    """Of four sizes the third is best; one that is no better where the best so far fails is asked once."""
    asked: list[str] = []

    class Rated:
        """Keeps up with `most`, on rungs that are rates."""

        def __init__(self, name: str, most: float) -> None:
            self.name, self.most = name, most

        def rung(self, rate: float) -> float:
            return rate

        def within(self, rung: int, goal: Goal) -> float:
            return 1.0 if rung <= self.most else self.most / rung

        def sustained(self, goal: Goal, near: float | None) -> float:
            asked.append(f"{self.name} near {near}")
            return self.most

    services = {name: Rated(name, most) for name, most in (("a", 3.0), ("b", 2.0), ("c", 5.5), ("d", 5.0))}
    found = best_of(cast("dict[str, Service]", services), Goal(1.0, 1.0), near=4.0)
    assert found == {"a": 3.0, "c": 5.5} and asked == ["a near 4.0", "c near 3.0"]
    nobody = best_of(cast("dict[str, Service]", {"a": Rated("a", 0.0), "b": Rated("b", 0.0)}), Goal(1.0, 1.0))
    assert nobody == {"a": 0.0}


def test_every_split_is_tried_with_every_size_of_chunks() -> None:
    named = _splits({"policy": FREE, "1P:2D": disaggregate(1, 2), "2P:1D": disaggregate(2, 1)})
    assert len(named) == 8 and named["2P:1D, chunks of 256"] == {**disaggregate(2, 1), "scheduler.token_budget": 256}


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
    console.print(table([cell(2.0, 4.0, 3.8), replace(cell(40.0, 40.0, 44.0), workload="Azure-code-like")]))
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


def test_what_is_kept_up_with_is_read_off_the_rates() -> None:
    assert kept_up([1, 2, 4], [1.0, 0.95, 0.45], 0.9) == pytest.approx(2.2)
    assert kept_up([1, 2, 4], [0.9, 0.7, 1.0], 0.9) == 1.0  # a rate that is missed ends it
    assert kept_up([1, 2], [0.8, 0.8], 0.9) == 0.0 and kept_up([1, 2], [1.0, 0.99], 0.99) == 2.0


def runs(rate: float, met: dict[str, list[float]], ttft_ms: dict[str, float | None]) -> Runs:
    return Runs(Load(rate, 128, 32, 500.0, 30.0), met, {name: [ms] for name, ms in ttft_ms.items()})


def test_by_the_wall_clock_the_policy_is_held_against_the_best_less_the_spread() -> None:
    firsts: dict[str, float | None] = {ONE: 80.0, "two": 90.0, HALF: 100.0, POLICY: 104.0}
    slow = {ONE: [1.0, 1.0, 1.0], "two": [1.0, 1.0, 1.0], HALF: [1.0, 1.0, 1.0], POLICY: [1.0, 1.0, 0.95]}
    fast = {ONE: [0.8, 0.8, 0.8], "two": [0.6, 0.8, 0.7], HALF: [1.0, 1.0, 1.0], POLICY: [0.6, 0.6, 0.6]}
    found = wall_cells([runs(2.0, fast, dict.fromkeys(firsts)), runs(1.0, slow, firsts)])  # in any order
    most, nearly_all = found
    assert (most.part, nearly_all.part) == (0.9, 0.99)
    assert most.best == ONE and most.kept[ONE] == [1.5, 1.5, 1.5] and most.spread == 0.0  # not half of the machine
    assert most.kept[POLICY] == pytest.approx([1.25, 1.25, 1 + 0.05 / 0.35])
    assert most.ratio == pytest.approx(1.25 / 1.5) and most.misses == "under 0.95"
    assert most.later == {HALF: pytest.approx(1.04), ONE: pytest.approx(1.3)}
    spread = replace(most, kept={**most.kept, ONE: [1.5, 1.5, 1.2]})
    assert spread.spread == pytest.approx(0.2) and not spread.misses
    assert replace(spread, later={HALF: 1.06, ONE: 1.0}).misses == "late"
    assert replace(spread, later={HALF: None, ONE: 1.0}).misses == "late"
    assert not replace(spread, later={HALF: 1.05, ONE: 9.0}).misses


def test_a_wall_cell_where_nobody_keeps_up_is_no_miss_and_no_figure_is_nan() -> None:
    nobody = {ONE: [0.0], "two": [0.0], HALF: [0.0], POLICY: [0.0]}
    (cell, _) = wall_cells([runs(1.0, nobody, {ONE: None, "two": None, HALF: 100.0, POLICY: 100.0})])
    assert (cell.ratio, cell.spread, cell.misses) == (1.0, 0.0, "")
    told = json.dumps(summary(cell), allow_nan=False)
    assert json.loads(told)["later"] == {HALF: 1.0, ONE: None}
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(wall_table([cell], 3, 0.02))
    said = console.export_text()
    assert "0 of 1 cells miss" in " ".join(said.split()) and "…" not in said


def test_the_wall_grid_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    from cbdisagg_bench.goodput_plot import draw_wall

    met = {ONE: [1.0], "two": [1.0], HALF: [1.0], POLICY: [1.0]}
    draw_wall(wall_cells([runs(1.0, met, dict.fromkeys(met, 5.0))]), tmp_path / "map.svg")
    assert (tmp_path / "map.svg").stat().st_size > 5000


def test_by_the_wall_clock_all_systems_have_the_same_cores_and_requests_their_targets() -> None:
    found = systems(Config(), threads=4)
    assert list(found) == ["one", "two", "1P1D", POLICY, "half"]
    for name, config in found.items():
        threads = sum(group.count * group.threads for group in config.workers)
        assert threads == (2 if name == "half" else 4)
    modes = [config.policy.mode for config in found.values()]
    assert modes == ["aggregate", "aggregate", "disaggregate", "auto", "aggregate"]
    wanted = loads([1, 2.5], [(128, 32)], [(500, 30), (1000, 50)])
    assert [(load.rate, load.ttft_ms, load.tpot_ms) for load in wanted] == [
        (1, 500, 30),
        (2.5, 500, 30),
        (1, 1000, 50),
        (2.5, 1000, 50),
    ]
    first, other = (drawn(load, 9, seed=3) for load in wanted[::2])
    assert [(ask.arrival_s, ask.length) for ask in first] == [(ask.arrival_s, ask.length) for ask in other]
    assert {(ask.ttft_ms, ask.tpot_ms) for ask in other} == {(1000, 50)}


def test_pairs_and_amounts_read_as_they_are_written() -> None:
    assert pairs("--lengths", "128+32,512+16", "+", "128+32") == [(128, 32), (512, 16)]
    assert pairs("--targets", "500/30", "/", "500/30") == [(500, 30)] and amounts("--rates", "2, .5") == [0.5, 2.0]
    for text in ("128+0", "128", "128/3", "", "128+" + "9" * 30, "128+-1"):
        with pytest.raises(BadParameter, match="as 128"):
            pairs("--lengths", text, "+", "128+32")
    for text in ("0", "x", "1,,2", "-1", "nan", "inf", "1e308", "9" * 400):
        with pytest.raises(BadParameter, match="is not a number above 0 and up to 1,000,000"):
            amounts("--rates", text)
