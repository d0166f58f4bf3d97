"""What a decision of the coordinator costs: `cbdisagg bench decision`.

Times the production core as it takes in a request: who has the prefix, the shortlist, the route, the messages. The
workers are simulated ones, half of them busy, in racks that can push pages among themselves; nothing else runs.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import time
from collections.abc import Sequence
from typing import Annotated

import typer
from cbdisagg_bench.options import at_least, numbers
from cbdisagg_bench.simulate_input import PROFILE, read_bytes
from rich import box
from rich.console import Console
from rich.table import Table

from cbdisagg.config import Config, Policy, Workers
from cbdisagg.core.events import FromCoordinatorInbox
from cbdisagg.core.profile import Profile, parse_profile
from cbdisagg.messages import Generate, RequestId, Sampling, Targets, page_hashes, page_root
from cbdisagg.sim.fleet import Layout
from cbdisagg.sim.service import Service
from cbdisagg.sim.workload import Ask, prompts

RACK = 20
LIMITS_US = {16: 100.0, 1000: 1000.0}
"""Workers -> microseconds that a decision may take."""


def decision(
    workers: Annotated[str, typer.Option(help="How many; separate with commas.")] = "16,1000",
    requests: Annotated[int, typer.Option(callback=at_least(10), help="Decisions that are timed.")] = 300,
    prompt_tokens: Annotated[int, typer.Option(callback=at_least(1), help="Length of each prompt.")] = 1024,
    seed: Annotated[int, typer.Option(callback=at_least(0), help="Of which prompts begin alike.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Time how long the coordinator takes to place a request.

    Example: cbdisagg bench decision --workers 16,100,1000
    """
    profile = parse_profile(read_bytes(PROFILE), str(PROFILE))
    rows = [
        (count, mode, quantiles(measure(count, mode, requests, prompt_tokens, profile, seed)))
        for count in numbers("--workers", workers)
        for mode in ("split", "any")
    ]
    if as_json:
        names = ("p50_us", "p90_us", "p99_us")
        told = [{"workers": count, "roles": mode, **dict(zip(names, us, strict=True))} for count, mode, us in rows]
        print(json.dumps({"requests": requests, "prompt_tokens": prompt_tokens, "seed": seed, "rows": told}, indent=1))
        return
    shown = Table(caption="microseconds for one decision, messages included", box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("workers", "roles", "p50", "p90", "p99", "allowed"):
        shown.add_column(name, justify="right")
    for count, mode, us in rows:
        allowed = f"{LIMITS_US[count]:.0f}" if count in LIMITS_US else ""
        shown.add_row(str(count), mode, *(f"{value:.0f}" for value in us), allowed)
    Console().print(shown)


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


def quantiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """p50, p90, p99 in microseconds."""
    cuts = statistics.quantiles([1e6 * value for value in seconds], n=100)
    return cuts[49], cuts[89], cuts[98]


if __name__ == "__main__":
    typer.run(decision)
