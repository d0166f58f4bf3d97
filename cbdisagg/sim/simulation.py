"""One run: requests arrive, all of them end, and this is what came of it.

The same config, profile, layout, requests and faults give the same outcome, event by event, on any machine.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from cbdisagg.config import Config, ConfigError
from cbdisagg.core.effects import Note
from cbdisagg.core.profile import Profile
from cbdisagg.sim.clients import Record
from cbdisagg.sim.faults import COORDINATOR, Fault
from cbdisagg.sim.fleet import Layout
from cbdisagg.sim.machine import Meter
from cbdisagg.sim.service import Service
from cbdisagg.sim.shell import Observer
from cbdisagg.sim.workload import Ask, prompts

PATIENCE_S = 600.0
"""If for so long nothing arrives, no token comes and nothing ends, nothing will come any more."""

ONE_HOST = Layout()


class Stuck(Exception):
    """Requests neither end nor come nearer to it: a bug of a core, or no worker is left."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`records` by arrival; `gaps`: seconds between tokens, of all requests; `meters` by worker's name.

    `seconds`: virtual time from the start to the last end. `decisions`: (local | remote, reason) -> requests, of the
    coordinator that led at the end. `notes`: (when, whose, what). `events` and `messages` say how much was simulated.
    """

    records: list[Record]
    gaps: array[float]
    seconds: float
    meters: dict[str, Meter]
    decisions: dict[tuple[str, str], int]
    notes: list[tuple[float, str, Note]]
    events: int
    messages: int


def simulate(
    config: Config,
    profile: Profile,
    asks: Sequence[Ask],
    layout: Layout = ONE_HOST,
    *,
    concurrency: int = 0,
    faults: Sequence[Fault] = (),
    restart_s: float = 10.0,
    settle_s: float = 0.0,
    observer: Observer | None = None,
    ended: Callable[[Record], None] | None = None,
) -> Outcome:
    """Until every request has ended.

    `concurrency`: so many clients ask one after the other, whatever `arrival_s` says; 0: requests come at their times.
    `restart_s`: until a worker that was killed is back. `settle_s`: so long the service goes on after the last end, for
    those who observe it. `observer` sees every event of every core; `ended` is called at each end of a request. Raises
    ConfigError if the pool is too small, or a fault is to strike nobody, Stuck if the requests do not come to an end.
    """
    run = _Run(asks, concurrency, ended)
    service = Service(config, profile, layout, run.end, restart_s=restart_s, observer=observer)
    names = [COORDINATOR, *(machine.address.name for machine in service.machines.values())]
    for fault in faults:
        if fault.target not in names:
            some = ", ".join(names[:4]) + (f" ... {names[-1]}" if len(names) > 4 else "")
            raise ConfigError(f"fault after {fault.at_s:g} s: there is no {fault.target!r}; there are {some}")
        service.clock.at(fault.at_s, service.strike, fault)
    run.through(service)
    outcome = _outcome(service)
    service.clock.run(service.clock.now + settle_s)
    return outcome


class _Run:
    """The requests that have not arrived, and how many have not ended."""

    def __init__(self, asks: Sequence[Ask], concurrency: int, ended: Callable[[Record], None] | None) -> None:
        self._coming: Iterator[tuple[Ask, bytes]] = iter(zip(asks, prompts(asks), strict=True))
        self._concurrency = concurrency
        self._left = len(asks)
        self._ended = ended
        self._service: Service | None = None
        self._next: deque[tuple[Ask, bytes]] = deque()

    def through(self, service: Service) -> None:
        self._service = service
        for _ in range(self._concurrency or 1):
            self._come()
        while self._left:
            before = self._progress()
            if not service.clock.run(service.clock.now + PATIENCE_S) and self._progress() == before and not self._next:
                living = len(service.machines)
                raise Stuck(f"{self._left} requests do not end; {living} workers live at {service.clock.now:.0f} s")

    def end(self, record: Record) -> None:
        self._left -= 1
        if self._ended is not None:
            self._ended(record)
        assert self._service is not None
        if not self._left:
            self._service.clock.stop()
        elif self._concurrency:
            self._come()

    def _progress(self) -> tuple[int, int, int]:
        assert self._service is not None
        clients = self._service.clients
        return self._left, len(clients.gaps), len(clients.records)

    def _come(self) -> None:
        """The next request: at its time, or now for a client that was free."""
        assert self._service is not None
        ask, prompt = next(self._coming, (None, b""))
        if ask is None:
            return
        clock = self._service.clock
        self._next.append((ask, prompt))
        clock.at(clock.now if self._concurrency else max(ask.arrival_s, clock.now), self._arrive)

    def _arrive(self) -> None:
        assert self._service is not None
        self._service.clients.ask(*self._next.popleft())
        if not self._concurrency:
            self._come()


def _outcome(service: Service) -> Outcome:
    meters: dict[str, Meter] = {}
    for machine in (*service.gone, *service.machines.values()):
        meters.setdefault(machine.address.name, Meter()).add(machine.meter)
    return Outcome(
        service.clients.records,
        service.clients.gaps,
        service.clock.now,
        meters,
        dict(service.coordinator.core.decisions),
        service.notes,
        service.clock.events,
        service.network.sent,
    )
