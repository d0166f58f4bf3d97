"""What runs of the wall-clock grid come to: how much each system keeps up with, cell by cell, and what misses.

Knows parts of requests by system, rate and round; runs nothing. A cell is one workload with one pair of targets and one
part of the requests: its goodput is the highest rate at which that part met both targets, read off the rates that were
tried.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise

import msgspec
from msgspec import Struct
from rich import box
from rich.table import Table

POLICY, ONE, HALF = "policy", "one", "half"
PARTS = (0.9, 0.99)
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


class Runs(Struct, frozen=True):
    """One load, by system, round by round: `met`, the part of the requests that met both targets, and `ttft_ms`, their
    median; None where no first token came.
    """

    load: Load
    met: dict[str, list[float]]
    ttft_ms: dict[str, list[float | None]]

    def ttft(self, system: str) -> float | None:
        """Milliseconds: the median of the rounds' medians."""
        known = [ms for ms in self.ttft_ms[system] if ms is not None]
        return statistics.median(known) if known else None


class WallCell(Struct, frozen=True):
    """By system, round by round: `kept`, the requests per second at which `part` of them met both targets.

    `later`: at the lowest rate, the policy's TTFT over that of one worker with as many threads as each of its own
    (HALF), and over that of one with all of them (ONE); None if one of the two had none.
    """

    prompts: int
    outputs: int
    ttft_ms: float
    tpot_ms: float
    part: float
    kept: dict[str, list[float]]
    later: dict[str, float | None]

    def median(self, system: str) -> float:
        return statistics.median(self.kept[system])

    @property
    def best(self) -> str:
        """Of the others on the same cores: the system with the highest median."""
        return max((system for system in self.kept if system not in (POLICY, HALF)), key=self.median)

    @property
    def spread(self) -> float:
        """Greatest less least of the best one's equal rounds, as a part of its median."""
        rounds = self.kept[self.best]
        return (max(rounds) - min(rounds)) / self.median(self.best) if self.median(self.best) else 0.0

    @property
    def ratio(self) -> float:
        best = self.median(self.best)
        return self.median(POLICY) / best if best else 1.0

    @property
    def misses(self) -> str:
        """Which figure it misses, "" for none."""
        if self.ratio < SHORTFALL - self.spread:
            return f"under {SHORTFALL}"
        later = self.later[HALF]
        return "late" if later is None or later > LATER else ""


def kept_up(rates: Sequence[float], met: Sequence[float], part: float) -> float:
    """The highest rate at which `part` of the requests met their targets, linear between two that were tried.

    0 if they did not even at the lowest, the highest if they did at all of them: how much more is not known.
    """
    if met[0] < part:
        return 0.0
    for (low, above), (high, below) in pairwise(zip(rates, met, strict=True)):
        if below < part:
            return low + (high - low) * (above - part) / (above - below)
    return rates[-1]


def wall_cells(runs: Sequence[Runs]) -> list[WallCell]:
    """One for each workload, pair of targets and part of the requests."""
    groups: dict[tuple[int, int, float, float], list[Runs]] = {}
    for each in runs:
        load = each.load
        groups.setdefault((load.prompts, load.outputs, load.ttft_ms, load.tpot_ms), []).append(each)
    return [
        _cell(key, sorted(group, key=lambda each: each.load.rate), part)
        for key, group in groups.items()
        for part in PARTS
    ]


def _cell(key: tuple[int, int, float, float], group: Sequence[Runs], part: float) -> WallCell:
    rates = [each.load.rate for each in group]
    kept = {
        system: [kept_up(rates, met, part) for met in zip(*(each.met[system] for each in group), strict=True)]
        for system in group[0].met
    }
    return WallCell(
        *key, part, kept, {other: _over(group[0].ttft(POLICY), group[0].ttft(other)) for other in (HALF, ONE)}
    )


def _over(ms: float | None, other: float | None) -> float | None:
    return ms / other if ms is not None and other else None


def table(found: Sequence[WallCell], rounds: int, others: float) -> Table:
    """Requests per second that the systems keep up with. `others`: the part of the cores that other processes had."""
    missed = sum(bool(cell.misses) for cell in found)
    caption = (
        f"requests/s at which that part met both targets (ms: TTFT/TPOT), medians of {rounds} rounds; 0: not even at "
        f"the lowest rate. +-: range of the best one's rounds; ratio: the policy's over it, to reach: {SHORTFALL} less "
        f"that range. On the right the policy's TTFT at the lowest rate over that of {HALF}, one worker with as many "
        f"threads as each of the policy's (at most {LATER}), and of {ONE}. {missed} of {len(found)} cells miss a figure"
        f" (!). Others had {others:.0%} of the cores."
    )
    shown = Table(caption=caption, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    names = list(found[0].kept)
    for name in ("tokens", "ms", "part", *names, "best", "+-", "ratio", HALF, ONE, ""):
        shown.add_column(name, justify="right", no_wrap=True)
    for cell in found:
        shown.add_row(
            f"{cell.prompts}+{cell.outputs}",
            f"{cell.ttft_ms:g}/{cell.tpot_ms:g}",
            f"{cell.part:.0%}",
            *(f"{cell.median(name):.2f}" for name in names),
            cell.best,
            f"{cell.spread:.0%}",
            f"{cell.ratio:.2f}",
            *("-" if later is None else f"{later:.2f}" for later in cell.later.values()),
            "!" if cell.misses else "",
        )
    return shown


def summary(cell: WallCell) -> dict[str, object]:
    """For JSON: what was measured, and what follows from it."""
    follows = {"best": cell.best, "spread": cell.spread, "ratio": cell.ratio, "miss": cell.misses}
    return {**msgspec.to_builtins(cell), **follows}
