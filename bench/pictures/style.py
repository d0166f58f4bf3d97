"""How all pictures look, and how they are written: PNG and SVG, the same bytes for the same figures.

The article's colours: yellow prefill, blue decode, red end, white wasted. matplotlib comes with the extra
`cbdisagg[bench]` and is imported by nobody before a picture is wanted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib.figure import Figure  # after the choice of a backend that needs no screen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PHASES = {"prefill": "#ffd54f", "decode": "#4f8ef7", "end": "#e53935", "wasted": "#ffffff"}
SYSTEMS = {
    "S0": "#9e9e9e",
    "S1": "#5d4037",
    "S2": "#fb8c00",
    "S2b": "#fdd835",
    "S2c": "#8e24aa",
    "S3": "#1e88e5",
    "S3c": "#00897b",
    "S4": "#d81b60",
    "S4r": "#7cb342",
}
LINES = {"S2b": "--", "S3c": ":", "S4r": "-."}
"""Of systems that often lie upon others."""
SETTINGS: dict[str, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.constrained_layout.use": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.hashsalt": "cbdisagg",
    "svg.fonttype": "path",
}


def figure(width: float, height: float, rows: int = 1, columns: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure of so many inches, with its axes. Call within `mpl.rc_context(SETTINGS)`."""
    made = Figure(figsize=(width, height), dpi=150)
    return made, made.subplots(rows, columns, **options)


def save(made: Figure, folder: Path, name: str) -> None:
    """`name`.png and `name`.svg, without a date."""
    folder.mkdir(parents=True, exist_ok=True)
    made.draw_without_rendering()  # the layout is found once, for both files
    made.set_layout_engine("none")
    made.savefig(folder / f"{name}.png", metadata={"Software": None})
    made.savefig(folder / f"{name}.svg", metadata={"Date": None})


def grid_lines(axes: Axes, axis: str = "y") -> None:
    axes.grid(axis=axis, color="#dddddd", linewidth=0.6)  # type: ignore[arg-type]
    axes.set_axisbelow(True)
