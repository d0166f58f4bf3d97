"""What each step of a live worker did, read off its journal: `cbdisagg bench trace`.

Start a service with `--set debug.journal=FOLDER`; each worker leaves a journal there. Replaying it gives the step
trace, from which slots and memory are drawn as for a benchmark, and which Chrome and Perfetto show.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from cbdisagg_bench.batching_memory import filled_of_held, shares
from cbdisagg_bench.options import at_least, check_place, make_folder
from cbdisagg_bench.pictures.grids import iteration_grid, slots_of
from cbdisagg_bench.pictures.terminal import legend, slots_text
from cbdisagg_bench.trace import Trace, chrome_events, mean_batch, trace_journal
from rich.console import Console

from cbdisagg.actors.journal import JournalError
from cbdisagg.cli import fail

COLUMNS = 36
"""Steps shown in a terminal of 80 columns."""


def trace(
    journal: Annotated[Path, typer.Argument(help="First part of a worker's journal ([debug] journal).")],
    first: Annotated[int, typer.Option(callback=at_least(0), help="The first step that is shown and drawn.")] = 0,
    steps: Annotated[int, typer.Option(callback=at_least(1), help="Steps that are drawn.")] = 40,
    chrome: Annotated[Path | None, typer.Option(help="Write all steps for Chrome or Perfetto to this file.")] = None,
    pictures: Annotated[Path | None, typer.Option(help="Draw slots and memory into this folder.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print figures as JSON instead of text.")] = False,
) -> None:
    """Show what each step of a worker did, from its journal.

    Example: cbdisagg bench trace journal/any-0.1700000000000000000.0000.journal --chrome trace.json
    """
    if pictures is not None and find_spec("matplotlib") is None:
        fail("--pictures needs matplotlib, which is not there: pip install 'cbdisagg[bench]'")
    check_place(chrome, "--chrome")
    make_folder(pictures, "--pictures")
    try:
        found = trace_journal(journal)
    except JournalError as error:
        fail(str(error))
    if not found.steps[first:]:
        fail(f"{journal} has {len(found.steps)} steps; --first {first} is none of them")
    if as_json:
        print(json.dumps(figures(found), indent=1))
    else:
        _show(found, first)
    if chrome is not None:
        chrome.write_text(json.dumps(chrome_events(found, journal.name)), encoding="utf-8")
    if pictures is not None:
        from cbdisagg_bench.pictures.live import draw_live  # matplotlib: only where pictures are wanted

        draw_live(pictures, found, first, steps)


def figures(found: Trace) -> dict[str, float]:
    """Of the whole trace; tokens by what they were for, parts of the KV memory averaged over time."""
    used = shares(found)
    return {
        "steps": len(found.steps),
        "seconds_in_steps": sum(step.seconds for step in found.steps),
        "prefill_tokens": sum(step.prefill for step in found.steps),
        "decode_tokens": sum(step.decode for step in found.steps),
        "wasted_tokens": sum(step.wasted for step in found.steps),
        "mean_batch": mean_batch(found.steps),
        "filled_of_held": filled_of_held(found),
        **{f"kv_{part}": getattr(used, part) for part in used.__slots__},
    }


def _show(found: Trace, first: int) -> None:
    console = Console()
    shown = found.steps[first : first + COLUMNS]
    grid = iteration_grid(shown, slots_of(shown))
    console.print(slots_text(f"steps {first} to {first + len(shown) - 1}", grid))
    console.print(legend())
    for name, value in figures(found).items():
        console.print(f"{name:>18} {value:,.3f}" if isinstance(value, float) else f"{name:>18} {value:,}")
