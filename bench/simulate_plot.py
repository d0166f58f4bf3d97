"""Pictures of a simulated run: how long first and later tokens took, against their targets, and who was busy.

Knows matplotlib and an Outcome; computes nothing that report.py does not.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot
from matplotlib.axes import Axes

from cbdisagg.sim.simulation import Outcome  # after the choice of a backend


def draw(outcome: Outcome, path: Path) -> None:
    """Four panels in one file: TTFT and TPOT as cumulative curves, requests in the system over time, use of workers."""
    figure, (ttft, tpot, load, use) = pyplot.subplots(1, 4, figsize=(18, 4), constrained_layout=True)
    done = [record for record in outcome.records if record.status == "done"]
    _curve(ttft, [1e3 * record.ttft_s for record in done], "time to first token, ms")
    _curve(tpot, [1e3 * record.tpot_s for record in done if record.tokens > 1], "time per output token, ms")
    if done:
        ttft.axvline(1e3 * done[0].targets.ttft_s, color="tab:red", linestyle="--", label="target")
        tpot.axvline(1e3 * done[0].targets.tpot_s, color="tab:red", linestyle="--", label="target")
    ttft.legend(loc="lower right")
    _in_system(load, outcome)
    _use(use, outcome)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _curve(axes: Axes, values: list[float], label: str) -> None:
    axes.plot(np.sort(values), np.arange(1, len(values) + 1) / max(1, len(values)), label="requests")
    axes.set(xlabel=label, ylabel="part of the requests", ylim=(0, 1.02))
    if values and max(values) > 20 * min(values) > 0:
        axes.set_xscale("log")
    axes.grid(alpha=0.3)


def _in_system(axes: Axes, outcome: Outcome) -> None:
    """Asked, and not ended; those of them that have no token yet."""
    times = np.linspace(0, outcome.seconds, 400)
    arrived = np.searchsorted(np.sort([record.arrival for record in outcome.records]), times)
    began = np.searchsorted(np.sort([record.first for record in outcome.records if record.first >= 0]), times)
    ended = np.searchsorted(np.sort([record.last for record in outcome.records if record.first >= 0]), times)
    axes.plot(times, arrived - ended, label="asked, not ended")
    axes.plot(times, arrived - began, label="without a token yet")
    axes.set(xlabel="time, s", ylabel="requests")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def _use(axes: Axes, outcome: Outcome) -> None:
    names = sorted(outcome.meters)
    busy = [outcome.meters[name].busy_s / max(outcome.seconds, 1e-9) for name in names]
    axes.bar(range(len(names)), busy)
    axes.set(ylabel="part of the time at work", ylim=(0, 1))
    if len(names) <= 16:
        axes.set_xticks(range(len(names)), names, rotation=45, ha="right")
    else:
        axes.set_xlabel(f"{len(names)} workers, by name")
