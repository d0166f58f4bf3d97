"""What the operator sees while the service starts, on stderr: a table that moves on a terminal, lines elsewhere."""

from __future__ import annotations

import time

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

QUIET_S = 10.0
"""Where no table moves, the same stage of a process is told again after this long."""


class Status:
    """Rows of (name, stage, fraction). `close` takes the table away; what is told later is not shown."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._rows: dict[str, TaskID] = {}
        self._told: dict[str, tuple[str, float]] = {}
        self._open = True
        self._table: Progress | None = None
        if self._console.is_terminal:
            columns = (
                SpinnerColumn(),
                TextColumn("{task.fields[name]:<12}"),
                BarColumn(20),
                TextColumn("{task.description}"),
            )
            self._table = Progress(*columns, TimeElapsedColumn(), console=self._console, transient=True)
            self._table.start()

    def stage(self, name: str, stage: str, fraction: float) -> None:
        if not self._open:
            return
        if self._table is None:
            self._line(name, stage, fraction)
        elif name in self._rows:
            self._table.update(self._rows[name], description=stage, completed=fraction)
        else:
            self._rows[name] = self._table.add_task(stage, total=1.0, name=name)
            self._table.update(self._rows[name], completed=fraction)

    def close(self) -> None:
        self._open = False
        if self._table is not None:
            self._table.stop()

    def _line(self, name: str, stage: str, fraction: float) -> None:
        told, at = self._told.get(name, ("", 0.0))
        now = time.monotonic()
        if stage == told and now - at < QUIET_S:
            return
        self._told[name] = (stage, now)
        share = f" {fraction:.0%}" if 0.0 < fraction < 1.0 and stage == told else ""
        self._console.print(f"{name}: {stage}{share}", markup=False, highlight=False, soft_wrap=True)
