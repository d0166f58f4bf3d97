"""The article's experiment, again and explained: `cbdisagg bench batching`.

Static against continuous against paged against disaggregated batching, with the same model code, kernels and KV pool.
This module knows the command line and the order of the parts: throughput of a burst, latency under Poisson arrivals,
tails; then what must hold, the pictures and the report. The parts themselves are in batching_*.py and pictures/.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer
from cbdisagg_bench.batching_checks import checks
from cbdisagg_bench.batching_company import QUIET, Company
from cbdisagg_bench.batching_factors import factors
from cbdisagg_bench.batching_golden import COLUMNS, FOUR, SEVEN, SLOTS, golden
from cbdisagg_bench.batching_latency import ARTICLE_QPS, FRACTIONS, Latencies
from cbdisagg_bench.batching_lengths import SEED
from cbdisagg_bench.batching_outcome import Report, origin, processor
from cbdisagg_bench.batching_parts import Plan, virtual_latencies, virtual_tails, wall_latencies, wall_seconds
from cbdisagg_bench.batching_run import Results, run_virtual, run_wall, workloads
from cbdisagg_bench.batching_scales import SCALES, Scale
from cbdisagg_bench.batching_systems import ALONE, SYSTEMS
from cbdisagg_bench.batching_theory import CAVEATS
from cbdisagg_bench.options import at_least, chosen, numbers
from cbdisagg_bench.pictures.grids import token_grid
from cbdisagg_bench.pictures.terminal import bars, legend, side_by_side, slots_text, table
from cbdisagg_bench.service import ServiceFailed
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cbdisagg.cli import fail
from cbdisagg.config import Model
from cbdisagg.core.profile import Profile
from cbdisagg.prepare import prepare_model

if TYPE_CHECKING:
    from cbdisagg_bench.batching_wall import Lab

CLOCKS = ("virtual", "wall")
PARTS = ("throughput", "latency", "tails")
LOAD = 0.7
"""Of the capacity of two replicas, for the tails."""
QUICK_ARRIVALS = 20


def batching(
    clock: Annotated[
        str, typer.Option(help="virtual: priced steps; wall: the real model on this machine.")
    ] = "virtual",
    scale: Annotated[
        str, typer.Option(help="a100, gpu (an H200) or cpu (an eighth). Default: a100; with --clock wall: cpu.")
    ] = "",
    parts: Annotated[
        str, typer.Option(help="Comma-separated: throughput (always made), latency, tails (always virtual).")
    ] = ",".join(PARTS),
    systems: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SYSTEMS)}.")] = ",".join(SYSTEMS),
    caps: Annotated[str, typer.Option(help="Comma-separated largest output lengths. Default: the scale's.")] = "",
    requests: Annotated[
        int, typer.Option(callback=at_least(0), help="Requests of the burst; 0: the scale's (1000, 128, 200).")
    ] = 0,
    arrivals: Annotated[
        int, typer.Option(callback=at_least(0), help="Requests that arrive one by one; 0: the article's 100.")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="40 requests in the burst, 20 that arrive one by one.")
    ] = False,
    qps: Annotated[str, typer.Option(help="Arrivals per second, comma-separated.")] = ",".join(
        f"{rate:g}" for rate in ARTICLE_QPS
    ),
    fractions: Annotated[
        str, typer.Option(help="Parts of each system's own capacity, comma-separated; empty: none.")
    ] = ",".join(map(str, FRACTIONS)),
    pool: Annotated[int, typer.Option(callback=at_least(0), help="KV tokens of the pool; 0: the scale's.")] = 0,
    model: Annotated[str, typer.Option(help="wall: model folder, or smollm2.")] = "smollm2",
    dtype: Annotated[str, typer.Option(help="wall: bfloat16 or float32.")] = "bfloat16",
    threads: Annotated[int, typer.Option(callback=at_least(0), help="wall: of the model; 0: one per core.")] = 0,
    seed: Annotated[
        int, typer.Option(callback=at_least(0), help="Of prompts and lengths; the article's: 51934.")
    ] = SEED,
    port: Annotated[int, typer.Option(callback=at_least(0), help="wall: of the services; 0: any that is free.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Folder for report.html, results.json, trace.json, pictures/.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Reproduce the continuous batching article: static, continuous, paged, disaggregated.

    Exit status 1 if something that must hold does not.

    Example: cbdisagg bench batching --clock wall --quick --out report
    """
    chosen("--clock", [clock], CLOCKS)
    names = chosen("--systems", _words(systems), SYSTEMS)
    chosen("--dtype", [dtype], ("bfloat16", "float32"))
    (scale_name,) = chosen("--scale", [scale or ("cpu" if clock == "wall" else "a100")], SCALES)
    if clock == "wall" and scale_name != "cpu":
        raise typer.BadParameter(f"{scale_name!r} needs a GPU, which workers cannot use; cpu", param_hint="'--scale'")
    if out is not None and find_spec("matplotlib") is None:
        fail("--out draws pictures with matplotlib, which is not there: pip install 'cbdisagg[bench]'")
    size = _sized(SCALES[scale_name], caps, pool, names)
    plan = Plan(
        clock=clock,
        scale=replace(size, arrivals=arrivals or (QUICK_ARRIVALS if quick else size.arrivals)),
        parts=chosen("--parts", _words(parts), PARTS),
        systems=names,
        requests=requests or (size.quick if quick else size.requests),
        rates=(_positive("--qps", qps), _positive("--fractions", fractions)),
        dtype=dtype,
        seed=seed,
        port=port,
    )
    console = Console(stderr=True)
    try:
        found = _measure(plan, model, threads or len(os.sched_getaffinity(0)), console)
    except ServiceFailed as failure:
        fail(str(failure))
    if as_json:
        print(json.dumps(found.as_json(), indent=1))
    else:
        _show(found)
    if out is not None:
        from cbdisagg_bench.batching_report import write_report  # matplotlib: only where pictures are wanted

        console.print(f"Report: {write_report(found, out)}", soft_wrap=True)
    if not all(check.holds for check in found.checks):
        raise typer.Exit(1)


