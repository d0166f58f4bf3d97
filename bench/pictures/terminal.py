"""The pictures that a terminal can show: slots as coloured cells, throughput as bars, tables."""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_tables import Rows
from cbdisagg_bench.pictures.grids import LETTERS, Grid
from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

COLOURS = {"prefill": "black on yellow", "decode": "white on blue", "end": "white on red", "wasted": "black on white"}
BAR = 40


def slots_text(title: str, grid: Grid) -> Text:
    """Rows of cells, with letters for terminals without colours."""
    used = grid.cells - grid.wasted
    text = Text(f"{title}: {used} of {grid.cells} cells used ({grid.used:.0%})\n")
    for row in grid.rows:
        for square in row:
            text.append(LETTERS[square.mark] + " ", COLOURS[square.mark])
        text.append("\n")
    return text


def legend() -> Text:
    text = Text()
    for mark, colour in COLOURS.items():
        text.append(f" {LETTERS[mark]} ", colour)
        text.append(f" {mark}   ")
    return text


def bars(results: Results, cap: int) -> Text:
    """Tokens per second at one cap; bars from 0."""
    rates = {name: results.runs[cap, name].burst.tokens_per_s for name in results.systems}
    most = max(rates.values())
    text = Text(f"tokens per second at cap {cap}\n")
    for name, rate in rates.items():
        text.append(f"{name:>4} {'█' * max(1, round(BAR * rate / most))} {rate:,.0f}\n")
    return text


def table(rows: Rows) -> Group:
    made = Table(title=rows.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
    for n, column in enumerate(rows.columns):
        made.add_column(column, justify="left" if n == 0 else "right", overflow="fold")
    for row in rows.rows:
        made.add_row(*row)
    return Group(made, Text(rows.note, style="dim")) if rows.note else Group(made)


def side_by_side(texts: Sequence[Text]) -> Table:
    made = Table.grid(padding=(0, 4))
    made.add_row(*texts)
    return made
