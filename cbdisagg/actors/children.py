"""The child processes of a supervisor: how one is started and told to end.

A `Child` is a place in the service (a name); an incarnation is one process in it. Knows processes, not protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, TypeAlias

from cbdisagg.actors.backoff import BackOff
from cbdisagg.actors.forks import Nursery, computing
from cbdisagg.actors.placement import Spot
from cbdisagg.actors.start import Kind, Start
from cbdisagg.messages import Address

Command: TypeAlias = Callable[[Start, Path], Sequence[str]]
"""(start, its file) -> the command line of the child."""


class System(Protocol):
    """A child as the system knows it."""

    @property
    def pid(self) -> int: ...

    @property
    def returncode(self) -> int | None: ...

    async def wait(self) -> int:
        """What it ended with: its exit status, or minus the signal's number."""
        ...

    def send_signal(self, signal: signal.Signals, /) -> None: ...


class Incarnations:
    """Numbers for starts of processes: the time in nanoseconds, but always growing, also when the clock is set back."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last = max(self._last + 1, time.time_ns())
        return self._last


@dataclass(slots=True)
class Child:
    """`up` is the address of the living incarnation, once it has said so; `asked`: its end is wanted.

    `ends` counts how often it has ended without that.
    """

    kind: Kind
    name: str
    spot: Spot | None = None
    incarnation: int = 0
    process: System | None = None
    up: Address | None = None
    asked: bool = False
    ends: int = 0
    backoff: BackOff = field(default_factory=BackOff)

    @property
    def pid(self) -> int:
        return self.process.pid if self.process is not None else 0

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.returncode is None

    async def spawn(self, start: Start, command: Command, lifeline: int, nursery: Nursery | None = None) -> System:
        """Start an incarnation. `lifeline` is the read end of a pipe that only this process holds open.

        A worker comes from the nursery, if there is one. Raises NotForked.
        """
        self.incarnation, self.process, self.up, self.asked = start.incarnation, None, None, False
        file = start.write()
        if nursery is not None and start.kind == "worker":
            self.process = await nursery.fork(file)
            return self.process
        self.process = await asyncio.create_subprocess_exec(
            *command(start, file),
            stdin=lifeline,
            env=computing(start.threads) if start.kind == "worker" else None,
            start_new_session=True,  # a terminal sends Ctrl-C to its whole group: we alone stop the children, in order
        )
        return self.process

    def ask(self) -> None:
        """Ask it to leave: a worker gives its requests away first, an api finishes those that run."""
        self.asked = True
        self.send(signal.SIGTERM)

    def send(self, number: signal.Signals) -> None:
        if self.running and self.process is not None:
            with contextlib.suppress(ProcessLookupError):  # it has ended and will be reaped in a moment
                self.process.send_signal(number)


def own_command(start: Start, file: Path) -> Sequence[str]:
    """This program, as another process; what follows -m is actors/part.py."""
    return (sys.executable, "-m", "cbdisagg.actors.part", start.kind, "--start", str(file))
