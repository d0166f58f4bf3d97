"""What this machine's steps and transfers cost: `cbdisagg profile`.

Measures steps of the engine over batch, context and chunk (as `bench step` does), as far as the config lets them go;
hand-overs of the model's KV pages between two processes; what steps and pushes of another worker take from a worker's
steps; the host's share; and what a service adds, as its clients see it. Fits the cost model, says how far off it is on
steps that were not fitted, and writes the file that `serve` and `simulate` read.
"""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from cbdisagg_bench.company import QUIET, Company
from cbdisagg_bench.machine import processor
from cbdisagg_bench.options import ROUNDS, SEEDS, TOKENS, at_least, check_place, command
from cbdisagg_bench.profile_fit import errors, fit_steps, fit_transfers
from cbdisagg_bench.profile_host import measure_host
from cbdisagg_bench.profile_live import measure_live
from cbdisagg_bench.profile_neighbour import Computes, Neighbour, Pushes
from cbdisagg_bench.profile_steps import Case, Range, Stepper, decode, prefill, sweep, unseen
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.service import ServiceFailed
from cbdisagg_bench.transfer import Geometry, Pair
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from cbdisagg.actors.cores import usable_cores
from cbdisagg.cli import fail
from cbdisagg.config import Config, Workers
from cbdisagg.core.profile import Host, Profile, format_profile
from cbdisagg.core.sizing import size_pool
from cbdisagg.engine.build import ModelInfo, describe
from cbdisagg.load import cache_folder, load_config
from cbdisagg.prepare import prepare_model, served_name

TRANSFER_PAGES = (1, 4, 16, 64)
"""Pages of the hand-overs that are timed, once in a run and once scattered."""
NEIGHBOUR_ROUNDS = 10
LONGEST = 4096
"""Tokens of the longest sequence that is measured, unless another is asked for: more would take many minutes."""
ENOUGH_S = 0.5
"""A step that has been measured for so long is not measured again."""


