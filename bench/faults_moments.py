"""Faults: what is done to whom, and when. Drawn from a seed, struck when the journals say that the moment has come.

Knows signals and moments; does not know what a fault does to a request. Kinds of faults:
    kill    SIGKILL
    term    SIGTERM: a worker gives its requests away and ends
    stop    SIGSTOP, for good: the service has to notice and to kill the process itself
    freeze  SIGSTOP, and SIGCONT after a while: before the service has noticed, or after
A coordinator is never stopped for good: nothing in the service watches it, and its streams do not need it.
"""

from __future__ import annotations

import asyncio
import random
import signal
import time
from dataclasses import dataclass
from typing import Literal, TypeAlias

from cbdisagg_bench.faults_journal import Journals, Seen
from cbdisagg_bench.faults_processes import Process, Processes

Kind: TypeAlias = Literal["kill", "term", "stop", "freeze"]
Who: TypeAlias = Literal["receiver", "sender", "prefill", "decode", "coordinator", "workers"]

KINDS: tuple[Kind, ...] = ("kill", "term", "stop", "freeze")
KIND_WEIGHTS = (60, 12, 10, 18)
AT_REQUESTS = ("Generate", "Submit", "Prefill", "PushDone", "Landed", "KvReady", "StepDone", "Finished", "Cancel")
AT_MEMBERSHIP = ("Hello", "Probe", "Paired", "Members", "PeerDown", "Lead", "StopPush", "PushStopped")
EVENT_PATIENCE_S = 2.0
"""Some events are rare: after so long without one, now is as good a moment."""
EVERYBODY = 0.05
SOON = 0.2
"""The share of faults that do not wait until the service has got over the one before."""
KILL_PATIENCE_S = 0.3
"""The same where kills follow each other as fast as workers come back."""
LOOK_S = 0.05
RECOVERY_S = 60.0
"""A service that is not well again after so long is not waited for."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to come. `event` "": after `delay_s` alone, else so long after that event. `pause_s`: of a freeze."""

    kind: Kind
    who: Who
    event: str
    delay_s: float
    calm_s: float
    pause_s: float
    soon: bool


@dataclass(frozen=True, slots=True)
class Strike:
    """A fault that has been made. `at` is of the monotonic clock; `alone`: no other worker was up to take over."""

    at: float
    kind: Kind
    name: str
    incarnation: int
    pid: int
    event: str
    alone: bool

    @property
    def role(self) -> str:
        return self.name.partition("-")[0]


def draw_fault(rng: random.Random, suspect_s: float) -> Fault:
    """`suspect_s`: after so long the service takes a stopped worker for dead."""
    kind = rng.choices(KINDS, KIND_WEIGHTS)[0]
    event = rng.choice(rng.choices((AT_REQUESTS, AT_MEMBERSHIP, ("",)), (60, 15, 25))[0])
    who: Who = rng.choices(("receiver", "sender"), (65, 35))[0] if event else "receiver"
    if not event or rng.random() < 0.25:
        who = rng.choices(("prefill", "decode", "coordinator"), (35, 45, 20))[0]
    if kind == "kill" and rng.random() < EVERYBODY:
        who = "workers"
    delay_s = rng.choice((0.0, rng.uniform(0.0, 0.05))) if event else rng.uniform(0.0, 1.5)
    pause_s = rng.uniform(0.05, 1.5) if rng.random() < 0.7 else suspect_s + rng.uniform(0.5, 2.5)
    return Fault(kind, who, event, delay_s, rng.uniform(0.0, 1.5), pause_s, rng.random() < SOON)


class Striker:
    """Makes faults in one service and remembers them. `tasks` keeps what has to happen later: SIGCONT."""

    def __init__(self, processes: Processes, journals: Journals, rng: random.Random, tasks: asyncio.TaskGroup) -> None:
        self.strikes: list[Strike] = []
        self._processes, self._journals, self._rng, self._tasks = processes, journals, rng, tasks

    async def strike(self, fault: Fault) -> None:
        """Wait for the fault's moment and make it."""
        if not fault.soon:
            await self.well()
            await asyncio.sleep(fault.calm_s)
        seen = await self._journals.next(fault.event, EVENT_PATIENCE_S) if fault.event else None
        await asyncio.sleep(fault.delay_s)
        for process in self._victims(fault.who, seen):
            self._do(fault, process, seen)

    async def kill_workers(self, role: str, count: int, until: float) -> None:
        """SIGKILL workers of a role `count` times, or until that time of the monotonic clock.

        Each at an event of a request if there is one soon, and only while another worker of the role is up, if the
        service has several.
        """
        killed = 0
        while killed < count and time.monotonic() < until:
            places = sum(name.partition("-")[0] == role for name in self._processes.names)
            if sum(it.role == role for it in self.up()) < max(1, min(2, places)):
                await asyncio.sleep(LOOK_S)
                continue
            seen = await self._journals.next(self._rng.choice(AT_REQUESTS), KILL_PATIENCE_S)
            up = [it for it in self.up() if it.role == role]
            there = [it for it in up if seen is not None and it.name in (seen.actor, seen.sender)]
            if up:
                process, before = self._rng.choice(there or up), len(self.strikes)
                self._do(Fault("kill", "receiver", "", 0.0, 0.0, 0.0, True), process, seen)
                killed += len(self.strikes) - before

    async def well(self) -> None:
        """Until the coordinator and, of each role, a worker are up; or RECOVERY_S have passed."""
        deadline = time.monotonic() + RECOVERY_S
        while time.monotonic() < deadline:
            up = {process.role for process in self.up()}
            if {name.partition("-")[0] for name in self._processes.names} <= up | {"api"}:
                return
            await asyncio.sleep(LOOK_S)

    def up(self) -> list[Process]:
        up: list[Process] = self._processes.up(self._journals.living)
        return up

    def _victims(self, who: Who, seen: Seen | None) -> list[Process]:
        running = {name: process for name, process in self._processes.look().items() if process.role != "api"}
        workers = [process for process in running.values() if process.computes]
        if who == "workers":
            return workers
        if who in ("receiver", "sender") and seen is not None:
            name = seen.actor if who == "receiver" else seen.sender
            if name in running:
                return [running[name]]
        fitting = [process for process in running.values() if process.role == who] or workers
        return [self._rng.choice(fitting)] if fitting else []

    def _do(self, fault: Fault, process: Process, seen: Seen | None) -> None:
        kind = fault.kind
        if kind == "stop" and not process.computes:
            kind = "freeze"
        others = [it for it in self.up() if it.computes and it.incarnation != process.incarnation]
        alone = process.computes and (not others or fault.who == "workers")
        numbers = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "stop": signal.SIGSTOP, "freeze": signal.SIGSTOP}
        at = time.monotonic()
        if not self._processes.strike(process, numbers[kind], comes_back=kind == "freeze"):
            return
        event = seen.name if seen is not None else ""
        self.strikes.append(Strike(at, kind, process.name, process.incarnation, process.system.pid, event, alone))
        if kind == "freeze":
            self._tasks.create_task(self._thaw(process, fault.pause_s))

    async def _thaw(self, process: Process, pause_s: float) -> None:
        await asyncio.sleep(pause_s)
        process.send(signal.SIGCONT)
