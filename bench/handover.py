"""What a hand-over costs: TTFT of one prefill + one decode worker against one worker that does both, unloaded.

Starts both services on this machine, each worker with the same number of threads, prompts computed on the same cores,
and asks them in turn, so that a change of the machine's speed meets both. Every prompt is new: nothing is cached. The
first token of the pair comes from the prefill worker by way of the decode worker, so the difference of the medians is
the hand-over.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated

import typer
from cbdisagg_bench.load_asks import Ask, fill
from cbdisagg_bench.load_client import Client
from cbdisagg_bench.options import ROUNDS, SEEDS, THREADS, TOKENS, at_least, chosen
from cbdisagg_bench.progress import progress_bar
from cbdisagg_bench.service import ServiceFailed, running

from cbdisagg.cli import fail
from cbdisagg.sim.arrivals import Lengths, make_workload

MODEL = "bench"

PAIR = """
[[workers]]
role = "prefill"
threads = {threads}
cpus = "{first}"
[[workers]]
role = "decode"
threads = {threads}
cpus = "{second}"
[policy]
mode = "disaggregate"
"""
SINGLE = """
[[workers]]
role = "any"
threads = {threads}
cpus = "{first}"
"""


@asynccontextmanager
async def service(name: str, settings: str, dtype: str) -> AsyncIterator[str]:
    """A running service; its base address, as it prints it. Raises ServiceFailed with the last line on its stderr."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / f"{name}.toml"
        config.write_text(settings)
        options = ("--config", str(config), "--set", f"model.dtype={dtype}", "--set", f"model.served_name={MODEL}")
        async with running(name, options, Path(folder) / "stderr") as started:
            yield started.url


def _places(threads: int) -> dict[str, object]:
    """Cores: the single worker has those of the prefill worker, so that both compute prompts in the same place."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2 * threads:
        return {"threads": threads, "first": "none", "second": "none"}
    first, second = (",".join(map(str, cores[n : n + threads])) for n in (0, threads))
    return {"threads": threads, "first": first, "second": second}


async def _ttft(url: str, ask: Ask) -> float:
    begin = time.perf_counter()
    answer = await Client(url, MODEL, begin).ask(ask)
    if answer.error:
        raise ServiceFailed(f"{url}: {answer.error}")
    return answer.times[0]


async def measure(repeat: int, prompt_tokens: int, threads: int, dtype: str, seed: int) -> dict[str, list[float]]:
    """TTFT in seconds, by service, in the order in which they were asked."""
    lengths = make_workload(2 * (repeat + 3), 0.0, Lengths(prompt_tokens), Lengths(4), seed)
    asks = fill(lengths, 49_000, seed)
    places = _places(threads)
    times: dict[str, list[float]] = {"1P1D": [], "single": []}
    async with (
        service("pair", PAIR.format(**places), dtype) as pair,
        service("single", SINGLE.format(**places), dtype) as single,
    ):
        with progress_bar() as progress:
            task = progress.add_task("prompts", total=len(asks))
            for n, ask in enumerate(asks):
                name, url = (("1P1D", pair), ("single", single))[n % 2]
                seconds = await _ttft(url, ask)
                if n >= 6:  # the first of each warm up
                    times[name].append(seconds)
                progress.advance(task)
    return times


def handover(
    starts: Annotated[int, typer.Option(callback=at_least(1, ROUNDS), help="How often both services are started.")] = 3,
    repeat: Annotated[int, typer.Option(callback=at_least(2), help="Prompts for each service and start.")] = 50,
    prompt_tokens: Annotated[int, typer.Option(callback=at_least(1, TOKENS), help="Length of each prompt.")] = 512,
    threads: Annotated[int, typer.Option(callback=at_least(1, THREADS), help="Threads of each worker.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(callback=at_least(0, SEEDS), help="Of the prompts.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Time the hand-over from a prefill to a decode worker.

    Where a process's memory lies changes its speed by about one per cent from start to start, which can be more than a
    hand-over costs: so both services are started several times, and the median over the starts is the result.

    Example: cbdisagg bench handover --starts 3 --repeat 50 --prompt-tokens 512
    """
    chosen("--dtype", [dtype], ("bfloat16", "float32"))
    rows: list[dict[str, list[float]]] = []
    try:
        for start in range(starts):
            times = asyncio.run(measure(repeat, prompt_tokens, threads, dtype, seed + start))
            rows.append({name: [1e3 * q for q in statistics.quantiles(values, n=4)] for name, values in times.items()})
            if not as_json:
                print(f"start {start + 1} of {starts}, n = {repeat}: {_shown(rows[-1])}")
    except ServiceFailed as failure:
        fail(str(failure))
    cost = statistics.median(_cost(row) for row in rows)
    if as_json:
        setting = {"repeat": repeat, "prompt_tokens": prompt_tokens, "threads": threads, "dtype": dtype, "seed": seed}
        print(json.dumps({"ttft_quartiles_ms": rows, "handover_ms": cost} | setting, indent=1))
        return
    print(f"hand-over of {prompt_tokens} tokens: {cost:+.2f} ms (difference of the medians, median over the starts)")


def _cost(quartiles: dict[str, list[float]]) -> float:
    return quartiles["1P1D"][1] - quartiles["single"][1]


def _shown(quartiles: dict[str, list[float]]) -> str:
    times = (f"{name} {low:.1f} / {median:.1f} / {high:.1f}" for name, (low, median, high) in quartiles.items())
    return f"TTFT quartiles in ms {', '.join(times)}; difference {_cost(quartiles):+.2f}"
