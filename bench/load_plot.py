"""Pictures of a load: first and later tokens, requests in flight and tokens per second, for each server.

Knows matplotlib and answers; computes nothing that load_report.py does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from cbdisagg_bench.load_client import Answer
from cbdisagg_bench.load_report import Aims, tpot, ttft

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot  # after the choice of a backend
from matplotlib.axes import Axes

BINS = 60


def draw(runs: Mapping[str, Sequence[Answer]], aims: Aims, path: Path) -> None:
    """`runs`: the answers of one run of each server. The kind of file follows from the path's suffix."""
    figure, (first, later, load, rate) = pyplot.subplots(1, 4, figsize=(18, 4), constrained_layout=True)
    for name, answers in runs.items():
        done = [answer for answer in answers if not answer.error]
        _curve(first, name, [1e3 * ttft(answer) for answer in done])
        _curve(later, name, [1e3 * tpot(answer) for answer in done if answer.tokens > 1])
        _over_time(load, rate, name, done)
    _finish(first, "time to first token, ms", "part of the requests", aims.ttft_ms)
    _finish(later, "time per output token, ms", "part of the requests", aims.tpot_ms)
    _finish(load, "time, s", "requests in flight")
    _finish(rate, "time, s", "generated tokens per second")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(axes: Axes, name: str, values: Sequence[float]) -> None:
    axes.plot(np.sort(values), np.arange(1, len(values) + 1) / max(1, len(values)), label=name)


def _over_time(load: Axes, rate: Axes, name: str, answers: Sequence[Answer]) -> None:
    if not answers:
        return
    edges = np.linspace(0.0, max(answer.times[-1] for answer in answers), BINS + 1)
    sent = np.searchsorted(np.sort([answer.sent for answer in answers]), edges, side="right")
    ended = np.searchsorted(np.sort([answer.times[-1] for answer in answers]), edges)
    load.plot(edges, sent - ended, label=name)
    tokens, _ = np.histogram(np.concatenate([answer.times for answer in answers]), edges)
    rate.plot(edges[:-1], tokens / np.diff(edges), label=name)


def _finish(axes: Axes, x: str, y: str, target: float = 0.0) -> None:
    if target:
        axes.axvline(target, color="tab:red", linestyle="--", label="target")
    axes.set(xlabel=x, ylabel=y)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
