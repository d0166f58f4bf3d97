"""How many sequences ran at once, over time; and how far each step is from what the machine could do (roofline)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_systems import SYSTEMS as ALL
from cbdisagg_bench.pictures.style import LINES, SETTINGS, SYSTEMS, figure, grid_lines, save
from cbdisagg_bench.trace import Step

from cbdisagg.core.cost import CostModel

BINS = 60


def draw_batch(folder: Path, results: Results, cap: int) -> None:
    """Living sequences in a step, averaged over spans of time that are equal on the axis; the mean in the legend."""
    with mpl.rc_context(SETTINGS):
        made, axes = figure(8, 4)
        for name in results.systems:
            run = results.runs[cap, name].burst
            at, batch = _averaged(run.trace.steps)
            label = f"{ALL[name].label}: mean {run.mean_batch:.1f}"
            axes.step(at, batch, LINES.get(name, "-"), where="mid", color=SYSTEMS[name], lw=1.2, label=label)
        axes.set_xscale("log")
        axes.set_xlabel("time, s (log)")
        axes.set_ylabel("sequences that are wanted, in a step")
        axes.set_ylim(bottom=0)
        grid_lines(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(f"Batch size over time, cap {cap}, {results.clock} clock, scale {results.scale.name}")
        save(made, folder, "batch")


def _averaged(steps: list[Step]) -> tuple[list[float], list[float]]:
    """The middle of each span that has a step's end in it, and the mean batch of those steps."""
    ends = np.array([step.at_s + step.seconds for step in steps])
    edges = np.geomspace(ends[0], ends[-1], BINS + 1)
    spans = np.clip(np.searchsorted(edges, ends, "right") - 1, 0, BINS - 1)
    seconds = np.array([step.seconds for step in steps])
    weighted = np.array([step.batch for step in steps]) * seconds
    used = [n for n in range(BINS) if (spans == n).any()]
    at = [float(np.sqrt(edges[n] * edges[n + 1])) for n in used]
    return at, [float(weighted[spans == n].sum() / seconds[spans == n].sum()) for n in used]


def draw_roofline(folder: Path, results: Results, cap: int) -> None:
    """Tokens per second over tokens in a step. The roof is the cost model's for tokens without context."""
    with mpl.rc_context(SETTINGS):
        made, axes = figure(7, 4.4)
        most = max(step.tokens for name in results.systems for step in results.runs[cap, name].burst.trace.steps)
        sizes = np.unique(np.geomspace(1, most, 200).astype(int))
        axes.plot(sizes, [_roof(results.cost, int(n)) for n in sizes], color="black", lw=1.2, label="roof: no context")
        for name in results.systems:
            steps = results.runs[cap, name].burst.trace.steps
            chosen = steps[:: max(1, len(steps) // 300)]
            points = [(step.tokens, step.tokens / step.seconds) for step in chosen]
            axes.plot(*zip(*points, strict=True), ".", ms=3, alpha=0.6, color=SYSTEMS[name], label=ALL[name].label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.set_xlabel("tokens in a step, padding included (log)")
        axes.set_ylabel("tokens per second (log)")
        grid_lines(axes, "both")
        axes.legend(markerscale=3, loc="lower right")
        kind = "measured" if results.clock == "wall" else "priced"
        axes.set_title(f"Roofline with {kind} steps, cap {cap}, scale {results.scale.name}")
        save(made, folder, "roofline")


def _roof(cost: CostModel, tokens: int) -> float:
    return tokens / (cost.h + cost.linear_s(tokens))
