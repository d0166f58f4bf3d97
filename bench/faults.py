"""Faults in a service under load: `cbdisagg bench faults`.

Starts a service of real processes, takes the answers of a mixed load undisturbed, then asks the same again and again
while processes are killed, stopped and told to end at random moments of the protocol, and compares every answer. The
parts: faults_load.py what is asked, faults_client.py who asks, faults_answers.py what is compared, faults_journal.py
what happens inside, faults_moments.py who is struck when, faults_processes.py and faults_service.py what is left
behind, faults_figures.py what is reported, faults_trial.py the order of it all.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import aiohttp
import psutil
import typer
from cbdisagg_bench.faults_figures import Report, tables
from cbdisagg_bench.faults_journal import Journals
from cbdisagg_bench.faults_moments import Striker
from cbdisagg_bench.faults_processes import Processes
from cbdisagg_bench.faults_service import Rest
from cbdisagg_bench.faults_trial import Plan, Trial
from cbdisagg_bench.options import SEEDS, at_least, chosen
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.service import ServiceFailed, running
from rich.console import Console
from rich.progress import Progress, TaskID

from cbdisagg.cli import fail
from cbdisagg.load import load_config

SETTINGS = """
[[workers]]
role = "prefill"
count = 2
threads = 1
[[workers]]
role = "decode"
count = 2
threads = 1
[model]
max_len = 1600
[kv]
pages = 104  # one long prompt and a few short ones: more have to wait, or are preempted
[scheduler]
token_budget = 128
[debug]
invariants = true
"""
SUSPECT_S = 3.0
TOLERANCE = {"bfloat16": 0.0, "float32": 1e-3}
"""Of log probabilities, in nats. What is drawn has none."""
SHOWN = 10
FOLDER_OF_TEMPORARY_FILES = Path("/tmp")
"""A run folder's sockets need a short path, and $TMPDIR may be a long one."""


async def measure(plan: Plan, options: Sequence[str], folder: Path, progress: Progress) -> Report:
    """`folder` gets the journals and the service's log. Raises ServiceFailed."""
    tasks: dict[str, TaskID] = {}

    def advance(phase: str, done: int, total: int) -> None:
        if phase not in tasks:
            tasks[phase] = progress.add_task(phase, total=total)
        progress.update(tasks[phase], completed=done)

    until = time.monotonic() + (plan.limit_s or math.inf)
    journals = Journals(folder / "journals")
    with tempfile.TemporaryDirectory(prefix="f-", dir=FOLDER_OF_TEMPORARY_FILES) as temporary:
        options = [*options, "--set", f"debug.journal={journals.folder}"]
        async with running("under test", options, folder / "service.log", Path(temporary)) as service:
            processes = Processes(psutil.Process(service.pid))
            failure = ""
            try:
                async with asyncio.TaskGroup() as group:
                    following = group.create_task(journals.follow())
                    striker = Striker(processes, journals, random.Random(plan.seed + 1), group)
                    trial = Trial(plan, Rest(service.url, processes, journals), striker, journals, advance, until)
                    await trial.run()
                    following.cancel()
            except* (ServiceFailed, aiohttp.ClientError) as failures:
                failure = _first(failures)
            finally:
                journals.close()
            if failure:
                raise ServiceFailed(failure)
        trial.rest.after_the_end(Path(temporary))
    return trial.report


def _first(failures: BaseExceptionGroup[BaseException]) -> str:
    first = failures.exceptions[0]
    return _first(first) if isinstance(first, BaseExceptionGroup) else f"{first}"


def service_options(
    config: Path | None, overrides: Sequence[str], model: str, dtype: str, folder: Path
) -> tuple[list[str], float]:
    """Options of `cbdisagg serve`, and the `suspect_s` that they come to. Raises ConfigError."""
    if config is None:
        config = folder / "2p2d.toml"
        config.write_text(SETTINGS)
    given = {override.partition("=")[0].strip() for override in overrides}
    ours = {"model.dtype": dtype, "policy.suspect_s": SUSPECT_S}
    overrides = [*overrides, *(f"{key}={value}" for key, value in ours.items() if key not in given)]
    suspect_s = load_config(config, overrides).policy.suspect_s
    settings = [word for override in overrides for word in ("--set", override)]
    return ["--config", str(config), "--model", model, *settings], suspect_s


