"""The heat map of the goodput grid: by how much the policy beats the better baseline; tuned and refusing nobody, tuned
where it may refuse, and as it comes.

Knows matplotlib and cells; computes nothing that the table does not say.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import matplotlib
import numpy as np
from cbdisagg_bench.goodput_grid import Cell
from cbdisagg_bench.goodput_wall_cells import WallCell

matplotlib.use("Agg")  # no display is needed
from matplotlib import pyplot
from matplotlib.patches import Rectangle

PANELS: Mapping[str, Callable[[Cell], float]] = {
    "tuned, nobody refused": lambda cell: cell.ratio,
    "tuned, it may refuse": lambda cell: cell.tuned_ratio,
    "as it comes": lambda cell: cell.default_ratio,
}


def draw_wall(found: Sequence[WallCell], path: Path) -> None:
    """Rows: workloads; columns: targets and parts: goodput over that of the best other system. A frame: a miss."""
    rows = list(dict.fromkeys(f"{cell.prompts}+{cell.outputs}" for cell in found))
    columns = list(dict.fromkeys(_column(cell) for cell in found))
    size = (3 + 1.2 * len(columns), 1.6 + 0.7 * len(rows))
    figure, axes = pyplot.subplots(figsize=size, constrained_layout=True)
    values = np.full((len(rows), len(columns)), np.nan)
    for cell in found:
        y, x = rows.index(f"{cell.prompts}+{cell.outputs}"), columns.index(_column(cell))
        values[y, x] = cell.ratio
        axes.text(x, y, f"{cell.ratio:.2f}\n{cell.best}", ha="center", va="center", fontsize=9)
        if cell.misses:
            axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, linewidth=2))
    picture = axes.imshow(values, cmap="RdYlGn", vmin=0.7, vmax=1.3, aspect="auto")
    axes.set_xticks(range(len(columns)), columns, fontsize=8)
    axes.set_yticks(range(len(rows)), rows, fontsize=8)
    axes.set_title("policy: goodput over the best other system's", fontsize=10)
    figure.colorbar(picture, ax=axes)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _column(cell: WallCell) -> str:
    return f"{cell.ttft_ms:g}/{cell.tpot_ms:g} ms\n{cell.part:.0%}"


def draw(found: Sequence[Cell], path: Path) -> None:
    """Rows: workloads (of each profile); columns: targets and parts. A frame: the baselines are balanced there."""
    rows = list(dict.fromkeys((cell.profile, cell.workload) for cell in found))
    columns = list(dict.fromkeys((cell.targets, cell.part) for cell in found))
    size = (4 + 1.2 * len(PANELS) * len(columns), 1.6 + 0.7 * len(rows))
    figure, panels = pyplot.subplots(1, len(PANELS), figsize=size, constrained_layout=True, squeeze=False)
    for axes, name in zip(panels[0], PANELS, strict=True):
        values = np.full((len(rows), len(columns)), np.nan)
        for cell in found:
            y, x = rows.index((cell.profile, cell.workload)), columns.index((cell.targets, cell.part))
            values[y, x] = PANELS[name](cell)
            axes.text(x, y, f"{values[y, x]:.2f}", ha="center", va="center", fontsize=9)
            if cell.balanced:
                axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, linewidth=2))
        picture = axes.imshow(values, cmap="RdYlGn", vmin=0.7, vmax=1.3, aspect="auto")
        axes.set_xticks(range(len(columns)), [f"{targets}\n{part:.0%}" for targets, part in columns], fontsize=8)
        labels = [workload.removesuffix("-like") for _, workload in rows]
        axes.set_yticks(range(len(rows)), labels if axes is panels[0][0] else [""] * len(rows), fontsize=8)
        axes.set_title(f"policy, {name}: goodput over the better baseline", fontsize=10)
    figure.colorbar(picture, ax=panels[0].tolist())
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
