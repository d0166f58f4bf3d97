"""KV memory: what it was used for over time, for each allocator, and the useful part beside the published one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
import numpy as np
from cbdisagg_bench.batching_memory import shares
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_systems import SYSTEMS as ALL
from cbdisagg_bench.batching_theory import PUBLISHED_FILLED
from cbdisagg_bench.pictures.style import SETTINGS, SYSTEMS, figure, grid_lines, save
from cbdisagg_bench.trace import Step, Trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PARTS = (
    ("filled", "tokens", "#4f8ef7"),
    ("promised", "reserved, will be filled", "#a5d6a7"),
    ("internal", "reserved in vain (internal)", "#ffb74d"),
    ("external", "free while others wait (external, or kept to grow)", "#e0e0e0"),
)
SHOWN = ("S2", "S2b", "S2c", "S3")
POINTS = 400


def draw_memory(folder: Path, results: Results, cap: int) -> None:
    """Stacked over time for the allocators of continuous batching, one panel each; then the bars."""
    names = [name for name in SHOWN if (cap, name) in results.runs]
    with mpl.rc_context(SETTINGS):
        made, axes = figure(2.7 * (len(names) + 1.3), 3.9, 1, len(names) + 1, width_ratios=[1] * len(names) + [1.5])
        for panel, name in zip(axes, names, strict=False):
            stack(panel, results.runs[cap, name].burst.trace)
            panel.set_title(f"{name}: {ALL[name].allocator}")
            panel.set_xlabel("time, s")
        axes[0].set_ylabel("part of the KV memory")
        _bars(axes[-1], results, cap, names)
        handles, labels = axes[0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=4)
        made.suptitle(f"KV memory by allocator, cap {cap}, {results.clock} clock, scale {results.scale.name}")
        save(made, folder, "memory")


def stack(axes: Axes, trace: Trace) -> None:
    """The pool's parts over the seconds since the first step, one above the other."""
    steps = _thinned(trace.steps)
    pool = trace.pool_tokens
    begin, end = steps[0].at_s, steps[-1].at_s + steps[-1].seconds
    steps.append(steps[-1]._replace(at_s=end))  # each is drawn from its start to the next one's
    at = [step.at_s - begin for step in steps]
    filled = np.array([step.filled for step in steps]) / pool
    promised = np.array([step.promised for step in steps]) / pool
    held = np.array([step.held for step in steps]) / pool
    rest = np.array([1 - step.held / pool if step.waiting else 0.0 for step in steps])
    layers = (filled, promised, held - filled - promised, rest)
    labels, colors = [text for _, text, _ in PARTS], [color for *_, color in PARTS]
    axes.stackplot(at, *layers, labels=labels, colors=colors, lw=0, step="post")
    axes.set_xlim(0, at[-1])
    axes.set_ylim(0, 1)


def _bars(axes: Axes, results: Results, cap: int, names: Sequence[str]) -> None:
    """Useful KV while memory is what the requests wait for."""
    places = np.arange(len(names))
    ours = [shares(results.runs[cap, name].burst.trace).filled for name in names]
    published = [PUBLISHED_FILLED[ALL[name].allocator] for name in names]
    for offset, values, colors, label in (
        (-0.2, ours, [SYSTEMS[name] for name in names], "here"),
        (0.2, published, "#424242", "vLLM paper, other workload"),
    ):
        bars = axes.bar(places + offset, values, 0.38, color=colors, label=label)
        axes.bar_label(bars, [f"{value:.0%}" for value in values], fontsize=7)
    axes.set_xticks(places, names)
    axes.set_ylim(0, 1.1)
    axes.set_title("memory that holds tokens\n(black: vLLM paper, other workload)")
    grid_lines(axes)


def _thinned(steps: Sequence[Step]) -> list[Step]:
    """At most about POINTS of them."""
    return list(steps[:: max(1, len(steps) // POINTS)])
