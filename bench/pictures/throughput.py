"""Throughput over the cap of the answers' lengths, with marks where theory and the published benchmark stand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_systems import SYSTEMS as ALL
from cbdisagg_bench.batching_theory import EXPECTED, PUBLISHED_STATIC, PUBLISHED_VLLM
from cbdisagg_bench.pictures.style import LINES, SETTINGS, SYSTEMS, figure, grid_lines, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw_throughput(folder: Path, results: Results) -> None:
    """Left tokens per second, right the speed-up over S1."""
    caps = results.caps
    places = range(len(caps))
    with mpl.rc_context(SETTINGS):
        made, (left, right) = figure(11, 4.4, 1, 2)
        for name in results.systems:
            rates = [results.runs[cap, name].burst.tokens_per_s for cap in caps]
            look = {"marker": "o", "ms": 4, "lw": 1.4, "color": SYSTEMS[name], "ls": LINES.get(name, "-")}
            left.plot(places, rates, label=ALL[name].label, **look)
            gains = [results.speedup(cap, name) for cap in caps]
            if None not in gains:
                right.plot(places, gains, label=name, **look)
        _published(left, results, caps)
        _expected(right, results, caps)
        left.set_ylabel("prompt + output tokens per second (log)")
        right.set_ylabel("speed-up over S1 (log)")
        for axes in (left, right):
            axes.set_yscale("log")
            axes.set_xticks(places, [str(cap) for cap in caps])
            axes.set_xlabel("largest output length (cap), tokens")
            grid_lines(axes)
        right.axhline(1, color="#888888", lw=0.8)
        for axes, ticks in (
            (left, [100, 200, 300, 500, 700, 1000, 1500, 2000, 3000, 5000, 7000, 10_000, 20_000]),
            (right, [0.25, 0.5, 0.75, 1, 1.5, 2, 3, 4, 6, 8]),
        ):
            axes.yaxis.set_major_locator(mpl.ticker.FixedLocator(ticks))
            axes.yaxis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
            axes.yaxis.set_minor_locator(mpl.ticker.NullLocator())
        handles, labels = left.get_legend_handles_labels()
        more, others = right.get_legend_handles_labels()
        marks = [(h, label) for h, label in zip(more, others, strict=True) if label not in ALL]
        made.legend(
            handles + [h for h, _ in marks], labels + [label for _, label in marks], loc="outside lower center", ncols=3
        )
        count = len(results.requests[caps[0]])
        made.suptitle(f"Throughput of a burst of {count} requests, {results.clock} clock, scale {results.scale.name}")
        save(made, folder, "throughput")


def _published(axes: Axes, results: Results, caps: list[int]) -> None:
    """Of the article's machine and sizes, so only where ours are the same."""
    if results.scale.name != "a100":
        return
    for figures, marker, label in (
        (PUBLISHED_VLLM, "*", "published: vLLM, A100"),
        (PUBLISHED_STATIC, "X", "published: static, A100"),
    ):
        known = [(n, figures[cap]) for n, cap in enumerate(caps) if cap in figures]
        if known:
            axes.plot(*zip(*known, strict=True), marker, color="black", ms=8, label=label)


def _expected(axes: Axes, results: Results, caps: list[int]) -> None:
    label: str | None = "derived beforehand"
    for n, cap in enumerate(caps):
        for name, gain in EXPECTED.get(results.scale.name, {}).get(cap, {}).items():
            if name in results.systems:
                axes.plot(n, gain, "_", color=SYSTEMS[name], ms=16, mew=2.2, label=label)
                label = None
