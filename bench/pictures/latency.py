"""Latencies: their distribution at each rate, the median over the rate, and what of it is waiting."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from cbdisagg_bench.batching_latency import Latencies, Tail
from cbdisagg_bench.batching_scales import Scale
from cbdisagg_bench.batching_systems import SYSTEMS as ALL
from cbdisagg_bench.batching_theory import published_median_s
from cbdisagg_bench.pictures.style import LINES, SETTINGS, SYSTEMS, figure, grid_lines, save

NEAR = 0.06
"""Points closer than this part of both axes share a label."""


def draw_cdfs(folder: Path, seen: Sequence[Latencies], scale: Scale) -> None:
    """One panel for each of the article's rates."""
    rates = sorted({one.rate.qps for one in seen if not one.rate.fraction})
    with mpl.rc_context(SETTINGS):
        made, axes = figure(max(9.0, 5.2 * len(rates)), 4.2, 1, len(rates), squeeze=False)
        for panel, qps in zip(axes[0], rates, strict=True):
            for one in [one for one in seen if one.rate.qps == qps and not one.rate.fraction]:
                values = np.sort(one.e2e)
                share = np.arange(1, len(values) + 1) / len(values)
                look = {"color": SYSTEMS[one.system], "ls": LINES.get(one.system, "-"), "lw": 1.3}
                panel.step(values, share, where="post", label=ALL[one.system].label, **look)
            published = published_median_s(scale, qps)
            if published is not None:
                panel.plot(published, 0.5, "*", color="black", ms=9, label="published median: vLLM, A100")
            panel.axhline(0.5, color="#888888", lw=0.8, ls=":")
            panel.set_xscale("log")
            panel.set_ylim(0, 1)
            panel.set_xlabel("end-to-end latency, s (log)")
            panel.set_title(f"QPS {qps:g}")
            grid_lines(panel, "both")
        axes[0][0].set_ylabel("part of the requests")
        handles, labels = axes[0][0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=3)
        made.suptitle(f"End-to-end latency of {len(seen[0].e2e)} requests, Poisson arrivals, scale {scale.name}")
        save(made, folder, "latency_cdf")


def draw_phases(folder: Path, seen: Sequence[Latencies], scale: str) -> None:
    """Mean latency of each system at each rate, split: waiting, prefill, decode. The median as a point."""
    systems = list(dict.fromkeys(one.system for one in seen))
    with mpl.rc_context(SETTINGS):
        columns = min(5, len(systems))
        rows = -(-len(systems) // columns)
        made, axes = figure(2.6 * max(3, columns), 1.2 + 2.5 * rows, rows, columns, squeeze=False)
        for panel in axes.flat[len(systems) :]:
            panel.set_visible(False)
        for panel, name in zip(axes.flat, systems, strict=False):
            mine = [one for one in seen if one.system == name]
            places = np.arange(len(mine))
            bottom = np.zeros(len(mine))
            for phase, color in (("queue", "#bdbdbd"), ("prefill", "#ffd54f"), ("decode", "#4f8ef7")):
                heights = np.array([getattr(one, phase) for one in mine])
                panel.bar(places, heights, 0.7, bottom=bottom, color=color, label=phase)
                bottom += heights
            panel.plot(places, [one.median for one in mine], "D", color="black", ms=3.5, label="median, end to end")
            panel.set_xticks(places, [one.rate.label for one in mine], fontsize=7)
            panel.set_title(name)
            panel.set_ylim(bottom=0)
            grid_lines(panel)
        for row in axes:
            row[0].set_ylabel("mean latency, s")
        handles, labels = axes[0][0].get_legend_handles_labels()
        made.legend(handles, labels, loc="outside lower center", ncols=4)
        made.suptitle(
            f"Where latency comes from, {len(seen[0].e2e)} requests, scale {scale}\n"
            "arrivals per second: the article's, and parts of each system's own capacity"
        )
        save(made, folder, "latency_phases")


def draw_tails(folder: Path, points: Sequence[Tail], load: float, scale: str) -> None:
    """First tokens against gaps, by chunk size: two colocated replicas, and the same hardware disaggregated."""
    with mpl.rc_context(SETTINGS):
        made, axes = figure(6.2, 4.4)
        values = np.log([(point.gap_p99, point.ttft_p99) for point in points])
        spans = np.maximum(np.ptp(values, axis=0), 1e-9)
        for name in dict.fromkeys(point.system for point in points):
            mine = [point for point in points if point.system == name]
            pairs = [(point.gap_p99 * 1e3, point.ttft_p99 * 1e3) for point in mine]
            axes.plot(*zip(*pairs, strict=True), "o-", ms=4, lw=1, color=SYSTEMS[name], label=ALL[name].label)
            for (x, y), names in _together(mine, pairs, spans):
                offset, side = ((0, 7), "center") if name == "S4r" else ((7, -3), "left")
                text = ", ".join(names)
                axes.annotate(text, (x, y), textcoords="offset points", xytext=offset, ha=side, fontsize=7)
        axes.set_xlabel("p99 of the gap between tokens, ms (log)")
        axes.set_ylabel("p99 of the time to the first token, ms (log)")
        axes.set_xscale("log")
        axes.set_yscale("log")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(mpl.ticker.FormatStrFormatter("%g"))
            axis.set_minor_formatter(mpl.ticker.FormatStrFormatter("%g"))
        axes.tick_params(which="minor", labelsize=7)
        grid_lines(axes, "both")
        axes.legend(title="token budget of a step beside each point", title_fontsize=8)
        axes.set_title(
            f"Chunk size and disaggregation at {load:.0%} of the replicas' capacity,\nvirtual clock, scale {scale}"
        )
        save(made, folder, "tails")


def _together(
    points: Sequence[Tail], places: Sequence[tuple[float, float]], spans: Sequence[float]
) -> list[tuple[tuple[float, float], list[str]]]:
    """Labels of points, those that lie upon each other joined. `spans`: of both axes, as logarithms."""
    joined: list[tuple[tuple[float, float], list[str]]] = []
    for point, place in zip(points, places, strict=True):
        text = str(point.chunk or "whole")
        for known, names in joined:
            apart = np.abs(np.log(place) - np.log(known))
            if all(apart < NEAR * np.array(spans)):
                names.append(text)
                break
        else:
            joined.append((place, [text]))
    return joined
