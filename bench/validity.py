"""Does the simulator tell the truth? `cbdisagg bench validity`: one workload, simulated and on a service here.

Starts the config's service, puts three loads on it in turn, several times over, and sets TTFT and TPOT beside what the
simulator says of the same arrivals and lengths. The spread of equal runs is shown, for no prediction can be better than
that. Loads are parts of the rate at which the simulated service is saturated.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from cbdisagg_bench.load_asks import VOCAB, fill
from cbdisagg_bench.load_client import run as send
from cbdisagg_bench.load_report import summarise
from cbdisagg_bench.options import at_least
from cbdisagg_bench.service import ServiceFailed, running
from cbdisagg_bench.simulate_input import read_profile
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cbdisagg.cli import fail
from cbdisagg.config import Config, Policy
from cbdisagg.core.profile import Profile
from cbdisagg.load import load_config
from cbdisagg.sim.arrivals import make_workload, parse_lengths
from cbdisagg.sim.report import report
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.workload import Ask

PARTS = (0.3, 0.6, 0.85)
BOUNDS = {"p50": 0.15, "p99": 0.30}
"""How far off a prediction may be, as a part of what was measured."""
NAME = "validity"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in milliseconds: measured (the median of the runs), the runs' greatest minus least, simulated."""

    rate: float
    metric: str
    percentile: str
    measured: float
    spread: float
    simulated: float

    @property
    def off(self) -> float:
        return self.simulated / self.measured - 1

    @property
    def holds(self) -> bool:
        return abs(self.off) <= BOUNDS[self.percentile]


def validity(
    config: Annotated[Path, typer.Argument(exists=True, help="TOML file, as for serve.")],
    profile: Annotated[Path, typer.Option(exists=True, help="Of this machine, by cbdisagg profile.")],
    requests: Annotated[int, typer.Option(callback=at_least(10), help="Of each run.")] = 100,
    runs: Annotated[int, typer.Option(callback=at_least(1), help="How often each load is put on.")] = 3,
    prompts: Annotated[str, typer.Option(help="Lengths: 128, or exponential:128:512.")] = "exponential:128:512",
    outputs: Annotated[str, typer.Option(help="As prompts.")] = "exponential:32:128",
    seed: Annotated[int, typer.Option(callback=at_least(0), help="Of arrivals, lengths and ids.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare simulated and measured latencies on three loads.

    Example: cbdisagg bench validity configs/1p1d.toml --profile profile.json
    """
    settings = load_config(config)
    costs = read_profile(settings, profile)
    try:
        loads = _loads(settings, costs, requests, prompts, outputs, seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--prompts', '--outputs'") from None
    try:
        measured = asyncio.run(_measure(config, profile.resolve(), list(loads.values()), runs, seed))
    except ServiceFailed as error:
        fail(str(error))
    rows = [
        row
        for (rate, asks), figures in zip(loads.items(), measured, strict=True)
        for row in compare(rate, figures, predict(settings, costs, asks))
    ]
    if as_json:
        print(json.dumps({"rows": [asdict(row) | {"off": row.off, "holds": row.holds} for row in rows]}, indent=1))
    else:
        Console().print(_table(rows, runs))
    if not all(row.holds for row in rows):
        raise typer.Exit(1)


def _loads(
    settings: Config, costs: Profile, count: int, prompts: str, outputs: str, seed: int
) -> dict[float, list[Ask]]:
    """The requests of each load, by their rate per second."""
    lengths = parse_lengths(prompts), parse_lengths(outputs)
    open_queue = replace(settings, policy=replace(settings.policy, queue_limit=max(count, Policy().queue_limit)))
    saturated = report(simulate(open_queue, costs, make_workload(count, 0.0, *lengths, seed))).requests_per_s
    rates = [round(part * saturated, 3) for part in PARTS]
    return {rate: make_workload(count, rate, *lengths, seed) for rate in rates}


Figures = dict[tuple[str, str], float]
"""(metric, percentile) -> milliseconds."""


def predict(settings: Config, costs: Profile, asks: Sequence[Ask]) -> Figures:
    told = report(simulate(settings, costs, asks))
    return {
        (name, percent): 1e3 * getattr(getattr(told, f"{name.lower()}_s"), percent)
        for name in ("TTFT", "TPOT")
        for percent in BOUNDS
    }


async def _measure(
    config: Path, profile: Path, loads: Sequence[Sequence[Ask]], runs: int, seed: int
) -> list[list[Figures]]:
    """For each load the figures of its runs. Loads take turns, so that a slow spell meets all; ids are always new.

    The service decides by the same profile as the simulator's.
    """
    figures: list[list[Figures]] = [[] for _ in loads]
    seeds = itertools.count(seed)
    with tempfile.TemporaryDirectory() as folder, Progress(console=Console(stderr=True), transient=True) as progress:
        settings = (f"model.served_name={NAME}", f"profile.path={profile}")
        options = ("--config", str(config), *(word for setting in settings for word in ("--set", setting)))
        async with running(NAME, options, Path(folder) / "stderr") as service:
            await _send(service.url, loads[0][:5], next(seeds), progress)  # the first requests warm up
            for _ in range(runs):
                for n, asks in enumerate(loads):
                    figures[n].append(await _send(service.url, asks, next(seeds), progress))
    return figures


async def _send(url: str, asks: Sequence[Ask], seed: int, progress: Progress) -> Figures:
    sent = fill(asks, VOCAB, seed)
    answers, seconds = await send(url, NAME, sent, len(sent), progress)
    problems = [answer.error for answer in answers if answer.error]
    if problems:
        raise ServiceFailed(f"{len(problems)} of {len(sent)} requests failed: {problems[0]}")
    told = summarise(answers, seconds)
    places = {"p50": 0, "p99": 2}
    return {
        (name, percent): values[places[percent]]
        for name, values in (("TTFT", told.ttft_ms), ("TPOT", told.tpot_ms))
        for percent in BOUNDS
    }


def compare(rate: float, runs: Sequence[Figures], predicted: Figures) -> list[Row]:
    rows = []
    for (metric, percentile), simulated in predicted.items():
        values = [figures[metric, percentile] for figures in runs]
        middle = statistics.median(values)
        rows.append(Row(rate, metric, percentile, middle, max(values) - min(values), simulated))
    return rows


def _table(rows: Sequence[Row], runs: int) -> Table:
    table = Table(
        caption=f"milliseconds; measured: median of {runs} runs, +-: their range", box=box.SIMPLE_HEAD, show_edge=False
    )
    for name in ("requests/s", "", "", "measured", "+-", "simulated", "off", "holds"):
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            f"{row.rate:g}",
            row.metric,
            row.percentile,
            f"{row.measured:.1f}",
            f"{row.spread:.1f}",
            f"{row.simulated:.1f}",
            f"{row.off:+.0%}",
            "yes" if row.holds else f"no (bound {BOUNDS[row.percentile]:.0%})",
        )
    return table


if __name__ == "__main__":
    typer.run(validity)
