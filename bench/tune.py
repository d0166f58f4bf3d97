"""Which settings serve a workload best: `cbdisagg tune WORKLOAD`.

Tries the baselines and the policy's knobs in the simulator, says what each turn gained, and writes a config with the
reason for each value. The workload is asked at ever other rates; what is looked for is the highest one at which enough
requests meet both targets.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, TypeAlias

import typer
from cbdisagg_bench.options import BURSTS, MANY_WORKERS, SEEDS, TPOTS_MS, TTFTS_MS, at_least, check_place, command
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.simulate_input import MADE, read_asks, read_profile
from cbdisagg_bench.tune_config import Origin, as_toml
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from cbdisagg.config import ConfigError
from cbdisagg.core.profile import Profile
from cbdisagg.load import load_config
from cbdisagg.sim.demand import demand
from cbdisagg.sim.goodput import Goal, Lab, lasting_s
from cbdisagg.sim.simulation import Stuck
from cbdisagg.sim.tune import KNOBS, POLICY, Search, Trial, Tuned
from cbdisagg.sim.variants import changed, equal_workers
from cbdisagg.sim.workload import Ask

ENOUGH = 1_000_000
"""Requests may wait for as long as it takes: how many may is no matter of tuning."""


def tune(
    workload: Annotated[Path, typer.Argument(help=f'Workload, trace or coordinator\'s journal; "{MADE}" makes one.')],
    ttft_ms: Annotated[float, typer.Option(callback=at_least(*TTFTS_MS), help="Target for the first token.")],
    tpot_ms: Annotated[float, typer.Option(callback=at_least(*TPOTS_MS), help="Target for each later one.")],
    part: Annotated[float, typer.Option(help="Of the requests that is to meet both.")] = 0.9,
    workers: Annotated[
        int, typer.Option(callback=at_least(0, MANY_WORKERS), help="How many; 0: as many as the config has.")
    ] = 0,
    profile: Annotated[Path | None, typer.Option(help="What steps cost; else the config's [profile] path.")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML file to start from: model, pages, what is not tuned.")
    ] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
    requests: Annotated[
        int, typer.Option(callback=at_least(0), help="How many; of a file, the first. 0: all of it, or 4000 made ones.")
    ] = 0,
    prompts: Annotated[str, typer.Option(help="Lengths when made: 512, or lognormal:512:4096.")] = "lognormal:512:4096",
    outputs: Annotated[str, typer.Option(help="As prompts.")] = "lognormal:128:1024",
    burst: Annotated[
        float,
        typer.Option(callback=at_least(*BURSTS), help="Made: variance of the gaps over Poisson's; above 1 in clumps."),
    ] = 1.0,
    refuse: Annotated[
        bool, typer.Option(help="May the service refuse (429) what would be late? A miss, but cheap.")
    ] = True,
    turns: Annotated[
        int, typer.Option(callback=at_least(0), help="Simulations for the knobs, beside the baselines.")
    ] = 100,
    seed: Annotated[int, typer.Option(callback=at_least(0, SEEDS), help="Of everything that is drawn.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write a config there that serve loads.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Find the settings under which a service keeps up with the most requests.

    Example: cbdisagg tune trace.csv --ttft-ms 500 --tpot-ms 20 --workers 8 --profile profile.json --out tuned.toml
    """
    if not 0 < part < 1:
        raise typer.BadParameter(f"{part} is not a number between 0 and 1", param_hint="'--part'")
    check_place(out, "--out")
    settings = load_config(config, set_ or [])
    costs = read_profile(settings, profile)
    goal = Goal(ttft_ms / 1e3, tpot_ms / 1e3, part)
    count, rate = (requests or 4000, 1.0) if str(workload) == MADE else (requests, 0.0)
    asks = read_asks(workload, count, rate, burst, prompts, outputs, seed)
    equal = equal_workers(settings, workers or sum(group.count for group in settings.workers))
    base = changed(equal, {"policy.queue_limit": ENOUGH})
    knobs = [knob for knob in KNOBS if refuse or knob.key != "policy.admission"]
    started = time.perf_counter()
    try:
        with _progress() as (ran, begin, tried):
            lab = Lab(costs, demand(asks, lasting_s(goal, asks)), ran)
            search = Search(base, lab, goal, knobs, tried)
            search.run(0)  # the baselines, which are not simulated again
            begin(turns)
            found = search.run(turns)
    except Stuck as error:
        raise ConfigError(str(error)) from None
    if not found.sustained:
        raise ConfigError(f"no setting serves {part:.0%} of the requests within {ttft_ms:g} ms and {tpot_ms:g} ms")
    tuned = changed(base, {**found.best, "policy.queue_limit": settings.policy.queue_limit})
    tuned = changed(tuned, {"targets.ttft_ms": ttft_ms, "targets.tpot_ms": tpot_ms})
    if as_json:
        print(json.dumps(_told(found, lab.runs, seed), indent=1))
    else:
        print("\n".join(_lines(found, lab.runs, time.perf_counter() - started)))
    if out is not None:
        source = profile or Path(settings.profile.path)
        tuned = changed(tuned, {"profile.path": os.path.relpath(source.resolve(), out.resolve().parent)})
        out.write_text(as_toml(tuned, found, _origin(costs, source, goal, asks)), encoding="utf-8")
        print(f"Written to {out}. To use it: cbdisagg serve --config {out}", file=sys.stderr if as_json else sys.stdout)


