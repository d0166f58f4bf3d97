"""What the policy is worth against both baselines: `cbdisagg bench goodput`.

For each workload and pair of targets, the rate of requests per worker at which enough of them meet both targets: with
the best aggregation, the best split into prefill and decode workers, the policy as it comes, and the policy tuned. By
the virtual clock and a profile's costs; `--clock wall` does a small grid on services here (goodput_wall.py). Exit
status 1 if a figure to reach is missed.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import typer
import uvloop
from cbdisagg_bench import goodput_wall, goodput_wall_cells
from cbdisagg_bench.company import Company
from cbdisagg_bench.goodput_grid import Cell, cells, fleet, verdict
from cbdisagg_bench.goodput_report import summary, table, turned
from cbdisagg_bench.goodput_workloads import FINER, TARGETS, WORKLOADS, Targets, Workload
from cbdisagg_bench.options import (
    MANY_WORKERS,
    PORTS,
    ROUNDS,
    SEEDS,
    amounts,
    at_least,
    check_picture,
    check_place,
    chosen,
    command,
    pairs,
    refuse_unused,
)
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.service import ServiceFailed
from cbdisagg_bench.simulate_input import PROFILE, read_bytes
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from cbdisagg.actors.cores import usable_cores
from cbdisagg.cli import fail
from cbdisagg.config import Config, ConfigError
from cbdisagg.core.profile import Profile, parse_profile
from cbdisagg.load import load_config
from cbdisagg.misfit import misfit
from cbdisagg.sim.demand import FEWEST, Demand
from cbdisagg.sim.goodput import Lab

PARTS = (0.9, 0.99)
LASTING = 4
"""The runs that count last so many times as long as those of the search: at first any service has room."""
ONLY_VIRTUAL = ("profile", "workers", "kv_gb", "only", "aim", "fine", "quick", "turns", "read")
ONLY_WALL = ("config", "rates", "lengths", "targets", "rounds", "requests", "port")


@dataclass(frozen=True, slots=True)
class Plan:
    """What is run: every combination. `tokens`: generated in a run, at most; requests come for `patience` times as long
    as one of them may take, and `lasting` times that in the runs that count. `turns`: simulations of the tuner for
    each cell.
    """

    profiles: Sequence[Profile]
    workloads: Sequence[Workload]
    targets: Sequence[Targets]
    parts: Sequence[float]
    workers: int
    kv_gb: float
    turns: int
    tokens: int
    patience: float
    lasting: int
    seed: int

    def demand(self, workload: Workload, targets: Targets, profile: Profile, longer: int = 1) -> Demand:
        goal = targets.goal(workload, profile, self.parts[0])
        longest_s = goal.ttft_s + goal.tpot_s * workload.outputs.mean
        most = max(FEWEST, round(self.tokens / workload.outputs.mean))
        return workload.demand(longer * most, longer * self.patience * longest_s, self.seed)


def goodput(
    context: typer.Context,
    clock: Annotated[Literal["virtual", "wall"], typer.Option(help="wall: services on this machine.")] = "virtual",
    profile: Annotated[
        list[Path] | None, typer.Option(help="What steps cost on each worker; repeatable. Default: an H200's, 8B.")
    ] = None,
    workers: Annotated[
        int, typer.Option(callback=at_least(2, MANY_WORKERS), help="Equal ones, shared out in every way.")
    ] = 3,
    kv_gb: Annotated[
        float, typer.Option(callback=at_least(1, 1_000), help="KV memory of each worker, in 10^9 bytes.")
    ] = 60.0,
    config: Annotated[Path | None, typer.Option(help="Wall clock: model, targets and knobs of the policy.")] = None,
    rates: Annotated[str, typer.Option(help="Wall clock: requests per second, as 1,2.")] = "1,2,3",
    lengths: Annotated[
        str, typer.Option(help="Wall clock: mean tokens of prompts + answers, as 128+32,512+16.")
    ] = "128+32,512+16",
    targets: Annotated[
        str, typer.Option(help="Wall clock: TTFT/TPOT in ms, as 500/30,1000/50; else the config's.")
    ] = "",
    rounds: Annotated[int, typer.Option(callback=at_least(1, ROUNDS), help="Wall clock: of each load.")] = 3,
    requests: Annotated[int, typer.Option(callback=at_least(1), help="Wall clock: of each run.")] = 20,
    port: Annotated[int, typer.Option(callback=at_least(*PORTS), help="Wall clock: of the first service; 0: any.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Workloads, by name; repeatable. Default: all.")] = None,
    aim: Annotated[list[str] | None, typer.Option(help="Targets, by name; repeatable. Default: all.")] = None,
    fine: Annotated[bool, typer.Option("--fine", help="More targets, longer runs, more turns of the tuner.")] = False,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two workers, two workloads, 90 % only, short runs: a minute or two.")
    ] = False,
    turns: Annotated[int, typer.Option(callback=at_least(0), help="Runs of the tuner per cell; 0: as suits.")] = 0,
    read: Annotated[
        list[Path] | None, typer.Option(help="Run nothing: show the cells in this file of --out; repeatable.")
    ] = None,
    seed: Annotated[int, typer.Option(callback=at_least(0, SEEDS), help="Of arrivals and lengths.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the cells as JSON there too.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG or SVG of the heat map (matplotlib).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare aggregation, disaggregation and the policy by goodput.

    Example: cbdisagg bench goodput --workers 8 --fine --plot goodput.png
    """
    refuse_unused(context, dict.fromkeys(ONLY_VIRTUAL if clock == "wall" else ONLY_WALL, f"by the {clock} clock"))
    check_place(out, "--out")
    if clock == "wall":
        settings = load_config(config)
        usual = f"{settings.targets.ttft_ms:.0f}/{settings.targets.tpot_ms:.0f}"
        wanted = goodput_wall.loads(
            amounts("--rates", rates),
            pairs("--lengths", lengths, "+", "128+32"),
            pairs("--targets", targets or usual, "/", "500/30"),
        )
        check_picture(plot)
        _on_this_machine(settings, wanted, rounds, requests, seed, port, out, plot, as_json)
        return
    names = [workload.name for workload in WORKLOADS]
    picked = chosen("--only", only or (names[2:] if quick else names), names)
    usual = FINER if fine else TARGETS[:2] if quick else TARGETS
    aims = chosen("--aim", aim or [targets.name for targets in usual], [targets.name for targets in FINER])
    plan = Plan(
        profiles=[parse_profile(read_bytes(path), str(path)) for path in profile or [PROFILE]],
        workloads=[workload for workload in WORKLOADS if workload.name in picked],
        targets=[targets for targets in FINER if targets.name in aims],
        parts=PARTS[:1] if quick else PARTS,
        workers=2 if quick else workers,
        kv_gb=kv_gb,
        turns=turns or (60 if fine else 8 if quick else 12),
        tokens=400_000 if fine else 30_000 if quick else 100_000,
        patience=4.0 if fine else 2.0,
        lasting=1 if quick else LASTING,
        seed=seed,
    )
    check_picture(plot)
    started = time.perf_counter()
    found, runs = run(plan) if not read else ([cell for path in read for cell in read_cells(path)], 0)
    took_s = time.perf_counter() - started
    told = _told(found, plan, runs, took_s)
    _hand_out(told, out, as_json, lambda: Console().print(table(found)))
    if not as_json:
        print("\n".join(["", "tuned to:", *turned(found), f"{runs} simulations in {took_s:.0f} s"]))
    if plot is not None:
        from cbdisagg_bench.goodput_plot import draw

        draw(found, plot)
    if not verdict(found).reached:
        raise typer.Exit(1)


