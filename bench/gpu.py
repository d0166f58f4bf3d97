"""All that has to be seen on a GPU, in one short run: `cbdisagg bench gpu`.

Knows the parts, how long each may take, and how to show what they find; not what they do. Each part is a process of its
own with its own time limit, and what it leaves of that is the later ones': one that fails or hangs costs its own rows
from there on, and nothing else. Random weights only, made on the device; nothing is fetched. Results: results.json,
table.txt and log.txt in one folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from io import StringIO
from pathlib import Path
from typing import IO, Annotated

import typer
from cbdisagg_bench.gpu_part import PARTS
from cbdisagg_bench.gpu_rows import Row
from cbdisagg_bench.options import chosen
from cbdisagg_bench.progress import progress_bar
from rich import box
from rich.console import Console
from rich.table import Table

from cbdisagg.cli import fail
from cbdisagg.load import environment

LIMITS_S = {
    "kernels": 28,
    "rates": 15,
    "steps": 35,
    "ipc": 25,
    "pair": 40,
    "article": 60,
    "article-pair": 50,
    "kills": 45,
}
"""Together just under five minutes. The last makes the most of what the others leave.

What they need has been reckoned, not seen: `kernels` 75 s of compiling on a core, divided among its processes;
`article` 29 s of steps by the cost model of `bench batching`, and as much to draw weights and capture graphs.
"""
INTERPRETER_FACTOR = 4
"""In the interpreter a part may take this many times as long: its sizes are tiny, its kernels slow."""


@dataclass
class Outcome:
    """One part: its rows, as far as it came; "" as `trouble` if it came to its end."""

    part: str
    seconds: float
    trouble: str
    rows: list[Row] = field(default_factory=list)


def gpu(
    out: Annotated[Path, typer.Option(help="Folder for results.json, table.txt and log.txt.")] = Path("gpu-results"),
    device: Annotated[
        str, typer.Option(help="cuda:N; or cpu: tiny sizes through Triton's interpreter, to try the script.")
    ] = "cuda:0",
    parts: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(PARTS)}.")] = ",".join(PARTS),
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Prove the GPU path on this machine's GPU: kernels, steps, transfers, services, kills. Under five minutes.

    Exit status 1 if a part failed or an aim was missed.

    Example: cbdisagg bench gpu --out gpu-results
    """
    names = chosen("--parts", [name.strip() for name in parts.split(",")], PARTS)
    if device != "cpu" and not (device.startswith("cuda:") and device[5:].isdecimal()):
        raise typer.BadParameter(f"{device!r} is not cuda:N or cpu", param_hint="'--device'")
    try:
        out.mkdir(parents=True, exist_ok=True)
        log = (out / "log.txt").open("wb")
    except OSError as error:
        fail(f"--out {out}: {error.strerror}")
    outcomes, left_over_s = list[Outcome](), 0.0
    with log, progress_bar() as progress:
        task = progress.add_task("", total=len(names))
        for name in names:
            progress.update(task, description=name)
            limit_s = LIMITS_S[name] * (INTERPRETER_FACTOR if device == "cpu" else 1) + left_over_s
            outcomes.append(run_part(name, device, log, limit_s))
            left_over_s = max(0.0, limit_s - outcomes[-1].seconds)
            progress.advance(task)
            (out / "results.json").write_text(json.dumps(report(outcomes, device), indent=1))
    text = StringIO()
    Console(file=text, width=100).print(table(outcomes))
    (out / "table.txt").write_text(text.getvalue())
    if as_json:
        print(json.dumps(report(outcomes, device), indent=1))
    else:
        Console().print(table(outcomes))
    if any(outcome.trouble for outcome in outcomes) or any(
        row.holds is False for outcome in outcomes for row in outcome.rows
    ):
        raise typer.Exit(1)


def run_part(name: str, device: str, log: IO[bytes], limit_s: float) -> Outcome:
    """In a process group of its own, all of which ends with it: a part may have started services."""
    log.write(f"== {name}\n".encode())
    log.flush()
    start, began = log.tell(), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "cbdisagg_bench.gpu_part", name, device, f"{limit_s:g}"],
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        start_new_session=True,
        env=environment(TRITON_INTERPRET="1" if device == "cpu" else "0"),
    )
    try:
        text, _ = process.communicate(timeout=limit_s)
        trouble = "" if process.returncode == 0 else f"status {process.returncode}: {_last_line(Path(log.name), start)}"
    except subprocess.TimeoutExpired:
        _end_group(process)
        text, _ = process.communicate()
        trouble = f"not done after {limit_s:.0f} s"
    finally:
        _end_group(process)
    rows = [Row(**json.loads(line)) for line in text.splitlines() if line.startswith('{"part"')]
    return Outcome(name, time.monotonic() - began, trouble, rows)


def _end_group(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):  # nobody of it is left
        os.killpg(process.pid, signal.SIGKILL)


def _last_line(log: Path, start: int) -> str:
    lines = [line.strip() for line in log.read_bytes()[start:].decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "nothing on stderr"


def report(outcomes: list[Outcome], device: str) -> dict[str, object]:
    return {
        "command": "gpu",
        "device": device,
        "machine": f"{platform.machine()} {os.cpu_count()} cpus",
        "gpu": _gpu(),
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in ("torch", "triton")},
        "parts": [asdict(outcome) for outcome in outcomes],
    }


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def _gpu() -> str:
    """As the driver's tool calls it; no CUDA is started in this process."""
    try:
        command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def table(outcomes: list[Outcome]) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for name in ("part", "what", "value", "unit", "aim", ""):
        made.add_column(name, justify="right" if name == "value" else "left")
    for outcome in outcomes:
        for row in outcome.rows:
            verdict = {True: "yes", False: "NO", None: ""}[row.holds]
            made.add_row(row.part, row.what, f"{row.value:.4g}", row.unit, row.aim, verdict)
        if outcome.trouble:
            made.add_row(outcome.part, outcome.trouble, "", "", "to its end", "NO")
    return made
