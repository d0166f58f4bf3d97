"""Virtual time: what happens when, in one order that does not depend on the machine.

Knows calls and instants, in seconds from 0; nothing of what is called. Calls for the same instant happen in the order
in which they were asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class Clock:
    """`now` moves only while `run` works through the calls."""

    __slots__ = ("_asked", "_calls", "_stopped", "events", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._asked = 0
        self._stopped = False

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Raises ValueError for the past: an effect never comes before its cause."""
        if when < self.now:
            raise ValueError(f"a call for {when} s, and it is {self.now} s")
        self._asked += 1
        heappush(self._calls, (when, self._asked, call, arguments))

    def after(self, seconds: float, call: Callable[..., None], *arguments: Any) -> None:
        self.at(self.now + seconds, call, *arguments)

    def stop(self) -> None:
        """`run` returns after the call that is being made."""
        self._stopped = True

    def run(self, until: float = float("inf")) -> bool:
        """Make the calls up to and including those for `until`. True if stopped before."""
        calls = self._calls
        self._stopped = False
        while calls and calls[0][0] <= until:
            self.now, _, call, arguments = heappop(calls)
            self.events += 1
            call(*arguments)
            if self._stopped:
                return True
        return False


class Timer:
    """One call that is still to come; a later `set` replaces an earlier one."""

    __slots__ = ("_at", "_call", "_clock")

    def __init__(self, clock: Clock, call: Callable[[], None]) -> None:
        self._clock, self._call = clock, call
        self._at = -1.0

    def set(self, at: float) -> None:
        at = max(at, self._clock.now)
        if at != self._at:
            self._at = at
            self._clock.at(at, self._ring, at)

    def cancel(self) -> None:
        self._at = -1.0

    def _ring(self, at: float) -> None:
        if at == self._at:
            self._at = -1.0
            self._call()