def _on_this_machine(
    settings: Config,
    wanted: Sequence[goodput_wall_cells.Load],
    rounds: int,
    requests: int,
    seed: int,
    port: int,
    out: Path | None,
    plot: Path | None,
    js: bool,
) -> None:
    configs = goodput_wall.systems(settings, usable_cores().at_once)
    columns = (TextColumn("{task.description:>40}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
    try:
        company = Company()
        with progress_bar(*columns) as bar:
            task = bar.add_task("runs", total=len(configs) * len(wanted) * rounds)
            work = goodput_wall.measure(configs, wanted, requests, rounds, seed, port, bar, lambda: bar.advance(task))
            runs = uvloop.run(work)
    except ServiceFailed as error:
        fail(str(error))
    company.end()
    found = goodput_wall_cells.wall_cells(runs)
    told = {**_head(seed), "rounds": rounds, "requests": requests, "others": round(company.others, 3)}
    told["cells"] = [goodput_wall_cells.summary(cell) for cell in found]
    told["runs"] = [msgspec.to_builtins(each) for each in runs]
    _hand_out(told, out, js, lambda: Console().print(goodput_wall_cells.table(found, rounds, company.others)))
    if plot is not None:
        from cbdisagg_bench.goodput_plot import draw_wall

        draw_wall(found, plot)
    if any(cell.misses for cell in found):
        raise typer.Exit(1)


def _hand_out(told: dict[str, object], out: Path | None, as_json: bool, show: Callable[[], None]) -> None:
    text = json.dumps(told, indent=1)
    if out is not None:
        out.write_text(text + "\n", encoding="utf-8")
    if as_json:
        print(text)
    else:
        show()


def _head(seed: int) -> dict[str, object]:
    return {
        "command": command(),
        "seed": seed,
        "machine": platform.machine(),
        "versions": {"python": platform.python_version()},
    }


def run(plan: Plan) -> tuple[list[Cell], int]:
    """The cells, and how many simulations they took; the bar counts cells."""
    found: list[Cell] = []
    runs = 0
    total = len(plan.profiles) * len(plan.workloads) * len(plan.targets) * len(plan.parts)
    with _bar(total) as (advance, ran):
        for profile in plan.profiles:
            config = fleet(profile, plan.workers, plan.kv_gb)
            for workload in plan.workloads:
                for targets in plan.targets:
                    lab, longer = (
                        Lab(profile, plan.demand(workload, targets, profile, times), ran) for times in (1, plan.lasting)
                    )
                    for cell in cells(config, lab, longer, workload, targets, plan.parts, plan.turns):
                        found.append(cell)
                        advance(f"{workload.name}, {targets.name}")
                    runs += lab.runs + longer.runs
    return found, runs


@contextmanager
def _bar(total: int) -> Iterator[tuple[Callable[[str], None], Callable[[], None]]]:
    """On stderr; the context gives what to call at the end of a cell, and before each simulation."""
    columns = (TextColumn("{task.description:>28}"), BarColumn(), TextColumn("{task.fields[runs]} runs"))
    with progress_bar(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("cells", total=total, runs=0)
        count = 0

        def ran() -> None:
            nonlocal count
            count += 1
            bar.update(task, runs=count)

        yield lambda what: bar.update(task, advance=1, description=what), ran


def read_cells(path: Path) -> list[Cell]:
    """Those of an earlier run, by the virtual clock. Raises ConfigError: one line that names the file."""
    data = read_bytes(path)
    try:
        return msgspec.json.decode(data, type=_Kept).cells
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not written by bench goodput --out: {misfit(data, _Kept, error)}") from None


class _Kept(msgspec.Struct):
    cells: list[Cell]


def _told(found: Sequence[Cell], plan: Plan, runs: int, took_s: float) -> dict[str, object]:
    return {
        **_head(plan.seed),
        "workers": plan.workers,
        "runs": runs,
        "took_s": round(took_s, 1),
        "verdict": msgspec.to_builtins(verdict(found)) | {"reached": verdict(found).reached},
        "cells": [summary(cell) for cell in found],
    }


if __name__ == "__main__":
    typer.run(goodput)
