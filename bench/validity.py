"""Does the simulator tell the truth? `cbdisagg bench validity`: one workload, simulated and on a service here.

Starts the config's service, puts three loads on it in turn, several times over, and sets TTFT and TPOT beside what the
simulator says of the same arrivals and lengths. The spread of equal runs is shown, for no prediction can be better than
that. Loads are parts of the rate at which the simulated service is saturated. Beside that (validity_each.py), how far
off the first token of each request was.
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
from cbdisagg_bench import validity_each
from cbdisagg_bench.company import QUIET, Company
from cbdisagg_bench.load_asks import VOCAB, fill
from cbdisagg_bench.load_client import run as send
from cbdisagg_bench.load_report import Report, summarise, ttft
from cbdisagg_bench.options import ROUNDS, SEEDS, at_least, command, lengths
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.service import ServiceFailed, running
from cbdisagg_bench.simulate_input import read_profile
from cbdisagg_bench.validity_each import Each, Firsts, compare_each, read_foreseen
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cbdisagg.cli import fail
from cbdisagg.config import Config, Policy
from cbdisagg.core.profile import Profile
from cbdisagg.load import load_config
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.report import report
from cbdisagg.sim.simulation import Outcome, simulate
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
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
    requests: Annotated[int, typer.Option(callback=at_least(10), help="Of each run.")] = 100,
    runs: Annotated[int, typer.Option(callback=at_least(1, ROUNDS), help="How often each load is put on.")] = 3,
    prompts: Annotated[str, typer.Option(help="Lengths: 128, or exponential:128:512.")] = "exponential:128:512",
    outputs: Annotated[str, typer.Option(help="As prompts.")] = "exponential:32:128",
    seed: Annotated[int, typer.Option(callback=at_least(0, SEEDS), help="Of arrivals, lengths and ids.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare simulated and measured latencies on three loads.

    Example: cbdisagg bench validity configs/1p1d.toml --profile profile.json
    """
    settings = load_config(config, set_ or [])
    costs = read_profile(settings, profile)
    both = lengths("--prompts", prompts), lengths("--outputs", outputs)
    loads = _loads(settings, costs, requests, both, seed)
    own = [*(set_ or []), f"profile.path={profile.resolve()}"]
    company = Company()
    try:
        measured = asyncio.run(_measure(config, own, list(loads.values()), runs, seed))
    except ServiceFailed as error:
        fail(str(error))
    company.end()
    rows: list[Row] = []
    each: list[Each] = []
    for (rate, asks), turns in zip(loads.items(), measured, strict=True):
        outcome = simulate(settings, costs, asks)
        rows += compare(rate, [run.figures for run in turns], predicted(outcome))
        firsts = [1e3 * record.ttft_s for record in outcome.records]
        each += compare_each(rate, [run.firsts for run in turns], firsts)
    if as_json:
        print(json.dumps(_told(rows, each, company, seed), indent=1))
    else:
        Console().print(_table(rows, runs))
        Console().print(validity_each.table(each))
        worth = "" if company.others < QUIET else ": what was measured is not the machine's own"
        print(f"Others had {company.others:.0%} of the cores{worth}.")
    if not all(one.holds for one in (*rows, *each)):
        raise typer.Exit(1)


def _told(rows: Sequence[Row], each: Sequence[Each], company: Company, seed: int) -> dict[str, object]:
    return {
        "command": command(),
        "seed": seed,
        "others": round(company.others, 3),
        "rows": [asdict(row) | {"off": row.off, "holds": row.holds} for row in rows],
        "each": [asdict(one) | {"holds": one.holds} for one in each],
    }


def _loads(
    settings: Config, costs: Profile, count: int, both: tuple[Lengths, Lengths], seed: int
) -> dict[float, list[Ask]]:
    """The requests of each load, by their rate per second. `both`: lengths of prompts and answers."""
    open_queue = replace(settings, policy=replace(settings.policy, queue_limit=max(count, Policy().queue_limit)))
    saturated = report(simulate(open_queue, costs, make_workload(count, 0.0, *both, seed))).requests_per_s
    rates = [round(part * saturated, 3) for part in PARTS]
    return {rate: make_workload(count, rate, *both, seed) for rate in rates}


Figures = dict[tuple[str, str], float]
"""(metric, percentile) -> milliseconds. Of answers of one token there is no TPOT."""


@dataclass(frozen=True, slots=True)
class Run:
    """One load on the service, once."""

    figures: Figures
    firsts: Firsts


def predicted(outcome: Outcome) -> Figures:
    told = report(outcome)
    metrics = {"TTFT": told.ttft_s, "TPOT": told.tpot_s}
    if all(record.ask.output_tokens == 1 for record in outcome.records):
        del metrics["TPOT"]
    return {(name, percent): 1e3 * getattr(latency, percent) for name, latency in metrics.items() for percent in BOUNDS}


async def _measure(
    config: Path, own: Sequence[str], loads: Sequence[Sequence[Ask]], runs: int, seed: int
) -> list[list[Run]]:
    """For each load its runs. Loads take turns, so that a slow spell meets all; ids are always new.

    `own`: settings of the simulated service, whose profile it is to decide by too.
    """
    measured: list[list[Run]] = [[] for _ in loads]
    seeds = itertools.count(seed)
    with tempfile.TemporaryDirectory() as folder, progress_bar() as progress:
        settings = (f"model.served_name={NAME}", "debug.trace=true", *own)
        log = Path(folder) / "stderr"
        options = ("--config", str(config), *(word for setting in settings for word in ("--set", setting)))
        async with running(NAME, options, log) as service:
            await _send(service.url, log, loads[0][:5], next(seeds), progress)  # the first requests warm up
            for _ in range(runs):
                for n, asks in enumerate(loads):
                    measured[n].append(await _send(service.url, log, asks, next(seeds), progress))
    return measured


async def _send(url: str, log: Path, asks: Sequence[Ask], seed: int, progress: Progress) -> Run:
    sent = fill(asks, VOCAB, seed)
    answers, seconds = await send(url, NAME, sent, len(sent), progress)
    problems = [answer.error for answer in answers if answer.error]
    if problems:
        raise ServiceFailed(f"{len(problems)} of {len(sent)} requests failed: {problems[0]}")
    firsts = Firsts([1e3 * ttft(answer) for answer in answers], read_foreseen(log, len(asks)))
    return Run(figures(summarise(answers, seconds)), firsts)


def figures(told: Report) -> Figures:
    places = {"p50": 0, "p99": 2}
    return {
        (name, percent): values[places[percent]]
        for name, values in (("TTFT", told.ttft_ms), ("TPOT", told.tpot_ms))
        if values
        for percent in BOUNDS
    }


def compare(rate: float, runs: Sequence[Figures], simulated: Figures) -> list[Row]:
    rows = []
    for (metric, percentile), ms in simulated.items():
        values = [run[metric, percentile] for run in runs]
        middle = statistics.median(values)
        rows.append(Row(rate, metric, percentile, middle, max(values) - min(values), ms))
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