def faults(
    kills: Annotated[int, typer.Option(callback=at_least(1), help="How many faults are made.")] = 20,
    each: Annotated[
        int,
        typer.Option(callback=at_least(0), help="Instead: so many SIGKILLs of each role's workers, as fast as can be."),
    ] = 0,
    limit_s: Annotated[
        float, typer.Option(callback=at_least(0), help="No further fault after so many seconds; 0: all are made.")
    ] = 0.0,
    config: Annotated[Path | None, typer.Option(help="TOML file of the service; without it 2 + 2 workers.")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model folder, .gguf file, hub id, or smollm2.")] = "smollm2",
    dtype: Annotated[
        str,
        typer.Option(
            help="bfloat16: a sequence's sums are the same in any company, and answers are compared to the last bit. "
            "float32: they may differ in their last bits, and a token that is drawn from all of the vocabulary now and "
            "then with them, also without a fault."
        ),
    ] = "bfloat16",
    requests: Annotated[int, typer.Option(callback=at_least(1), help="Requests of one round of the load.")] = 48,
    concurrency: Annotated[int, typer.Option(callback=at_least(1), help="How many clients at once.")] = 8,
    seed: Annotated[
        int, typer.Option(callback=at_least(0, SEEDS), help="Of the requests, the faults and their moments.")
    ] = 0,
    keep: Annotated[Path | None, typer.Option(help="Where the journals and the log are left.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Kill, stop and restart processes of a service under load; compare every answer with the undisturbed one.

    Exit status 1 if an answer was lost, altered or repeated, if anything was not given back, or if a process ended that
    nobody had told to.

    Example: cbdisagg bench faults --kills 300 --keep faults
    """
    chosen("--dtype", [dtype], tuple(TOLERANCE))
    if keep is not None and keep.exists() and any(keep.iterdir()):
        raise typer.BadParameter(f"{keep} is not empty", param_hint="'--keep'")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        options, suspect_s = service_options(config, set_ or [], model, dtype, folder)
        plan = Plan(kills, requests, concurrency, seed, suspect_s, TOLERANCE[dtype], each, limit_s)
        try:
            with progress_bar() as progress:
                report = asyncio.run(measure(plan, options, folder, progress))
        except ServiceFailed as failure:
            fail(str(failure))
        if keep is not None:
            shutil.copytree(folder, keep, dirs_exist_ok=True)
    if as_json:
        print(json.dumps(asdict(report) | {"plan": asdict(plan) | {"model": model, "dtype": dtype}}, indent=1))
    else:
        print(f"{dtype}, {concurrency} clients at once, policy.suspect_s = {suspect_s:g}, seed {seed}")
        print(f"log probabilities differ from the undisturbed ones by {report.drift:.1e} at most")
        for table in tables(report):
            Console().print(table)
    for line in complaints(report, keep):
        Console(stderr=True).print(line, markup=False, highlight=False, soft_wrap=True)
    if not report.clean:
        raise typer.Exit(1)


def complaints(report: Report, keep: Path | None) -> list[str]:
    """A line for each thing that is wrong, the first SHOWN of each kind, and how to look into it."""
    lines = [f"leaked: {line}" for line in report.leaked[:SHOWN]]
    lines += [f"crashed: {line}" for line in report.crashed[:SHOWN]]
    lines += [f"clients were told {count} times: {text}" for text, count in list(report.errors.items())[:SHOWN]]
    for found in report.findings[:SHOWN]:
        lines.append(f"{found.kind}: request {found.request} ({found.phase}, {found.began_s} to {found.ended_s} s)")
        lines += [f"  {text}" for text in (found.what, found.body, *found.faults)]
        lines += [f"  cbdisagg check {keep / 'journals' / name}" for name in found.journals if keep is not None]
    if not report.clean and keep is None:
        lines.append("run it again with --keep FOLDER to have the journals")
    return lines
