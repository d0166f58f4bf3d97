"""How far a command is, on stderr: a bar on a terminal; elsewhere, as in a file, a line now and then."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic
from typing import Any

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID
from rich.text import Text

EVERY_S = 10.0


class _Lines(Progress):
    """Draws nothing. Says how far a task is when it gets further, if EVERY_S have passed since it was last said."""

    def __init__(self, *columns: str | ProgressColumn, console: Console, now: Callable[[], float]) -> None:
        super().__init__(*columns, console=console, disable=True, get_time=now)
        self._now, self._said = now, now()

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._say(task_id)

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._say(task_id)

    def _say(self, task_id: TaskID) -> None:
        if self._now() < self._said + EVERY_S:
            return
        self._said = self._now()
        task = self._tasks[task_id]
        cells = [column(task) for column in self.columns if isinstance(column, ProgressColumn)]
        words = [cell.plain.strip() for cell in cells if isinstance(cell, Text)]
        of = "" if task.total is None else f" of {task.total:.0f}"
        print(", ".join([*filter(None, words), f"{task.completed:.0f}{of}"]), file=self.console.file, flush=True)


def progress_bar(
    *columns: str | ProgressColumn, console: Console | None = None, now: Callable[[], float] = monotonic
) -> Progress:
    """A context that shows its tasks. `columns`: rich's, if not the usual ones; a line leaves out what is no text."""
    console = console or Console(stderr=True)
    columns = columns or Progress.get_default_columns()
    if console.is_terminal:
        return Progress(*columns, console=console, transient=True)
    return _Lines(*columns, console=console, now=now)
