"""The processes of a service under test, seen from outside: who is who, who is new, who ended without being told to.

Knows the process table and command lines; nothing of requests. A process is known by its name in the service and its
incarnation, both read from the start file that its command line names.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import psutil

_START = re.compile(r"(.+)\.(\d+)\.json")


@dataclass(frozen=True, slots=True)
class Process:
    """One incarnation: `name` as the service calls it ("decode-0"), and the process as the system knows it."""

    name: str
    incarnation: int
    system: psutil.Process

    @property
    def role(self) -> str:
        """ "coordinator", "api", "prefill", "decode" or "worker"."""
        return self.name.partition("-")[0]

    @property
    def computes(self) -> bool:
        return self.role not in ("coordinator", "api")

    @property
    def stopped(self) -> bool:
        try:
            return bool(self.system.status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def send(self, number: signal.Signals) -> bool:
        """False if it has ended. Never to another process that has got its number."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.system.send_signal(number)
            return True
        return False


@dataclass
class Processes:
    """The children of one supervisor.

    `struck`: incarnations that we have sent a signal, and whether they come back after it. `unstruck`: who ended, and
    we had not sent it anything. `seen`: every process there has been, by its process id.
    """

    supervisor: psutil.Process
    struck: dict[int, bool] = field(default_factory=dict)
    unstruck: list[Process] = field(default_factory=list)
    seen: dict[int, Process] = field(default_factory=dict)
    _newest: dict[str, Process] = field(default_factory=dict)

    @property
    def names(self) -> set[str]:
        """Of all places in the service, whether somebody is there or not."""
        return set(self._newest)

    def look(self) -> dict[str, Process]:
        """Who runs now, by name. An incarnation that has a successor has ended."""
        running = {}
        for child in self.supervisor.children():
            process = self.seen.get(child.pid)
            if process is None or process.system != child:
                process = _identify(child)
                if process is None:
                    continue
                self.seen[child.pid] = process
                self._arrived(process)
            running[process.name] = process
        return running

    def up(self, living: Mapping[str, int]) -> list[Process]:
        """Who serves: it has a core (`living`: by name, whose incarnation has one), and has not been struck down."""
        return [
            process
            for name, process in sorted(self.look().items())
            if living.get(name) == process.incarnation
            and self.struck.get(process.incarnation, True)
            and not process.stopped
        ]

    def strike(self, process: Process, number: signal.Signals, comes_back: bool = False) -> bool:
        """Send the signal and remember that it was we. False if the process has ended."""
        sent = process.send(number)
        if sent:
            self.struck[process.incarnation] = comes_back
        return sent

    def _arrived(self, process: Process) -> None:
        before = self._newest.get(process.name)
        if before is not None and before.incarnation not in self.struck:
            self.unstruck.append(before)
        self._newest[process.name] = process

    def outlived(self, patience_s: float) -> list[str]:
        """Once the service has ended: what is left of it after some patience."""
        _, alive = psutil.wait_procs([process.system for process in self.seen.values()], timeout=patience_s)
        names = {process.system: process.name for process in self.seen.values()}
        return [f"{names[process]} (pid {process.pid})" for process in alive]


def _identify(child: psutil.Process) -> Process | None:
    """None: it has just been forked, or has ended."""
    try:
        words = child.cmdline()
    except psutil.Error:
        return None
    found = _START.fullmatch(Path(words[-1]).name) if "--start" in words else None
    return Process(found[1], int(found[2]), child) if found else None


def shared_memory() -> set[str]:
    """Names in /dev/shm."""
    with contextlib.suppress(FileNotFoundError):
        return set(os.listdir("/dev/shm"))
    return set()


def open_files(process: psutil.Process) -> int:
    """Descriptors, without those of established connections: how many clients keep theirs is their business."""
    try:
        theirs = sum(it.status == psutil.CONN_ESTABLISHED for it in process.net_connections("tcp"))
        return int(process.num_fds()) - theirs
    except psutil.NoSuchProcess:
        return 0
