"""The article's experiment, again and explained: `cbdisagg bench batching`.

Static against continuous against paged against disaggregated batching, with the same model code, kernels and KV pool.
This module knows the command line: what is asked, what is refused before anything runs, what is printed. The order of
the work is in batching_measure.py, its parts in the other batching_*.py and in pictures/.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from cbdisagg_bench.batching_golden import COLUMNS, FOUR, SEVEN, SLOTS, golden
from cbdisagg_bench.batching_latency import ARTICLE_QPS, FRACTIONS, TAILED
from cbdisagg_bench.batching_lengths import SEED
from cbdisagg_bench.batching_measure import measure
from cbdisagg_bench.batching_outcome import Report
from cbdisagg_bench.batching_parts import PARTS, Plan
from cbdisagg_bench.batching_scales import SCALES, Scale
from cbdisagg_bench.batching_systems import SYSTEMS
from cbdisagg_bench.batching_theory import CAVEATS
from cbdisagg_bench.options import PORTS, SEEDS, THREADS, TOKENS, amounts, at_least, chosen, make_folder, numbers
from cbdisagg_bench.pictures.grids import token_grid
from cbdisagg_bench.pictures.terminal import bars, legend, side_by_side, slots_text, table
from cbdisagg_bench.service import ServiceFailed
from rich.console import Console

from cbdisagg.cli import fail
from cbdisagg.config import ConfigError

CLOCKS = ("virtual", "wall")
QUICK_ARRIVALS, QUICK_QPS, QUICK_FRACTIONS = 20, (4.0,), (0.8,)


def batching(
    clock: Annotated[
        str, typer.Option(help="virtual: priced steps; wall: the real model on this machine.")
    ] = "virtual",
    scale: Annotated[
        str, typer.Option(help="a100, gpu (an H200) or cpu (an eighth). Default: a100; with --clock wall: cpu.")
    ] = "",
    parts: Annotated[
        str, typer.Option(help="Comma-separated: throughput, latency, tails (always by the virtual clock).")
    ] = ",".join(PARTS),
    systems: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SYSTEMS)}.")] = ",".join(SYSTEMS),
    caps: Annotated[str, typer.Option(help="Comma-separated largest output lengths. Default: the scale's.")] = "",
    requests: Annotated[
        int, typer.Option(callback=at_least(0), help="Requests of the burst; 0: the scale's (1000, 128, 200).")
    ] = 0,
    arrivals: Annotated[
        int, typer.Option(callback=at_least(0), help="Requests that arrive one by one; 0: the scale's (100, 100, 40).")
    ] = 0,
    quick: Annotated[
        bool, typer.Option("--quick", help="40 requests in the burst; 20 one by one, at 4 QPS and 0.8 of capacity.")
    ] = False,
    qps: Annotated[
        str | None, typer.Option(help="Arrivals per second, comma-separated; empty: none. Default: 1,4.")
    ] = None,
    fractions: Annotated[
        str | None,
        typer.Option(help="Parts of each system's own capacity; empty: none. Default: 0.5,0.8,0.95."),
    ] = None,
    pool: Annotated[int, typer.Option(callback=at_least(0, TOKENS), help="KV tokens of the pool; 0: the scale's.")] = 0,
    model: Annotated[
        str,
        typer.Option(
            help="wall: a folder, smollm2, or with random weights opt-13b, opt-tiny. Default: smollm2; gpu: opt-13b."
        ),
    ] = "",
    device: Annotated[str, typer.Option(help="wall: cpu or cuda:N. Default: cpu; with --scale gpu: cuda:0.")] = "",
    dtype: Annotated[str, typer.Option(help="wall: bfloat16, float32; float16 on a GPU.")] = "bfloat16",
    threads: Annotated[
        int, typer.Option(callback=at_least(0, THREADS), help="wall: of the model; 0: one per core.")
    ] = 0,
    seed: Annotated[
        int, typer.Option(callback=at_least(0, SEEDS), help="Of prompts and lengths; the article's: 51934.")
    ] = SEED,
    port: Annotated[
        int, typer.Option(callback=at_least(*PORTS), help="wall: of the services; 0: any that is free.")
    ] = 0,
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
    names = _some("--systems", systems, SYSTEMS)
    (scale_name,) = chosen("--scale", [scale or ("cpu" if clock == "wall" else "a100")], SCALES)
    made = _some("--parts", parts, PARTS)
    if out is not None and find_spec("matplotlib") is None:
        fail("--out draws pictures with matplotlib, which is not there: pip install 'cbdisagg[bench]'")
    where = _device(device, clock, scale_name)
    chosen("--dtype", [dtype], ("bfloat16", "float32") if where == "cpu" else ("bfloat16", "float32", "float16"))
    size = _sized(SCALES[scale_name], caps, pool, [*names, *(TAILED if "tails" in made else ())])
    make_folder(out, "--out")
    plan = Plan(
        clock=clock,
        scale=replace(size, arrivals=arrivals or (QUICK_ARRIVALS if quick else size.arrivals)),
        parts=made,
        systems=names,
        requests=requests or (size.quick if quick else size.requests),
        rates=(
            _positive("--qps", qps, QUICK_QPS if quick else ARTICLE_QPS),
            _positive("--fractions", fractions, QUICK_FRACTIONS if quick else FRACTIONS),
        ),
        seed=seed,
        model=model or ("opt-13b" if scale_name == "gpu" else "smollm2"),
        dtype=dtype,
        device=where,
        threads=threads or len(os.sched_getaffinity(0)),
        port=port,
    )
    console = Console(stderr=True)
    try:
        found = measure(plan, console)
    except (ServiceFailed, ConfigError) as failure:
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


def _some(option: str, text: str, choices: Collection[str]) -> list[str]:
    """At least one of the choices, each once."""
    words = chosen(option, list(dict.fromkeys(_words(text))), choices)
    if not words:
        raise typer.BadParameter(f"{text!r} names none of {', '.join(choices)}", param_hint=f"'{option}'")
    return words


def _device(device: str, clock: str, scale: str) -> str:
    """Where the wall clock's model runs. Refuses a GPU that is not there."""
    if clock == "wall" and scale == "a100":
        raise typer.BadParameter("'a100' has a virtual clock only; --clock wall has: cpu, gpu", param_hint="'--scale'")
    device = device or ("cuda:0" if clock == "wall" and scale == "gpu" else "cpu")
    if device == "cpu" or clock == "virtual":
        return device
    if not (device.startswith("cuda:") and device[5:].isdecimal()):
        raise typer.BadParameter(f"{device!r} is not cpu or cuda:N", param_hint="'--device'")
    from cbdisagg.engine.device import open_device  # torch: only where a model is wanted

    try:
        open_device(device)
    except ConfigError as error:
        hint = "(--device cpu --model opt-tiny tries the way without a GPU)"
        raise typer.BadParameter(f"{device!r}: {error} {hint}", param_hint="'--device'") from None
    return device


