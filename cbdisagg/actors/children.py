"""The child processes of a supervisor: how one is started, how it ends, how long to wait before the next start.

A `Child` is a place in the service (a name); an incarnation is one process in it. Knows processes, not protocols.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

from cbdisagg.actors.placement import Spot
from cbdisagg.actors.start import Kind, Start
from cbdisagg.messages import Address

Command: TypeAlias = Callable[[Start, Path], Sequence[str]]
"""(start, its file) -> the command line of the child."""

FIRST_DELAY_S, LAST_DELAY_S, HEALTHY_S = 0.1, 10.0, 10.0


class Incarnations:
    """Numbers for starts of processes: the time in nanoseconds, but always growing, also when the clock is set back."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last = max(self._last + 1, time.time_ns())
        return self._last


@dataclass(slots=True)
class BackOff:
    """Doubles the delay between restarts, from FIRST_DELAY_S to LAST_DELAY_S; HEALTHY_S of life start it anew."""

    delay_s: float = FIRST_DELAY_S

    def after(self, lived_s: float) -> float:
        if lived_s >= HEALTHY_S:
            self.delay_s = FIRST_DELAY_S
        delay, self.delay_s = self.delay_s, min(LAST_DELAY_S, 2 * self.delay_s)
        return delay


@dataclass(slots=True)
class Child:
    """`up` is the address of the living incarnation, once it has said so; `asked`: its end is wanted.

    `ends` counts how often it has ended without that.
    """

    kind: Kind
    name: str
    spot: Spot | None = None
    incarnation: int = 0
    process: Process | None = None
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

    async def spawn(self, start: Start, command: Command, lifeline: int) -> None:
        """Start an incarnation. `lifeline` is the read end of a pipe that only this process holds open."""
        self.incarnation, self.up, self.asked = start.incarnation, None, False
        environment = dict(os.environ)
        if start.kind == "worker":
            environment["OMP_NUM_THREADS"] = str(start.threads)
            # By default a waiting thread spins, and takes the core from the one that it waits for: 20 ms instead of
            # 13 us for a parallel region on a busy machine of two cores.
            environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
            # oneDNN keeps code for each shape that it has seen, 1,024 by default and up to a MiB each.
            environment.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "128")
        self.process = await asyncio.create_subprocess_exec(
            *command(start, start.write()),
            stdin=lifeline,
            env=environment,
            start_new_session=True,  # a terminal sends Ctrl-C to its whole group: we alone stop the children, in order
        )

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


def cause(status: int) -> str:
    """How a process ended, in words: asyncio gives the negative number of a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
