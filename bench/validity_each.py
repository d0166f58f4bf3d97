"""How far off the first token of each request was: what the simulator said of it, and the coordinator when it came.

Knows lists of milliseconds, request by request, and the coordinator's trace (`[debug] trace`): a line per decision.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich import box
from rich.table import Table

Numbers = NDArray[np.float64]
FORESEEN = re.compile(r"request \d+\.(\d+): .*?: first token (\S+) s,")
BOUND = 0.15
"""How far off the worst but a tenth of the predictions may be, as a part of what was measured."""


@dataclass(frozen=True, slots=True)
class Firsts:
    """The TTFT of each request of one run, in order of arrival, milliseconds: measured, and foreseen when it came, None
    if nothing was traced.
    """

    measured: Sequence[float]
    foreseen: Sequence[float | None]


@dataclass(frozen=True, slots=True)
class Each:
    """At one rate, the errors of what `who` said, as parts of what was measured: the median one, and p90; None if
    something was not said of each request, which is a miss. `bound`: what p90 may be; None: it is only to be known.
    """

    rate: float
    who: str
    median: float | None
    p90: float | None
    bound: float | None = BOUND

    @property
    def holds(self) -> bool:
        return self.bound is None or (self.p90 is not None and self.p90 <= self.bound)


def read_foreseen(log: Path, count: int) -> list[float | None]:
    """Milliseconds, of the last `count` requests in a log of the coordinator, by their numbers: what was said when each
    was decided on first. A request may move later, and is decided on again then.
    """
    first: dict[int, float] = {}
    for number, seconds in FORESEEN.findall(log.read_text(errors="replace")):
        first.setdefault(int(number), 1e3 * float(seconds))
    last = max(first, default=count - 1)
    return [first.get(number) for number in range(last - count + 1, last + 1)]


def compare_each(rate: float, runs: Sequence[Firsts], simulated: Sequence[float]) -> list[Each]:
    """The simulator against the median of the runs, request by request; the coordinator against what came of it, in the
    median run. And what no prediction can be better than: another run, in which the same requests came at the same
    times, against the median of the runs.
    """
    usual = np.median([run.measured for run in runs], axis=0)
    told = [run for run in runs if None not in run.foreseen]
    foreseen = [_off(run.foreseen, run.measured) for run in told] if len(told) == len(runs) else []
    others = [_off(usual, run.measured) for run in runs] if len(runs) > 1 else []
    return [
        _each(rate, "simulator", [_off(simulated, usual)]),
        _each(rate, "coordinator", foreseen),
        *([_each(rate, "equal runs", others, None)] if others else []),
    ]


def _each(rate: float, who: str, runs: Sequence[Numbers], bound: float | None = BOUND) -> Each:
    """The medians over the runs."""
    if not runs:
        return Each(rate, who, None, None)
    middle, most = (float(np.median([np.percentile(off, part) for off in runs])) for part in (50, 90))
    return Each(rate, who, middle, most, bound)


def _off(predicted: Sequence[float | None] | Numbers, measured: Sequence[float] | Numbers) -> Numbers:
    return np.abs(np.asarray(predicted, dtype=np.float64) / np.asarray(measured) - 1)


def table(each: Sequence[Each]) -> Table:
    caption = f"TTFT, request by request: how far off; p90 is to be at most {BOUND:.0%}"
    shown = Table(caption=caption, box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("requests/s", "predicted by", "median", "p90", "holds"):
        shown.add_column(name, justify="right")
    for one in each:
        errors = ("nothing for some" if off is None else f"{off:.1%}" for off in (one.median, one.p90))
        judged = "" if one.bound is None else "yes" if one.holds else "no"
        shown.add_row(f"{one.rate:g}", one.who, *errors, judged)
    return shown
