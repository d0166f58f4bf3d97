"""What a decision of the coordinator costs: `cbdisagg bench decision`.

Times the production core as it takes in a request: who has the prefix, the shortlist, the route, the messages. The
workers are simulated ones in racks that can push pages among themselves; every other one has told of the streams that
it decodes. Nothing else runs. Exit status 1 if the median decision takes longer than it may.
"""

from __future__ import annotations

import gc
import json
import math
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, TypeAlias

import typer
from cbdisagg_bench.options import MANY_WORKERS, at_least, command, numbers
from cbdisagg_bench.simulate_input import PROFILE, read_bytes
from msgspec.structs import replace
from rich import box
from rich.console import Console
from rich.table import Table

from cbdisagg.config import Config, Policy, Workers
from cbdisagg.core.effects import Effect, Tell
from cbdisagg.core.events import FromCoordinatorInbox
from cbdisagg.core.profile import Profile, parse_profile
from cbdisagg.messages import Generate, Load, RequestId, Sampling, Targets, page_hashes, page_root
from cbdisagg.sim.fleet import Layout
from cbdisagg.sim.network import Process
from cbdisagg.sim.service import Service
from cbdisagg.sim.shell import Event
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.workload import Ask, prompts

RACK = 20
Quantiles: TypeAlias = tuple[float, float, float]
LIMITS_US = {16: 100.0, 1000: 1000.0}
"""Workers -> microseconds that the median decision may take."""
STREAMS, TOKENS = 32, 512
"""What a busy worker decodes: so many sequences, with prompts of so many tokens."""


def decision(
    workers: Annotated[str, typer.Option(help="How many; separate with commas.")] = "16,1000",
    requests: Annotated[int, typer.Option(callback=at_least(10), help="Decisions that are timed, in each run.")] = 300,
    runs: Annotated[int, typer.Option(callback=at_least(1), help="Of each; their medians count.")] = 3,
    prompt_tokens: Annotated[int, typer.Option(callback=at_least(1), help="Length of each prompt.")] = 1024,
    seed: Annotated[int, typer.Option(callback=at_least(0), help="Of which prompts begin alike.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time how long the coordinator takes to place a request.

    Example: cbdisagg bench decision --workers 16,100,1000
    """
    profile = parse_profile(read_bytes(PROFILE), str(PROFILE))
    kinds = [(count, mode) for count in numbers("--workers", workers, MANY_WORKERS) for mode in ("split", "any")]
    timed: list[list[Quantiles]] = [[] for _ in kinds]
    for turn in range(runs):
        for found, (count, mode) in zip(timed, kinds, strict=True):
            found.append(quantiles(measure(count, mode, requests, prompt_tokens, profile, seed + turn)))
    rows = [Row(count, mode, *middle(found)) for (count, mode), found in zip(kinds, timed, strict=True)]
    if as_json:
        told = {"command": command(), "requests": requests, "runs": runs, "prompt_tokens": prompt_tokens, "seed": seed}
        print(json.dumps({**told, "rows": [{**asdict(row), "holds": row.holds} for row in rows]}, indent=1))
    else:
        Console().print(_table(rows, runs))
    if not all(row.holds for row in rows):
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True)
class Row:
    """Microseconds of a decision among so many workers."""

    workers: int
    roles: str
    p50_us: float
    p90_us: float
    p99_us: float

    @property
    def holds(self) -> bool:
        return self.p50_us <= LIMITS_US.get(self.workers, math.inf)


def _table(rows: Sequence[Row], runs: int) -> Table:
    caption = f"microseconds for one decision, messages included; medians of {runs} runs; p50 is held against `allowed`"
    shown = Table(caption=caption, box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("workers", "roles", "p50", "p90", "p99", "allowed", "holds"):
        shown.add_column(name, justify="right")
    for row in rows:
        figures = (f"{us:.0f}" for us in (row.p50_us, row.p90_us, row.p99_us))
        limit = LIMITS_US.get(row.workers)
        judged = ("", "") if limit is None else (f"{limit:.0f}", "yes" if row.holds else "no")
        shown.add_row(str(row.workers), row.roles, *figures, *judged)
    return shown


def measure(count: int, mode: str, requests: int, prompt_tokens: int, profile: Profile, seed: int) -> list[float]:
    """Seconds of each decision. `mode`: "split" (half prefill, half decode workers) or "any". One prompt in four begins
    like an earlier one.
    """
    half = max(1, count // 2)
    groups = (Workers(role="prefill", count=half), Workers(role="decode", count=max(1, count - half)))
    config = Config(
        workers=groups if mode == "split" else (Workers(role="any", count=count),),
        policy=Policy(queue_limit=1_000_000),
    )
    service = Service(config, profile, Layout(per_rack=RACK), lambda record: None)
    coordinator, api = service.coordinator, service.clients.address
    load = busy_load(profile)
    for machine in list(service.machines.values())[::2]:
        coordinator.core.handle(FromCoordinatorInbox(machine.address, load), 0.0)
    draw = random.Random(seed)
    blocks = [draw.randrange(requests) // 4 for _ in range(requests)]
    asks = [Ask(0.0, 64, prompt_tokens, prefix_blocks=(block,)) for block in blocks]
    root = page_root("decisions")
    times = []
    gc.disable()  # a pause would be counted as a decision's
    try:
        for number, prompt in enumerate(prompts(asks)):
            hashes = page_hashes(root, prompt, config.kv.page_size)
            sampling, targets = Sampling(max_tokens=64), Targets(1.0, 0.05)
            request = Generate(RequestId(api.incarnation, number), 0, prompt, b"", root, hashes, sampling, targets, 0.0)
            event = FromCoordinatorInbox(api, request)
            began = time.perf_counter()
            coordinator.core.handle(event, 0.001 * number)
            times.append(time.perf_counter() - began)
    finally:
        gc.enable()
    placed = sum(coordinator.core.decisions.values())
    assert placed == requests, f"{placed} of {requests} requests were placed: a refusal would be no decision"
    return times[len(times) // 10 :]


def busy_load(profile: Profile) -> Load:
    """What a worker says of itself when STREAMS sequences decode there."""
    told: list[Load] = []

    def listen(process: Process, now: float, event: Event, effects: list[Effect]) -> None:
        told.extend(e.message for e in effects if isinstance(e, Tell) and isinstance(e.message, Load))

    config = Config(workers=(Workers(role="any"),), policy=Policy(queue_limit=STREAMS))
    simulate(config, profile, [Ask(0.0, 256, TOKENS)] * STREAMS, observer=listen)
    return replace(max(told, key=lambda load: load.decodes), received=0, jobs=0)


def middle(found: Sequence[Quantiles]) -> Quantiles:
    """Of several runs: the median of each."""
    p50, p90, p99 = (statistics.median(run[n] for run in found) for n in range(3))
    return p50, p90, p99


def quantiles(seconds: Sequence[float]) -> Quantiles:
    """p50, p90, p99 in microseconds."""
    cuts = statistics.quantiles([1e6 * value for value in seconds], n=100)
    return cuts[49], cuts[89], cuts[98]


if __name__ == "__main__":
    typer.run(decision)
