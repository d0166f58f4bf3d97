"""What a service takes of memory: `cbdisagg bench memory`.

Starts one, puts load on it, and adds up what its processes hold: pools, packed weights, and everything else. A page
that several processes map counts once, divided among them (PSS); so nobody else should have a service of the same model
at that time.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Protocol

import psutil
import typer
import uvloop
from cbdisagg_bench.load_asks import VOCAB, Ask, fill
from cbdisagg_bench.load_client import run
from cbdisagg_bench.options import PORTS, TOKENS, at_least
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.service import ServiceFailed, running
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from cbdisagg.cli import fail
from cbdisagg.config import ConfigError
from cbdisagg.load import load_config
from cbdisagg.prepare import prepare_model, served_name
from cbdisagg.sim.arrivals import Lengths, make_workload

IN_FLIGHT = 16
GOAL_MIB = 600
"""Of all processes together, besides pools and packed weights."""


class Mapping(Protocol):
    """What psutil says of one: the file, and its share in bytes."""

    path: str
    pss: int


@dataclass(frozen=True, slots=True)
class Row:
    """MiB that a process holds. `other`: what is its own, and its share of libraries and of the model's file."""

    process: str
    pools: float
    weights: float
    other: float


def memory(
    config: Annotated[Path, typer.Argument(exists=True, help="TOML file, as for serve.")],
    settings: Annotated[list[str] | None, typer.Option("--set", help="section.key=value, as for serve.")] = None,
    requests: Annotated[int, typer.Option(callback=at_least(1), help="That are asked before.")] = 64,
    prompt_tokens: Annotated[int, typer.Option(callback=at_least(1, TOKENS), help="Length of each prompt.")] = 512,
    output_tokens: Annotated[int, typer.Option(callback=at_least(1, TOKENS), help="Length of each answer.")] = 32,
    port: Annotated[int, typer.Option(callback=at_least(*PORTS), help="Of the service; 0: any that is free.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Add up the memory of all processes of a service.

    Example: cbdisagg bench memory configs/1p1d.toml --set model.weights=int8
    """
    if sys.platform != "linux":
        fail("bench memory reads /proc: Linux only")
    given = ("--config", str(config), *(word for each in settings or [] for word in ("--set", each)))
    try:
        chosen = load_config(config, settings or [])
        with progress_bar() as progress:
            prepare_model(chosen.model, lambda stage, fraction: None)
            lengths = Lengths(prompt_tokens), Lengths(output_tokens)
            asks = fill(make_workload(requests, 0.0, *lengths, 0), VOCAB, 0)
            rows = uvloop.run(_measure(given, served_name(chosen.model), asks, port, progress))
    except (ConfigError, ServiceFailed) as error:
        fail(str(error))
    if as_json:
        print(json.dumps({"rows": [asdict(row) for row in rows], "goal_mib": GOAL_MIB}, indent=1))
    else:
        Console().print(_table(rows))


async def _measure(options: Sequence[str], model: str, asks: Sequence[Ask], port: int, progress: Progress) -> list[Row]:
    with tempfile.TemporaryDirectory() as folder:
        async with running("memory", options, Path(folder) / "stderr", port=port) as service:
            answers, _ = await run(service.url, model, asks, IN_FLIGHT, progress)
            if errors := [answer.error for answer in answers if answer.error]:
                raise ServiceFailed(f"a request failed: {errors[0]}")
            supervisor = psutil.Process(service.pid)
            return [row_of(_name(each), each.memory_maps()) for each in (supervisor, *supervisor.children())]


def row_of(process: str, mappings: Iterable[Mapping]) -> Row:
    """What it holds, by what is mapped."""
    pools = weights = other = 0
    for each in mappings:
        if each.path.startswith("/memfd:cbdisagg"):
            pools += each.pss
        elif each.path.endswith(".packed"):
            weights += each.pss
        else:
            other += each.pss
    return Row(process, *(nbytes / 2**20 for nbytes in (pools, weights, other)))


def _name(process: psutil.Process) -> str:
    """That of the start file, which is its last word; nursery and supervisor have none."""
    words = process.cmdline()
    if "--start" in words:
        return Path(words[-1]).name.partition(".")[0]
    return "nursery" if any("nursery" in word for word in words) else "supervisor"


def _table(rows: Sequence[Row]) -> Table:
    table = Table(title="MiB; what several map is divided among them", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("process", "pools", "packed weights", "other"):
        table.add_column(name, justify="left" if name == "process" else "right")
    together = Row("all", *(sum(column) for column in zip(*((r.pools, r.weights, r.other) for r in rows), strict=True)))
    for row in (*rows, together):
        table.add_row(row.process, *(f"{value:.0f}" for value in (row.pools, row.weights, row.other)))
    table.caption = (
        f"goal: at most {GOAL_MIB} of other; all is {together.pools + together.weights + together.other:.0f}"
    )
    return table
