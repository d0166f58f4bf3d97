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
    """The TTFT of each request of one run, in order of arrival, milliseconds: measured, and foreseen when it came."""

    measured: Sequence[float]
    foreseen: Sequence[float]


@dataclass(frozen=True, slots=True)
class Each:
    """At one rate, the errors of the predictions of `who`, as parts of what was measured: the median one, and p90."""

    rate: float
    who: str
    median: float
    p90: float

    @property
    def holds(self) -> bool:
        return self.p90 <= BOUND


def read_foreseen(log: Path, count: int) -> list[float]:
    """Milliseconds, by the number of the request, of the last `count` decisions in a log of the coordinator."""
    traced = FORESEEN.findall(log.read_text(errors="replace"))
    lines = sorted((int(number), 1e3 * float(seconds)) for number, seconds in traced)
    return [ms for _, ms in lines[-count:]]


def compare_each(rate: float, runs: Sequence[Firsts], simulated: Sequence[float]) -> list[Each]:
    """The simulator against the median of the runs, request by request; the coordinator against what came of it."""
    measured = np.median([run.measured for run in runs], axis=0)
    foreseen = [_off(run.foreseen, run.measured) for run in runs if len(run.foreseen) == len(run.measured)]
    errors = {"simulator": _off(simulated, measured), "coordinator": np.concatenate(foreseen) if foreseen else None}
    return [
        Each(rate, who, float(np.median(off)), float(np.percentile(off, 90)))
        for who, off in errors.items()
        if off is not None
    ]


def _off(predicted: Sequence[float], measured: Sequence[float] | Numbers) -> Numbers:
    return np.abs(np.asarray(predicted) / np.asarray(measured) - 1)


def table(each: Sequence[Each]) -> Table:
    caption = f"TTFT, request by request: how far off; p90 is to be at most {BOUND:.0%}"
    shown = Table(caption=caption, box=box.SIMPLE_HEAD, show_edge=False)
    for name in ("requests/s", "predicted by", "median", "p90", "holds"):
        shown.add_column(name, justify="right")
    for one in each:
        shown.add_row(f"{one.rate:g}", one.who, f"{one.median:.1%}", f"{one.p90:.1%}", "yes" if one.holds else "no")
    return shown
