"""How many sequences ran at once, over time; and how far each step is from what the machine could do (roofline)."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import numpy as np
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_systems import SYSTEMS as ALL
from cbdisagg_bench.pictures.style import LINES, SETTINGS, SYSTEMS, figure, grid_lines, save
from cbdisagg_bench.trace import Step

BINS = 100


def draw_batch(folder: Path, results: Results, cap: int) -> None:
    """Living sequences in a step, averaged over equal parts of each run's own time; the mean in the legend."""
    with mpl.rc_context(SETTINGS):
        made, axes = figure(9, 4)
        for name in results.systems:
            run = results.runs[cap, name].burst
            at, batch = _averaged(run.trace.steps)
            label = f"{ALL[name].label}: mean {run.mean_batch:.1f}, {_seconds(run.seconds)}"
            axes.step(at, batch, LINES.get(name, "-"), where="pre", color=SYSTEMS[name], lw=1.2, label=label)
        axes.set_xlabel("part of the run's own time")
        axes.xaxis.set_major_formatter(mpl.ticker.PercentFormatter(1.0))
        axes.set_ylabel("sequences in a step, without padding")
        axes.set_xlim(0, 1)
        axes.set_ylim(bottom=0)
        grid_lines(axes)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.set_title(f"Batch size over time, cap {cap}, {results.clock} clock, scale {results.scale.name}")
        save(made, folder, "batch")


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _averaged(steps: list[Step]) -> tuple[list[float], list[float]]:
    """The end of each of BINS spans in which a step ended, and the mean batch of those steps; the first one's at 0 too.

    They stand for the time since the span before: a step that is longer than a span was running in it.
    """
    begin, end = steps[0].at_s, steps[-1].at_s + steps[-1].seconds
    seconds = np.array([step.seconds for step in steps])
    ends = (np.array([step.at_s for step in steps]) + seconds - begin) / (end - begin)
    spans = np.clip((ends * BINS).astype(int), 0, BINS - 1)
    weighted = np.array([step.batch for step in steps]) * seconds
    used = [n for n in range(BINS) if (spans == n).any()]
    batch = [float(weighted[spans == n].sum() / seconds[spans == n].sum()) for n in used]
    return [0.0, *((n + 1) / BINS for n in used)], [batch[0], *batch]


def draw_roofline(folder: Path, results: Results, cap: int) -> None:
    """Tokens per second over tokens in a step, under the two roofs that the cost model has for a step without context.

    Few tokens: a step cannot be shorter than that of one, which reads all weights. Many: no more tokens per second than
    the arithmetic gives. Attention takes its part below; workers that share the cores have other roofs, lower ones.
    """
    cost = results.cost
    with mpl.rc_context(SETTINGS):
        made, axes = figure(7.6, 4.6)
        most = max(step.tokens for name in results.systems for step in results.runs[cap, name].burst.trace.steps)
        sizes = np.unique(np.geomspace(1, most, 200).astype(int))
        seconds = np.array([cost.h + cost.linear_s(int(n)) for n in sizes])
        flat, peak = sizes / seconds[0], max(sizes / seconds)
        label = f"roof: weights read once a step ({1e3 * seconds[0]:.1f} ms)"
        axes.plot(sizes, np.where(flat < 1.3 * peak, flat, np.nan), "--", color="#616161", lw=1, label=label)
        axes.axhline(peak, color="#616161", lw=1, ls=":", label=f"roof: arithmetic ({peak:,.0f} tokens/s)")
        axes.plot(sizes, sizes / seconds, color="black", lw=1.2, label="cost model, no context")
        for name in results.systems:
            steps = results.runs[cap, name].burst.trace.steps
            chosen = steps[:: max(1, len(steps) // 300)]
            points = [(step.tokens, step.tokens / step.seconds) for step in chosen]
            axes.plot(*zip(*points, strict=True), ".", ms=3, alpha=0.6, color=SYSTEMS[name], label=ALL[name].label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        plain = mpl.ticker.FuncFormatter(lambda value, _: f"{value:,.0f}")
        axes.xaxis.set_major_formatter(plain)
        axes.yaxis.set_major_formatter(plain)
        axes.yaxis.set_minor_formatter(mpl.ticker.NullFormatter())
        axes.set_xlabel("tokens in a step, padding included (log)")
        axes.set_ylabel("tokens per second (log)")
        grid_lines(axes, "both")
        axes.legend(markerscale=3, loc="center left", bbox_to_anchor=(1.0, 0.5))
        kind = "measured" if results.clock == "wall" else "priced"
        axes.set_title(f"Roofline with {kind} steps, cap {cap}, scale {results.scale.name}")
        save(made, folder, "roofline")