# ---------------------------------------------------------------------------------------------------- what is asked


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _positive(option: str, text: str) -> list[float]:
    """Comma-separated numbers above 0; none for an empty text."""
    found = []
    for word in _words(text):
        try:
            value = float(word)
        except ValueError:
            value = 0.0
        if not 0 < value < 1e6:
            raise typer.BadParameter(f"{word!r} in {text!r} is not a number above 0", param_hint=f"'{option}'")
        found.append(value)
    return found


def _sized(scale: Scale, caps: str, pool: int, systems: Sequence[str]) -> Scale:
    """The scale with other caps and another pool. Refuses a pool that cannot hold one sequence for every worker."""
    made = replace(
        scale, caps=tuple(sorted(set(numbers("--caps", caps)))) if caps else scale.caps, pool=pool or scale.pool
    )
    longest = made.prompt + made.caps[-1]
    for name in systems:
        workers = SYSTEMS[name].workers
        pages = made.pages // workers
        if pages * made.page_size < longest:
            each = f", {pages * made.page_size} for each of its {workers} workers" if workers > 1 else ""
            raise typer.BadParameter(
                f"{made.pool} tokens{each}: {name} needs at least {longest} for a prompt of {made.prompt} and a cap of "
                f"{made.caps[-1]}",
                param_hint="'--pool'",
            )
    return made


# ----------------------------------------------------------------------------------------------------- what is run


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:>34}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield progress


