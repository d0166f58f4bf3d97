"""The order of the experiment: calibrate, run by the virtual clock, by the wall clock, arrivals, tails, checks.

Knows a plan and gives a report; what is asked and what is shown is the command's affair. By the wall clock the model is
loaded and measured first, so that it can be said beforehand how long all will take.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import msgspec
from cbdisagg_bench.batching_checks import checks
from cbdisagg_bench.batching_factors import factors
from cbdisagg_bench.batching_latency import Latencies
from cbdisagg_bench.batching_outcome import Report, origin
from cbdisagg_bench.batching_parts import (
    Plan,
    virtual_latencies,
    virtual_tails,
    wall_bursts,
    wall_latencies,
    wall_seconds,
)
from cbdisagg_bench.batching_run import Results, run_virtual, run_wall, workloads
from cbdisagg_bench.batching_systems import ALONE
from cbdisagg_bench.company import QUIET, Company
from cbdisagg_bench.progress import progress_bar
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cbdisagg.core.profile import Profile

if TYPE_CHECKING:
    from cbdisagg_bench.batching_wall import Lab

LOAD = 0.7
"""Of the capacity of two replicas, for the tails."""


def measure(plan: Plan, console: Console) -> Report:
    """All that the plan asks for. Raises ServiceFailed or ConfigError: one line for whoever asked."""
    lab, profile, company = None, plan.scale.profile, None
    latencies: list[Latencies] = []
    with _bar(console) as bar, ExitStack() as stack:
        if plan.clock == "wall":
            lab = stack.enter_context(_laboratory(plan, bar))
            profile = _calibrated(plan, lab, bar)
        vocab = plan.scale.vocab if lab is None else lab.info.vocab
        caps = plan.scale.caps if "throughput" in plan.parts else ()
        results = Results(plan.scale, plan.clock, profile, workloads(plan.scale, caps, plan.requests, vocab, plan.seed))
        _run_virtual(plan, results, bar)
        split = factors(results)
        tails = virtual_tails(plan, profile, LOAD, bar) if "tails" in plan.parts else []
        if lab is not None:
            console.print(f"This will take about {_minutes(wall_seconds(plan, results, profile))}.")
            company = Company()
            _run_wall(results, lab, bar)
            lab.close()
            wall_bursts(plan, results, lab.folder, bar)
            if "latency" in plan.parts:
                latencies = wall_latencies(plan, profile, lab.folder, vocab, bar)
            company.end()
        elif "latency" in plan.parts:
            latencies = virtual_latencies(plan, profile, bar)
    if company is not None and company.others > QUIET:
        text = f"Other processes had {company.others:.0%} of the cores: all times are longer than the machine's own."
        console.print(f"[yellow]{text}[/]", highlight=False)
    made = origin(sys.argv[2:], plan.seed, profile)
    made |= {"requests": plan.requests, "arrivals": plan.scale.arrivals, "cost_model": _rounded(profile.cost)}
    if company is not None:
        made["others_share_of_cores"] = round(company.others, 2)
    return Report(results, checks(results, exact_tokens=plan.device == "cpu"), split, latencies, tails, LOAD, made)


@contextmanager
def _bar(console: Console) -> Iterator[Progress]:
    columns = (TextColumn("{task.description:>34}"), BarColumn(), TimeElapsedColumn())
    with progress_bar(*columns, console=console) as progress:
        yield progress


@contextmanager
def _laboratory(plan: Plan, bar: Progress) -> Iterator[Lab]:
    """The model, for as long as it is wanted."""
    from cbdisagg_bench.batching_models import model_folder  # torch: only where a model is wanted
    from cbdisagg_bench.batching_wall import Lab

    task = bar.add_task("making or loading the model", total=None)
    with model_folder(plan.model, plan.dtype) as folder:
        lab = Lab(folder, plan.dtype, plan.threads, plan.scale, plan.device)
        bar.remove_task(task)
        yield lab


def _calibrated(plan: Plan, lab: Lab, bar: Progress) -> Profile:
    """The scale's profile with costs measured here and now."""
    task = bar.add_task("calibrating the cost model")
    cost = lab.calibrate(lambda done, of: bar.update(task, completed=done, total=of))
    bar.remove_task(task)
    return msgspec.structs.replace(
        plan.scale.profile,
        **{name: getattr(cost, name) for name in cost.__struct_fields__},
        layers=lab.info.layers,
        kv_bytes=lab.info.layers * lab.info.page_bytes(1),
        context=lab.info.context,
        model=plan.model.rstrip("/").rpartition("/")[2],
        dtype=plan.dtype,
        machine=lab.machine,
        threads=plan.threads,
        note="measured here",
    )


def _run_virtual(plan: Plan, results: Results, bar: Progress) -> None:
    task = bar.add_task("virtual clock", total=len(plan.systems) * len(results.caps))
    run_virtual(results, plan.systems, lambda text: bar.update(task, advance=1, description=f"virtual clock, {text}"))
    bar.remove_task(task)


def _run_wall(results: Results, lab: Lab, bar: Progress) -> None:
    total = sum(run.virtual.seconds for run in results.runs.values() if run.system in ALONE)
    task = bar.add_task("wall clock", total=total)
    run_wall(results, lab, lambda text, done: bar.update(task, completed=done, description=f"wall clock, {text}"))
    bar.remove_task(task)


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} minutes"


def _rounded(cost: object) -> dict[str, object]:
    """The coefficients, short enough to read."""

    def short(value: object) -> object:
        if isinstance(value, float):
            return float(f"{value:.4g}")
        return [[n, short(seconds)] for n, seconds in value] if isinstance(value, tuple) else value

    return {name: short(getattr(cost, name)) for name in cost.__struct_fields__}  # type: ignore[attr-defined]
