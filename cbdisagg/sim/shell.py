"""Around one core: performs its effects in virtual time and brings it events. What `actors/shell.py` is to the engine.

Knows the clock and the network; what needs a model or a link goes to `hands`. Once closed, its core sees nothing more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

from cbdisagg.core.effects import Effect, Note, Tell, Wake
from cbdisagg.core.events import CoordinatorEvent, Tick, WorkerEvent
from cbdisagg.sim.clock import Clock, Timer
from cbdisagg.sim.network import Network, Process

Event: TypeAlias = CoordinatorEvent | WorkerEvent
Observer: TypeAlias = Callable[[Process, float, Event, list[Effect]], None]
"""(whose core, virtual time, what happened, what it wanted done): called after every event of every core."""


class Core(Protocol):
    def handle(self, event: Any, now: float) -> list[Effect]: ...


class Hands(Protocol):
    def perform(self, effect: Effect) -> None: ...


class Shell:
    """`owner` is the process that this core lives in. `hands` None: a core without an engine."""

    __slots__ = ("_clock", "_closed", "_core", "_hands", "_network", "_observer", "_owner", "_timer", "notes")

    def __init__(
        self,
        core: Core,
        owner: Process,
        clock: Clock,
        network: Network,
        hands: Hands | None,
        observer: Observer | None,
    ) -> None:
        self._core, self._owner = core, owner
        self._clock, self._network = clock, network
        self._hands, self._observer = hands, observer
        self._timer = Timer(clock, self._ring)
        self._closed = False
        self.notes: list[tuple[float, Note]] = []

    def handle(self, event: Event) -> None:
        if self._closed:
            return
        effects = self._core.handle(event, self._clock.now)
        if self._observer is not None:
            self._observer(self._owner, self._clock.now, event, effects)
        for effect in effects:
            kind = type(effect)
            if kind is Tell:
                self._network.send(self._owner, effect.to, effect.message)  # type: ignore[union-attr]  # a Tell
            elif kind is Wake:
                self._timer.set(effect.at)  # type: ignore[union-attr]  # a Wake
            elif kind is Note:
                self.notes.append((self._clock.now, effect))  # type: ignore[arg-type]  # a Note
            elif self._hands is not None:
                self._hands.perform(effect)
            else:
                raise TypeError(f"{effect!r} from a core without an engine")

    def wake(self, at: float) -> None:
        """The core wants a Tick then."""
        self._timer.set(at)

    def close(self) -> None:
        self._closed = True
        self._timer.cancel()

    def _ring(self) -> None:
        self.handle(Tick())
