"""What workers on one host slow each other down: a step takes longer while others read the same memory.

Knows how many steps and pushes are at work and how much of each step is left; not whose they are. Every step beside
another adds `beside_step` of its own time, every push in flight `beside_push`; all that run are slowed alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbdisagg.sim.clock import Clock


@dataclass(slots=True, eq=False)
class Span:
    """One step at work; `left`: seconds that the rest of it would take alone."""

    left: float
    done: Callable[[], None]


class Bus:
    def __init__(self, clock: Clock, beside_step: float, beside_push: float) -> None:
        self._clock = clock
        self._beside_step, self._beside_push = beside_step, beside_push
        self._spans: list[Span] = []
        self._pushes = 0
        self._since = 0.0
        self._turn = 0  # changes with what is at work: an end foreseen before no longer holds

    def work(self, seconds: float, done: Callable[[], None]) -> Span:
        """Call `done` once a step that takes `seconds` alone has run, beside whatever else runs."""
        self._pass()
        span = Span(seconds, done)
        self._spans.append(span)
        self._foresee()
        return span

    def drop(self, span: Span) -> None:
        """Its worker is dead."""
        if span in self._spans:
            self._pass()
            self._spans.remove(span)
            self._foresee()

    def push(self, seconds: float) -> None:
        """Bytes of a push come or go for so long, whatever else happens."""
        if self._beside_push:
            self._pass()
            self._pushes += 1
            self._foresee()
            self._clock.after(seconds, self._pushed)

    def _pushed(self) -> None:
        self._pass()
        self._pushes -= 1
        self._foresee()

    @property
    def _slowdown(self) -> float:
        return 1.0 + self._beside_step * max(0, len(self._spans) - 1) + self._beside_push * self._pushes

    def _pass(self) -> None:
        """Time has passed since the last change: so much of each step is done."""
        done = (self._clock.now - self._since) / self._slowdown
        self._since = self._clock.now
        for span in self._spans:
            span.left -= done

    def _foresee(self) -> None:
        self._turn += 1
        if self._spans:
            left = max(0.0, min(span.left for span in self._spans))
            self._clock.after(left * self._slowdown, self._reach, self._turn)

    def _reach(self, turn: int) -> None:
        """The shortest step is at its end, and those that end with it."""
        if turn != self._turn:
            return
        self._pass()
        shortest = min(span.left for span in self._spans)
        ended = [span for span in self._spans if span.left <= shortest]
        self._spans = [span for span in self._spans if span.left > shortest]
        self._foresee()
        for span in ended:
            span.done()