def _positive(option: str, text: str | None, default: Sequence[float]) -> list[float]:
    """Comma-separated numbers above 0; none for an empty text."""
    if text is None:
        return list(default)
    return amounts(option, text) if text.strip() else []


def _sized(scale: Scale, caps: str, pool: int, systems: Sequence[str]) -> Scale:
    """The scale with other caps and another pool. Refuses a pool that cannot hold one sequence for every worker."""
    made = replace(
        scale, caps=tuple(sorted(set(numbers("--caps", caps)))) if caps else scale.caps, pool=pool or scale.pool
    )
    made = replace(made, max_batch=max(made.max_batch, made.pool // made.prompt))  # only memory bounds a batch
    longest = made.prompt + made.caps[-1]
    if longest > made.profile.context:
        raise typer.BadParameter(
            f"a prompt of {made.prompt} and a cap of {made.caps[-1]}: the scale's model sees {made.profile.context} "
            "tokens",
            param_hint="'--caps'",
        )
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
    if report.results.runs:
        console.print(bars(report.results, report.results.caps[-1]))
    for check in report.checks:
        mark = "[green]holds[/]" if check.holds else "[bold red]FAILS[/]"
        console.print(f"{mark} {check.text}", highlight=False)
    for text in CAVEATS:
        console.print(f"[dim]- {text}[/]", highlight=False)
