"""Pictures of one worker's trace: its slots, and what its KV memory was used for."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from cbdisagg_bench.pictures.grids import iteration_grid, slots_of
from cbdisagg_bench.pictures.memory import stack
from cbdisagg_bench.pictures.slots import Panel, draw_slots
from cbdisagg_bench.pictures.style import SETTINGS, figure, save
from cbdisagg_bench.trace import Trace


def draw_live(folder: Path, trace: Trace, first: int, steps: int) -> None:
    """`steps` steps from `first` on as slots; the whole trace as memory. slots.png and memory.png, and as SVG."""
    chosen = trace.steps[first : first + steps]
    panels = [Panel(f"steps {first} to {first + len(chosen) - 1}", "step", iteration_grid(chosen, slots_of(chosen)))]
    draw_slots(folder, "slots", "Slots of a worker", panels)
    with mpl.rc_context(SETTINGS):
        made, axes = figure(8, 3.6)
        stack(axes, trace)
        axes.set_xlabel("time since the first step, s")
        axes.set_ylabel("part of the KV memory")
        axes.set_title("KV memory of a worker")
        made.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=2)
        save(made, folder, "memory")
