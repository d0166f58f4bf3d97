"""The slot pictures as grids of cells, before anything is drawn: who had which slot when, and what was wasted.

Two views of one step trace. By iteration: a column is a step, a slot either worked for somebody in it or did not. By
token, as the article draws it: a row holds the tokens of the sequences that had this slot, one after the other, prompt
tokens first, so that a row that ends early is room that nobody used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cbdisagg_bench.trace import Cell, Step

Mark: TypeAlias = Literal["prefill", "decode", "end", "wasted"]
LETTERS: dict[Mark, str] = {"prefill": "p", "decode": "d", "end": "E", "wasted": "."}


@dataclass(frozen=True, slots=True)
class Square:
    """One cell of a picture; `request` is the number of the sequence, -1 where there is none."""

    mark: Mark
    request: int = -1


@dataclass(frozen=True, slots=True)
class Grid:
    """Rows of equal length."""

    rows: list[list[Square]]

    @property
    def cells(self) -> int:
        return sum(map(len, self.rows))

    @property
    def wasted(self) -> int:
        return sum(square.mark == "wasted" for row in self.rows for square in row)

    @property
    def used(self) -> float:
        """The part of all cells that somebody wanted."""
        return 1 - self.wasted / self.cells if self.cells else 0.0

    def text(self) -> str:
        """A letter for each cell: p prefill, d decode, E the last token of a sequence, a point for nothing."""
        return "\n".join("".join(LETTERS[square.mark] for square in row) for row in self.rows)


def slots_of(steps: Sequence[Step]) -> int:
    """Rows that a picture of these steps needs."""
    return max(cell.slot for step in steps for cell in step.cells) + 1


def iteration_grid(steps: Sequence[Step], slots: int) -> Grid:
    """A column for each step. A prompt's step is yellow, though it gives a token too."""
    rows = [[Square("wasted")] * len(steps) for _ in range(slots)]
    for column, step in enumerate(steps):
        for cell in step.cells:
            if cell.slot < slots and cell.phase != "wasted":
                rows[cell.slot][column] = Square(cell.phase, cell.request.n)
    return Grid(rows)


def token_grid(steps: Sequence[Step], slots: int, columns: int = 0) -> Grid:
    """A column for each token of a slot, at most `columns` (0: as many as the longest row has)."""
    rows: list[list[Square]] = [[] for _ in range(slots)]
    for step in steps:
        for cell in step.cells:
            if cell.slot < slots and cell.phase != "wasted":
                rows[cell.slot] += _tokens(cell)
    width = columns or max(map(len, rows), default=0)
    return Grid([(row + [Square("wasted")] * width)[:width] for row in rows])


def _tokens(cell: Cell) -> list[Square]:
    """The prompt tokens that it computed, and the token that was drawn."""
    prompt = cell.tokens if cell.phase == "prefill" else 0
    drawn: Mark = "end" if cell.last else "decode"
    return [Square("prefill", cell.request.n)] * prompt + [Square(drawn, cell.request.n)] * cell.drawn
