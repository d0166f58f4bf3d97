"""The goodput grid by the wall clock: services on this machine, asked in turn.

Knows configs of the same model on the same cores: one worker with all threads, two that do both phases, one prefill and
one decode worker, and two under the policy; and one worker that is like each of these two, to compare first tokens with
where there is no queue. All run side by side, idle but for the one that is asked, so a slow spell of the machine meets
all of them; what counts for a load is the median over the rounds of the requests per second that met both targets, and
the range of equal rounds says what differences mean.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import msgspec
from cbdisagg_bench.load_asks import VOCAB, fill
from cbdisagg_bench.load_client import run
from cbdisagg_bench.load_report import Aims, goodput, summarise
from cbdisagg_bench.service import running
from msgspec import Struct
from msgspec.structs import replace
from rich import box
from rich.progress import Progress
from rich.table import Table

from cbdisagg.config import Config, Targets, Workers
from cbdisagg.load import print_config
from cbdisagg.sim import workload
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.variants import changed

NAME = "goodput"
WARM_UP = 4
POLICY = "policy"
HALF = "half"
LATER = 1.05
"""At the lowest rate, the policy's first tokens may come so much later than those of one worker like its own."""
SHORTFALL = 0.95
"""Of the best system's goodput, less the range of its equal rounds: what the policy is to reach."""


class Load(Struct, frozen=True):
    """Requests per second, lengths in tokens, targets in milliseconds."""

    rate: float
    prompts: int
    outputs: int
    ttft_ms: float
    tpot_ms: float


class WallCell(Struct, frozen=True):
    """By system, round by round: `good`, the requests per second that met both targets, and `ttft_ms`, the median."""

    load: Load
    good: dict[str, list[float]]
    ttft_ms: dict[str, list[float]]

    def median(self, system: str) -> float:
        return statistics.median(self.good[system])

    @property
    def best(self) -> str:
        """Of the others: the system with the highest median."""
        return max((system for system in self.good if system != POLICY), key=self.median)

    @property
    def spread(self) -> float:
        """Greatest less least of the best one's equal rounds, as a part of its median."""
        rounds = self.good[self.best]
        return (max(rounds) - min(rounds)) / self.median(self.best) if self.median(self.best) else 0.0

    @property
    def ratio(self) -> float:
        best = self.median(self.best)
        return self.median(POLICY) / best if best else 1.0

    @property
    def holds(self) -> bool:
        return self.ratio >= SHORTFALL - self.spread

    def ttft(self, system: str) -> float:
        """Milliseconds: the median of the rounds' medians."""
        return statistics.median(self.ttft_ms[system])

    @property
    def later(self) -> float:
        """The policy's TTFT over that of one worker like its own."""
        return self.ttft(POLICY) / self.ttft(HALF)


def systems(base: Config, targets: Targets, threads: int) -> dict[str, Config]:
    """By name. `threads`: of all workers of a system together, at least two."""
    half = max(1, threads // 2)
    pair = (Workers(role="any", count=2, threads=half),)
    split = (Workers(role="prefill", threads=half), Workers(role="decode", threads=half))
    base = replace(base, targets=targets)
    return {
        "one": changed(replace(base, workers=(Workers(role="any", threads=threads),)), {"policy.mode": "aggregate"}),
        "two": changed(replace(base, workers=pair), {"policy.mode": "aggregate"}),
        "1P1D": changed(replace(base, workers=split), {"policy.mode": "disaggregate"}),
        POLICY: replace(base, workers=pair),
        HALF: changed(replace(base, workers=(Workers(role="any", threads=half),)), {"policy.mode": "aggregate"}),
    }


def loads(rates: Sequence[float], lengths: Sequence[Sequence[int]], targets: Targets) -> list[Load]:
    """`lengths`: tokens of prompts and of answers."""
    return [
        Load(rate, prompts, outputs, targets.ttft_ms, targets.tpot_ms) for prompts, outputs in lengths for rate in rates
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
) -> list[WallCell]:
    """`port`: of the first service, 0 for any. Raises ServiceFailed."""
    found = [WallCell(load, {name: [] for name in configs}, {name: [] for name in configs}) for load in wanted]
    async with _services(configs, port) as urls:
        for url in urls.values():
            await _ask(url, drawn(Load(1e3, 64, 8, 0, 0), WARM_UP, seed), Aims(), seed, progress)
        for turn in range(rounds):
            for number, load in enumerate(wanted):
                asks, aims = drawn(load, requests, seed), Aims(load.ttft_ms, load.tpot_ms)
                for system, url in urls.items():
                    place = (turn * len(wanted) + number) * len(urls)
                    met, ttft_ms = await _ask(url, asks, aims, seed + 1 + place, progress)
                    found[number].good[system].append(load.rate * met)
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
    """Lengths and arrivals, the same for all systems and rounds."""
    lengths = (
        Lengths(load.prompts, "exponential", 4 * load.prompts),
        Lengths(load.outputs, "exponential", 4 * load.outputs),
    )
    return make_workload(count, load.rate, *lengths, seed)


async def _ask(
    url: str, asks: Sequence[workload.Ask], aims: Aims, seed: int, progress: Progress
) -> tuple[float, float]:
    """The part of the requests that met both targets, and the median of their TTFT in milliseconds.

    `seed`: of the prompts' ids, which never repeat, so that no cache answers.
    """
    answers, seconds = await run(url, NAME, fill(asks, VOCAB, seed), len(asks), progress)
    (ttft_ms, *_) = summarise(answers, seconds).ttft_ms or [math.inf]
    return (goodput(answers, aims) or 0) / len(asks), ttft_ms


def table(found: Sequence[WallCell], rounds: int, others: float) -> Table:
    """Requests per second that met both targets. `others`: the part of the cores that other processes had."""
    missed = sum(not cell.holds for cell in found)
    caption = (
        f"good requests/s, medians of {rounds} rounds; +-: range of the best one's; to reach: {SHORTFALL} of the "
        f"best, less that range; {missed} of {len(found)} cells miss it (!). TTFT: the policy's median over that of "
        f"{HALF}, one worker with as many threads as each of the policy's; at the lowest rate, at most {LATER}. "
        f"Others had {others:.0%} of the cores."
    )
    shown = Table(caption=caption, box=box.SIMPLE_HEAD, padding=(0, 1), show_edge=False)
    names = list(found[0].good)
    for name in ("requests/s", "tokens", "TTFT/TPOT ms", *names, "best", "+-", "policy/best", "", "TTFT"):
        shown.add_column(name, justify="right")
    for cell in found:
        load = cell.load
        shown.add_row(
            f"{load.rate:g}",
            f"{load.prompts}+{load.outputs}",
            f"{load.ttft_ms:g}/{load.tpot_ms:g}",
            *(f"{cell.median(name):.2f}" for name in names),
            cell.best,
            f"{cell.spread:.0%}",
            f"{cell.ratio:.2f}",
            "" if cell.holds else "!",
            f"{cell.later:.2f}",
        )
    return shown


def summary(cell: WallCell) -> dict[str, object]:
    """For JSON: what was measured, and what follows from it."""
    follows = {"best": cell.best, "spread": cell.spread, "ratio": cell.ratio, "holds": cell.holds, "later": cell.later}
    return {**msgspec.to_builtins(cell), **follows}
