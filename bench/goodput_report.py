"""The goodput grid as a table of text and as plain values: one line for each cell, and which figures are missed."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from cbdisagg_bench.goodput_grid import DEADLINES, FLOOR, LEAST, LEFT, MEDIAN, Cell, verdict
from rich import box
from rich.table import Table

SHORT = {
    "policy.rho": "rho",
    "policy.eta": "eta",
    "policy.gamma": "gamma",
    "policy.catch_up": "catch up",
    "scheduler.token_budget": "budget",
}


def summary(cell: Cell) -> dict[str, object]:
    """For JSON: what was measured, and what follows from it."""
    told: dict[str, object] = msgspec.to_builtins(cell)
    follows = {"ratio": cell.ratio, "default_ratio": cell.default_ratio, "over_deadlines": cell.over_deadlines}
    follows |= {"tuned_ratio": cell.tuned_ratio}
    return told | follows | {"balanced": cell.balanced, "miss": cell.misses}


def knobs(cell: Cell) -> str:
    """Those that the tuner has turned: "2P:1D rho 0.8"; pins first."""
    values = dict(cell.knobs)
    mode = values.pop("policy.mode", "auto")
    pins = [int(str(values.pop(f"policy.pin_{phase}", 0))) for phase in ("prefill", "decode")]
    words = [str(mode)] if mode != "auto" else []
    words += [f"{pins[0]}P:{pins[1]}D"] if any(pins) else []
    words += [f"{SHORT.get(key, key.split('.')[1])} {value}" for key, value in values.items()]
    return " ".join(words) or "as it comes"


def table(found: Sequence[Cell]) -> Table:
    """Requests per second and worker; B: the baselines are within a tenth of each other."""
    told = verdict(found)
    balanced = f"median {told.median:.2f} (to reach: {MEDIAN}), lowest {told.balanced_lowest:.2f} ({LEAST})"
    caption = " ".join(
        (
            "requests/s and worker. ms: TTFT/TPOT; chunks: aggregation with the best of the fixed sizes, deadl.: with",
            "deadline chunks; split: the best one, with the best of the sizes; queued: the policy, tuned, and nobody",
            "refused; q: that over the better of chunks and split, q/d: over deadl., its own end of the range; t: as",
            "q, where it may refuse what would be late.",
            f"{told.cells} cells, q: lowest {told.lowest:.2f} (to reach: {FLOOR});",
            f"{told.balanced} balanced (B): {balanced if told.balanced else 'none'}; {told.missed} miss a figure (!).",
            f"t: median {told.tuned:.2f}{f', of balanced ones {told.tuned_median:.2f}' if told.balanced else ''};",
            f"q/d: median {told.over_deadlines:.2f}.",
            f"2x: left of its best goodput at twice its load, tuned: at least {told.overloaded:.0%} (to reach:",
            f"{LEFT:.0%}); 2xq: the policy as it comes, which refuses nobody: at least {told.queue_left:.0%}",
        )
    )
    shown = Table(caption=caption, box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    names = ("workload", "ms", "part", "chunks", "split", "deadl.", "queued", "q", "q/d", "t", "2x", "2xq", "")
    for name in names:
        shown.add_column(name, justify="left" if name == "workload" else "right", no_wrap=True)
    for cell in found:
        rates = (cell.aggregated, cell.disaggregated, cell.aggregation[DEADLINES], cell.queued)
        shown.add_row(
            *_name(cell),
            *(f"{rate:.1f}" for rate in rates),
            *(f"{ratio:.2f}" for ratio in (cell.ratio, cell.over_deadlines, cell.tuned_ratio)),
            *(f"{left:.0%}" for left in (cell.overloaded, cell.queue_left)),
            ("B" if cell.balanced else "") + ("!" if cell.misses else ""),
        )
    return shown


def turned(found: Sequence[Cell]) -> list[str]:
    """What the tuner has found for each cell, and the rates with and without it, a line each."""
    return [
        f"{' '.join(_name(cell))}: {knobs(cell)}: {cell.tuned:.1f}/s; as it comes: {cell.default:.1f}/s"
        for cell in found
    ]


def _name(cell: Cell) -> tuple[str, str, str]:
    """Workload, targets in milliseconds, part of the requests."""
    return cell.workload.removesuffix("-like"), f"{cell.ttft_ms:.0f}/{cell.tpot_ms:.0f}", f"{cell.part:.0%}"
