"""The goodput grid by the wall clock: services on this machine, asked in turn.

Knows configs of the same model on the same cores: one worker with all threads, two that do both phases, one prefill and
one decode worker, and two under the policy; and one worker that is like each of these two, to compare first tokens with
where there is no queue. All run side by side, idle but for the one that is asked, so a slow spell of the machine meets
all of them; each request brings its targets along. What the runs come to is goodput_wall_cells.py's.
"""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from cbdisagg_bench.goodput_wall_cells import HALF, ONE, POLICY, Load, Runs
from cbdisagg_bench.load_asks import VOCAB, fill
from cbdisagg_bench.load_client import run
from cbdisagg_bench.load_report import Aims, goodput, summarise
from cbdisagg_bench.service import running
from msgspec.structs import replace
from rich.progress import Progress

from cbdisagg.config import Config, Workers
from cbdisagg.load import print_config
from cbdisagg.sim import workload
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.variants import changed

NAME = "goodput"
WARM_UP = 4


def systems(base: Config, threads: int) -> dict[str, Config]:
    """By name. `threads`: of all workers of a system together, at least two."""
    half = max(1, threads // 2)
    pair = (Workers(role="any", count=2, threads=half),)
    split = (Workers(role="prefill", threads=half), Workers(role="decode", threads=half))
    return {
        ONE: changed(replace(base, workers=(Workers(role="any", threads=threads),)), {"policy.mode": "aggregate"}),
        "two": changed(replace(base, workers=pair), {"policy.mode": "aggregate"}),
        "1P1D": changed(replace(base, workers=split), {"policy.mode": "disaggregate"}),
        POLICY: replace(base, workers=pair),
        HALF: changed(replace(base, workers=(Workers(role="any", threads=half),)), {"policy.mode": "aggregate"}),
    }


def loads(rates: Sequence[float], lengths: Sequence[tuple[int, int]], targets: Sequence[tuple[int, int]]) -> list[Load]:
    """`lengths`: tokens of prompts and of answers; `targets`: TTFT and TPOT in milliseconds."""
    return [
        Load(rate, prompts, outputs, ttft_ms, tpot_ms)
        for prompts, outputs in lengths
        for ttft_ms, tpot_ms in targets
        for rate in rates
    ]


async def measure(
    configs: dict[str, Config],
    wanted: Sequence[Load],
    requests: int,
    rounds: int,
    seed: int,
    port: int,
    progress: Progress,
    ended: Callable[[], None],
) -> list[Runs]:
    """`port`: of the first service, 0 for any. Raises ServiceFailed."""
    found = [Runs(load, {name: [] for name in configs}, {name: [] for name in configs}) for load in wanted]
    async with _services(configs, port) as urls:
        for url in urls.values():
            await _ask(url, drawn(Load(1e3, 64, 8, 1e6, 1e6), WARM_UP, seed), seed, progress)
        for turn in range(rounds):
            for number, load in enumerate(wanted):
                asks = drawn(load, requests, seed)
                for system, url in urls.items():
                    place = (turn * len(wanted) + number) * len(urls)
                    met, ttft_ms = await _ask(url, asks, seed + 1 + place, progress)
                    found[number].met[system].append(met)
                    found[number].ttft_ms[system].append(ttft_ms)
                    ended()
    return found


@asynccontextmanager
async def _services(configs: dict[str, Config], port: int) -> AsyncIterator[dict[str, str]]:
    """All of them, ready; their addresses."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = {}
        for number, (system, config) in enumerate(configs.items()):
            file = folder / f"{system}.toml"
            file.write_text(print_config(changed(config, {"model.served_name": NAME})), encoding="utf-8")
            options = ("--config", str(file))
            place = running(system, options, folder / f"{system}.stderr", port=port + number if port else 0)
            urls[system] = (await stack.enter_async_context(place)).url
        yield urls


def drawn(load: Load, count: int, seed: int) -> list[workload.Ask]:
    """Lengths and arrivals, the same for all systems, targets and rounds."""
    lengths = (
        Lengths(load.prompts, "exponential", 4 * load.prompts),
        Lengths(load.outputs, "exponential", 4 * load.outputs),
    )
    asks = make_workload(count, load.rate, *lengths, seed)
    return [replace(ask, ttft_ms=load.ttft_ms, tpot_ms=load.tpot_ms) for ask in asks]


async def _ask(url: str, asks: Sequence[workload.Ask], seed: int, progress: Progress) -> tuple[float, float | None]:
    """The part of the requests that met both targets, and the median of their TTFT in milliseconds.

    `seed`: of the prompts' ids, which never repeat, so that no cache answers.
    """
    answers, seconds = await run(url, NAME, fill(asks, VOCAB, seed), len(asks), progress)
    median = summarise(answers, seconds).ttft_ms[:1]
    return (goodput(answers, Aims()) or 0) / len(asks), median[0] if median else None