def _measure(plan: Plan, model: str, threads: int, console: Console) -> Report:
    profile, lab, vocab = plan.scale.profile, None, plan.scale.vocab
    company: Company | None = None
    with _bar(console) as bar:
        if plan.clock == "wall":
            lab, profile = _laboratory(plan, model, threads, bar)
            vocab = lab.vocab
        requests = workloads(plan.scale, plan.scale.caps, plan.requests, vocab, plan.seed)
        results = Results(plan.scale, plan.clock, profile, requests)
        shown = [name for name in plan.systems if name in ALONE or plan.clock == "virtual"]
        task = bar.add_task("virtual clock", total=len(shown) * len(plan.scale.caps))
        run_virtual(results, shown, lambda text: bar.update(task, advance=1, description=f"virtual clock, {text}"))
        split = factors(results, lambda text: bar.update(task, description=text))
        bar.remove_task(task)
        latencies: list[Latencies] = []
        tails = virtual_tails(plan, profile, LOAD, bar) if "tails" in plan.parts else []
        if lab is not None:
            seconds = wall_seconds(plan, results, profile)
            console.print(f"This will take about {_minutes(seconds)}.")
            company = Company()
            _run_wall(results, lab, bar)
            if "latency" in plan.parts:
                latencies = wall_latencies(plan, profile, lab.folder, vocab, bar)
        elif "latency" in plan.parts:
            latencies = virtual_latencies(plan, profile, bar)
        if company is not None and (others := company.others()) > QUIET:
            busy = (
                f"Other processes had {others:.0%} of the cores meanwhile: all times are longer than the machine's own."
            )
            console.print(f"[yellow]{busy}[/]", highlight=False)
    dtype = plan.dtype if lab is not None else profile.dtype
    made = origin(sys.argv[2:], plan.seed, dtype, f"{profile.model}, {profile.machine}: {profile.note or 'measured'}")
    made |= {"requests": plan.requests, "arrivals": plan.scale.arrivals, "cost_model": _rounded(profile.cost)}
    if company is not None:
        made["others_share_of_cores"] = round(company.others(), 2)
    exact = lab is not None and plan.dtype == "float32"
    return Report(results, checks(results, exact_tokens=exact), split, latencies, tails, LOAD, made)


def _laboratory(plan: Plan, model: str, threads: int, bar: Progress) -> tuple[Lab, Profile]:
    """The model, and the scale's profile with costs measured here and now."""
    from cbdisagg_bench.batching_wall import Lab  # torch: only where a model is wanted

    task = bar.add_task("loading the model", total=None)
    lab = Lab(prepare_model(_model(model), lambda stage, fraction: None), plan.dtype, threads, plan.scale)
    bar.update(task, description="calibrating the cost model")
    cost = lab.calibrate(lambda done, of: bar.update(task, completed=done, total=of))
    bar.remove_task(task)
    profile = plan.scale.profile
    measured = {name: getattr(cost, name) for name in cost.__struct_fields__}
    return lab, msgspec.structs.replace(
        profile, **measured, dtype=plan.dtype, machine=processor(), threads=threads, note="measured here"
    )


def _run_wall(results: Results, lab: Lab, bar: Progress) -> None:
    total = sum(run.virtual.seconds for run in results.runs.values())
    task = bar.add_task("wall clock", total=total)
    run_wall(results, lab, lambda text, done: bar.update(task, completed=done, description=f"wall clock, {text}"))
    bar.remove_task(task)


def _model(text: str) -> Model:
    path = Path(text).expanduser()
    return Model(path=str(path)) if path.exists() else Model(name=text)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _rounded(cost: object) -> dict[str, object]:
    """The coefficients, short enough to read."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        return [[n, short(seconds)] for n, seconds in value] if isinstance(value, tuple) else value

    return {name: short(getattr(cost, name)) for name in cost.__struct_fields__}  # type: ignore[attr-defined]


# --------------------------------------------------------------------------------------------------- what is shown


def _show(report: Report) -> None:
    console = Console()
    static, continuous = golden(FOUR, "static").trace.steps, golden(SEVEN, "continuous").trace.steps
    console.print(
        side_by_side(
            [
                slots_text("static", token_grid(static, SLOTS, COLUMNS)),
                slots_text("continuous", token_grid(continuous, SLOTS, COLUMNS)),
            ]
        )
    )
    console.print(legend())
    for rows in report.tables:
        console.print(table(rows))
    console.print(bars(report.results, report.results.caps[-1]))
    for check in report.checks:
        mark = "[green]holds[/]" if check.holds else "[bold red]FAILS[/]"
        console.print(f"{mark} {check.text}", highlight=False)
    for text in CAVEATS:
        console.print(f"[dim]- {text}[/]", highlight=False)
