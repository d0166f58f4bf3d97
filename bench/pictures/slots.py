"""Slot pictures, as the article draws them: static on the left, continuous on the right, what is wasted in white."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib as mpl
from cbdisagg_bench.pictures.grids import Grid
from cbdisagg_bench.pictures.style import PHASES, SETTINGS, figure, save
from matplotlib.patches import Patch, Rectangle

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LEGEND = {"prefill": "prefill", "decode": "decode", "end": "last token", "wasted": "wasted"}
NAMED = 16
"""Up to so many columns the cells carry the names of their sequences."""


@dataclass(frozen=True, slots=True)
class Panel:
    """`column`: what a column of the grid is. `below`: said in the place of the rows that another panel has more."""

    title: str
    column: str
    grid: Grid
    below: str = ""


def draw_slots(folder: Path, name: str, title: str, panels: Sequence[Panel]) -> None:
    """Side by side, on one scale of rows and columns; how many cells somebody wanted is in the title of each."""
    with mpl.rc_context(SETTINGS):
        rows = max(len(panel.grid.rows) for panel in panels)
        height = 0.42 if rows <= 4 else 0.26
        made, axes = figure(5.2 * len(panels), 1.6 + height * rows, 1, len(panels), squeeze=False)
        width = max(len(panel.grid.rows[0]) for panel in panels)
        for one, panel in zip(axes[0], panels, strict=True):
            grid = panel.grid
            _draw(one, grid, width, rows)
            used = grid.cells - grid.wasted
            one.set_title(f"{panel.title}: {used} of {grid.cells} cells used ({grid.used:.0%})")
            one.set_xlabel(panel.column)
            if panel.below and len(grid.rows) < rows:
                middle = (len(grid.rows) + rows) / 2
                one.text(width / 2, middle, panel.below, ha="center", va="center", color="#666666")
        axes[0][0].set_ylabel("slot")
        handles = [Patch(facecolor=PHASES[mark], edgecolor="#888888", label=text) for mark, text in LEGEND.items()]
        made.legend(handles=handles, loc="outside lower center", ncols=len(LEGEND))
        made.suptitle(title)
        save(made, folder, name)


def _draw(axes: Axes, grid: Grid, width: int, rows: int) -> None:
    named = width <= NAMED
    line = 0.8 if named else 0.3
    for y, row in enumerate(grid.rows):
        for x, square in enumerate(row):
            axes.add_patch(Rectangle((x, y), 1, 1, facecolor=PHASES[square.mark], edgecolor="#999999", linewidth=line))
            if named and square.request >= 0:
                axes.text(x + 0.5, y + 0.5, f"S{square.request + 1}", ha="center", va="center", fontsize=7)
    axes.set_xlim(0, width)
    axes.set_ylim(rows, 0)
    every = max(1, width // 8)
    axes.set_xticks([x + 0.5 for x in range(0, width, every)], [f"{x + 1}" for x in range(0, width, every)])
    axes.set_yticks([y + 0.5 for y in range(len(grid.rows))], [f"{y + 1}" for y in range(len(grid.rows))])
    axes.tick_params(length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)
