"""What a host's processes slow each other down: by the memory that workers share, and by the cores.

Knows how many steps and pushes are at work and how much of each step is left; not whose they are. A step is slowed by
`beside_step` of its own time for each other step, and by `beside_push` for each push whose bytes come or go; of a push
that lasts longer than its bytes take, as one that goes layer by layer beside a step, by as much less (its weight).

Where the host's `cores` are counted, each step holds `threads` of them, and what other processes compute while none is
free is taken from a step: of the worker that has worked least, on whose cores the system has found room so far.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cbdisagg.sim.clock import Clock


@dataclass(slots=True, eq=False)
class Span:
    """One step at work; `left`: seconds that the rest of it would take alone. `copying`: the part of its time in which
    it copies pages itself, and so slows others as a push does. `worked`: seconds that its worker has worked before.
    """

    left: float
    done: Callable[[], None]
    copying: float
    worked: float


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """A push beside steps. `weight`: the part of the time in which its bytes move."""

    weight: float


class Bus:
    """`cores` 0: enough for everybody."""

    def __init__(self, clock: Clock, beside_step: float, beside_push: float, cores: int = 0, threads: int = 1) -> None:
        self._clock = clock
        self._beside_step, self._beside_push = beside_step, beside_push
        self._cores, self._threads = cores, threads
        self._spans: list[Span] = []
        self._flows: list[Flow] = []
        self._since = 0.0
        self._turn = 0  # changes with what is at work: an end foreseen before no longer holds

    def work(self, seconds: float, done: Callable[[], None], copying: float = 0.0, worked: float = 0.0) -> Span:
        """Call `done` once a step that takes `seconds` alone has run, beside whatever else runs."""
        self._pass()
        span = Span(seconds, done, copying, worked)
        self._spans.append(span)
        self._foresee()
        return span

    def drop(self, span: Span) -> None:
        """Its worker is dead."""
        if span in self._spans:
            self._pass()
            self._spans.remove(span)
            self._foresee()

    def push(self, weight: float) -> Flow:
        """Bytes of a push come or go from now on, until it is `land`ed."""
        self._pass()
        flow = Flow(weight)
        self._flows.append(flow)
        self._foresee()
        return flow

    def land(self, flow: Flow) -> None:
        self._pass()
        self._flows.remove(flow)
        self._foresee()

    def disturb(self, seconds: float) -> None:
        """A process that is no worker needs a core for so long."""
        if not self._spans or self._threads * len(self._spans) < self._cores or not self._cores:
            return
        self._pass()
        min(self._spans, key=lambda span: span.worked).left += seconds
        self._foresee()

    def _slowdowns(self) -> list[float]:
        """Of each span, in their order: its own copying slows others only."""
        common = 1.0 + self._beside_step * max(0, len(self._spans) - 1)
        moving = sum(flow.weight for flow in self._flows) + sum(span.copying for span in self._spans)
        return [common + self._beside_push * (moving - span.copying) for span in self._spans]

    def _pass(self) -> None:
        """Time has passed since the last change: so much of each step is done."""
        passed = self._clock.now - self._since
        self._since = self._clock.now
        for span, slowdown in zip(self._spans, self._slowdowns(), strict=True):
            span.left -= passed / slowdown

    def _foresee(self) -> None:
        self._turn += 1
        if self._spans:
            ends = zip(self._spans, self._slowdowns(), strict=True)
            left = max(0.0, min(span.left * slowdown for span, slowdown in ends))
            self._clock.after(left, self._reach, self._turn)

    def _reach(self, turn: int) -> None:
        """The step that ends first is at its end, and those that end with it."""
        if turn != self._turn:
            return
        slowdowns = self._slowdowns()
        first = min(span.left * slowdown for span, slowdown in zip(self._spans, slowdowns, strict=True))
        due = [span.left * slowdown <= first for span, slowdown in zip(self._spans, slowdowns, strict=True)]
        self._pass()
        ended = [span for span, over in zip(self._spans, due, strict=True) if over]
        self._spans = [span for span, over in zip(self._spans, due, strict=True) if not over]
        self._foresee()
        for span in ended:
            span.done()