Bar: TypeAlias = tuple[Callable[[], None], Callable[[int], None], Callable[[Trial], None]]


@contextmanager
def _progress() -> Iterator[Bar]:
    """A bar on stderr; the context gives what to call before a simulation, what to call when the knobs' turn has come,
    with how many there will be at most, and what hears of each trial.
    """
    columns = (TextColumn("{task.fields[what]:>32}"), BarColumn(), TextColumn("{task.completed} simulations"))
    with progress_bar(*columns, TimeElapsedColumn()) as bar:
        task = bar.add_task("tuning", total=None, what="baselines")
        yield (
            lambda: bar.advance(task),
            lambda most: bar.update(task, total=bar.tasks[task].completed + most),
            lambda trial: bar.update(task, what=shown(trial)),
        )


def shown(trial: Trial) -> str:
    """ "policy.rho 0.8", or "pins 2P:1D"."""
    if trial.what == "pins":
        return f"pins {trial.values['policy.pin_prefill']}P:{trial.values['policy.pin_decode']}D"
    return f"{trial.what} {trial.values[trial.what]}"


def _origin(costs: Profile, path: Path, goal: Goal, asks: Sequence[Ask]) -> Origin:
    prompts, outputs = (
        sum(counts) / len(asks) for counts in ((a.length for a in asks), (a.output_tokens for a in asks))
    )
    return Origin(
        command(),
        (
            f"on workers that cost what {costs.model} does on {costs.machine}, {costs.dtype} ({path});",
            f"{len(asks)} requests of {prompts:.0f} + {outputs:.0f} tokens on average; {goal.part:.0%} of them within "
            "the targets.",
        ),
    )


def _lines(found: Tuned, runs: int, took_s: float) -> Iterator[str]:
    """What was tried, and what it gained."""
    yield "begun with (requests/s that it keeps up with):"
    for name, rate in found.starts.items():
        yield f"  {name:12}{rate:10.3f}" + ("   <- the best" if rate == max(found.starts.values()) else "")
    yield f"turned ({len(found.trials)} trials, each at the least rate that was too much for the best so far):"
    for trial in found.trials:
        now = f"{trial.sustained:10.3f}" if trial.kept else " " * 10
        in_time = f"{trial.within:.1%} in time for {trial.before:.1%}"
        yield f"  {shown(trial):32}{now}   {trial.gain:19}{in_time}"
    over = found.sustained / found.baseline - 1 if found.baseline else 0.0
    yield f"keeps up with {found.sustained:.3f} requests/s: {over:+.1%} over the better baseline"
    yield f"{runs} simulations in {took_s:.0f} s"


def _told(found: Tuned, runs: int, seed: int) -> dict[str, object]:
    return {
        "command": command(),
        "seed": seed,
        "runs": runs,
        "starts": found.starts,
        "policy": found.starts.get(POLICY),
        "sustained": found.sustained,
        "baseline": found.baseline,
        "best": dict(found.best),
        "trials": [
            {"what": shown(trial), "rate": trial.rate, "within": trial.within, "before": trial.before}
            | {"sustained": trial.sustained, "kept": trial.kept}
            for trial in found.trials
        ],
    }


if __name__ == "__main__":
    typer.run(tune)