def profile(
    config: Annotated[Path | None, typer.Option(help="TOML file: the model, its dtype, pages and batches.")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE")] = None,
    out: Annotated[Path, typer.Option(help="The file to write.")] = Path("profile.json"),
    threads: Annotated[
        int, typer.Option(callback=at_least(0), help="Threads of the worker; 0: the cores divided by the workers.")
    ] = 0,
    context: Annotated[
        int, typer.Option(callback=at_least(0, TOKENS), help="Longest sequence; 0: what the config allows, up to 4096.")
    ] = 0,
    rounds: Annotated[int, typer.Option(callback=at_least(1, ROUNDS), help="Times that each step is measured.")] = 3,
    checks: Annotated[int, typer.Option(callback=at_least(4), help="Steps that the fit is held against.")] = 48,
    seed: Annotated[int, typer.Option(callback=at_least(0, SEEDS), help="Of those steps, and of ids and pages.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the profile instead of a table.")] = False,
) -> None:
    """Measure what steps and transfers cost here, and write a profile.

    Example: cbdisagg profile --config configs/1p1d.toml --out profile.json
    """
    check_place(out, "--out")
    settings = load_config(config, set_ or [])
    place = seat(threads, sum(group.count for group in settings.workers))
    with _progress() as bar:
        folder = prepare_model(settings.model, lambda stage, fraction: None)
        found = measure(settings, folder, place, context, rounds, checks, seed, bar)
        found = _with_live(found, settings, place, bar)
    out.write_bytes(format_profile(found))
    if as_json:
        print(format_profile(found).decode(), end="")
        return
    Console().print(table(found))
    print(f"Note: {found.note.rpartition('; ')[2]}.")
    print(f"Written to {out}. To use it: [profile] path, or cbdisagg simulate --profile {out}")


def _progress() -> Progress:
    columns = (TextColumn("{task.description:>28}"), BarColumn(), TimeRemainingColumn())
    return progress_bar(*columns)


@dataclass(frozen=True, slots=True)
class Place:
    """Where the measured worker runs, as serve places it: on cores of its own if there are some for another one too.

    `beside`: the cores of that other one; empty if it has no room.
    """

    threads: int
    own: tuple[int, ...]
    beside: tuple[int, ...]


def seat(threads: int, workers: int) -> Place:
    """`threads` 0: the cores divided by the `workers`. Raises typer.BadParameter if there are not so many cores."""
    cores = usable_cores()
    if threads > len(cores.numbers):
        raise typer.BadParameter(f"{threads}: this machine has {len(cores.numbers)} cores", param_hint="'--threads'")
    threads = threads or max(1, cores.at_once // workers)
    if 2 * threads > cores.at_once:
        return Place(threads, cores.numbers, ())
    if not cores.are_ours:
        return Place(threads, cores.numbers, cores.numbers)
    return Place(threads, cores.numbers[:threads], cores.numbers[threads : 2 * threads])


def measure(
    settings: Config, folder: Path, place: Place, context: int, rounds: int, checks: int, seed: int, bar: Progress
) -> Profile:
    """All of it; a minute or two."""
    company = Company()
    info = describe(folder, settings.model.dtype, settings.model.weights, cache_folder())
    size = settings.kv.page_size
    geometry = Geometry(info.layers, info.page_bytes(size), size)
    kind = transfer_kind(settings)
    t0, t_d, speed = fit_transfers(_time_transfers(kind, geometry, bar))
    furthest = reach(settings, info, context)
    fitted, held = sweep(furthest), unseen(furthest, checks, seed)
    with _pinned(place.own):
        loading = bar.add_task("loading the model", total=None)
        stepper = _stepper(settings, folder, place.threads, [*fitted, *held], seed)
        bar.remove_task(loading)
        together = [*fitted, *held]
        measured = stepper.measure(together, rounds, ENOUGH_S)
        for _ in bar.track(measured, total=rounds * len(together), description="steps"):
            pass
        model = settings.model
        computes = Computes(
            str(folder), model.dtype, model.weights, place.threads, size, str(cache_folder()), place.beside
        )
        beside_step = _slowed(stepper, [decode([512] * 8), prefill(0, 256)], computes, "a worker beside", bar)
        pushes = Pushes(kind, geometry, place.beside, place.own)
        beside_push = _slowed(stepper, [decode([512] * 8)], pushes, "pushes beside", bar)
        event_s, step_s, token_s, request_s = map(_rounded, measure_host(settings))
    company.end()
    steps = fit_steps(fitted)
    coefficients: dict[str, Any] = {name: _rounded(value) for name, value in asdict(steps).items() if name != "L"}
    found = Profile(
        **coefficients,
        L=tuple((tokens, _rounded(seconds)) for tokens, seconds in steps.L),
        t0=_rounded(t0),
        t_d=_rounded(t_d),
        B=_rounded(speed),
        layers=info.layers,
        kv_bytes=info.layers * info.page_bytes(size) // size,
        context=info.context,
        model=served_name(settings.model),
        dtype=settings.model.dtype,
        machine=f"{platform.machine()}, {processor()}, {os.cpu_count()} cpus",
        threads=place.threads,
        transfer=kind,
        beside_step=_rounded(beside_step),
        beside_push=_rounded(beside_push),
        host=Host(event_s, step_s, token_s, request_s),
        versions={"python": platform.python_version(), "torch": str(torch.__version__), "numpy": np.__version__},
        note=f"{command()}, {date.today().isoformat()}; {_company(company)}",
    )
    return replace(found, errors=errors(found.cost, held))


def _with_live(found: Profile, settings: Config, place: Place, bar: Progress) -> Profile:
    """With what a service adds to its workers' steps."""
    cpus = ",".join(map(str, place.own)) if place.beside else ""
    worker = Workers(threads=place.threads, cpus=cpus)
    try:
        live = asyncio.run(measure_live(settings, worker, found.cost, found.host, bar))
    except ServiceFailed as error:
        fail(str(error))
    host = replace(
        found.host,
        others_message_s=_rounded(live.message_s),
        others_token_s=_rounded(live.token_s),
        others_request_s=_rounded(live.request_s),
        cores=usable_cores().at_once,
    )
    return replace(found, host=host, first_s=_rounded(live.first_s))


def _company(company: Company) -> str:
    worth = "" if company.others < QUIET else ": the times are not the machine's own"
    return f"other processes had {company.others:.0%} of the cores{worth}"


def transfer_kind(settings: Config) -> Literal["shm", "zmq"]:
    """Between two workers of the config on this host."""
    return "zmq" if settings.transfer.kind == "zmq" else "shm"


def reach(settings: Config, info: ModelInfo, context: int) -> Range:
    """What steps a worker of the config can be given. `context`: of the longest sequence; 0: as the config has it, up
    to LONGEST. Raises ConfigError if a sequence does not fit the pool.
    """
    size, scheduler = settings.kv.page_size, settings.scheduler
    pages, most = size_pool(settings.kv, settings.model.max_len, info.context, info.layers * info.page_bytes(size))
    if context > most:
        raise typer.BadParameter(f"{context}: the config allows {most} tokens", param_hint="'--context'")
    longest = context or min(most, LONGEST)
    return Range(scheduler.max_batch, min(scheduler.token_budget, longest), longest, pages * size)


def _stepper(settings: Config, folder: Path, threads: int, cases: list[Case], seed: int) -> Stepper:
    """The engine as a worker of the config has it."""
    model = settings.model
    return Stepper(
        folder,
        model.dtype,
        threads,
        settings.kv.page_size,
        cases,
        seed,
        weights=model.weights,
        cache=cache_folder(),
    )


@contextmanager
def _pinned(cores: Collection[int]) -> Iterator[None]:
    """This thread, and the threads that it starts, on these cores."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _time_transfers(kind: str, geometry: Geometry, bar: Progress) -> list[tuple[int, int, float]]:
    """(bytes, descriptors, seconds): from the first byte sent to the last one there."""
    timed = []
    with Pair(kind, 2 * max(TRANSFER_PAGES), geometry) as pair:
        for count in bar.track(TRANSFER_PAGES, description="transfers"):
            nbytes = count * geometry.layers * geometry.page_bytes
            for apart in (1, 2):
                pages = tuple(range(0, apart * count, apart))
                pair.hand_over(pages)
                seconds = [pair.hand_over(pages) for _ in range(20)]
                timed.append((nbytes, 1 if apart == 1 else count, float(np.median(seconds))))
    return timed


def _slowed(stepper: Stepper, works: Sequence[Case], task: Computes | Pushes, what: str, bar: Progress) -> float:
    """By what part steps are slowed while another process does its task; 0 if there are no cores for it."""
    if not task.cores:
        return 0.0
    line = bar.add_task(what, total=NEIGHBOUR_ROUNDS)
    alone, beside = ([Case(case.work) for case in works] for _ in range(2))
    with Neighbour(task) as neighbour:
        for _ in range(NEIGHBOUR_ROUNDS):
            for cases, switch in ((alone, neighbour.idle), (beside, neighbour.busy)):
                switch()
                for _ in stepper.measure(cases, 1):
                    pass
            bar.advance(line)
    slower = [after.median / before.median - 1 for before, after in zip(alone, beside, strict=True)]
    return max(0.0, sum(slower) / len(slower))


def _rounded(value: float) -> float:
    """Six digits: more would be noise."""
    return float(f"{value:.6g}")


def table(found: Profile) -> Table:
    """The error of each region on steps that were not fitted; fits 80 columns."""
    title = f"{found.model}, {found.dtype}, {found.threads} threads: prediction error"
    caption = (
        f"pages move at {found.B / 1e9:.1f} GB/s after {1e3 * found.t0:.2f} ms; "
        f"a step is {found.beside_step:.1%} slower beside another, {found.beside_push:.1%} beside a push; "
        f"the host adds {1e3 * found.host.step_s:.2f} ms a step, "
        f"the service {f'{1e3 * found.first_s:.1f} ms' if found.first_s else 'nothing measurable'} to a first token"
    )
    shown = Table(title=title, caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False, min_width=78)
    for name in ("region", "median", "p90", "steps"):
        shown.add_column(name, justify="left" if name == "region" else "right")
    for region, error in found.errors.items():
        shown.add_row(region, f"{error.median:.1%}", f"{error.p90:.1%}", str(error.steps))
    return shown


if __name__ == "__main__":
    typer.run(profile)
