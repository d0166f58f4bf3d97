"""Notices a worker that hangs before it is a member: nobody else can, for the coordinator does not know it yet.

Knows who is to become one, and when it last said a word; a starting worker says one each BEAT_S. One that runs already
greets a new coordinator at once, or hangs. Once a worker is listed as a member, its progress is the coordinator's
business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

BEAT_S = 1.0
"""How often a worker says what it is doing while it starts."""
SILENT_S = 20.0
"""A start that says nothing for this long hangs. Generous: Python's own start says nothing either."""
_AWAY_S = 5.0
"""After such a pause between two looks it was this process that did not run."""


@dataclass(slots=True)
class _Start:
    name: str
    heard_at: float
    silent_s: float


class Starting:
    """By incarnation. `hangs(name, incarnation, silent_s)` is called once for each that does."""

    def __init__(self, hangs: Callable[[str, int, float], None], clock: Callable[[], float]) -> None:
        self._hangs, self._clock = hangs, clock
        self._starts: dict[int, _Start] = {}
        self._looked_at = clock()

    def begins(self, name: str, incarnation: int, silent_s: float = SILENT_S) -> None:
        """It is to become a member. `silent_s`: having said nothing for so long, it hangs. Who is watched stays so."""
        self._starts.setdefault(incarnation, _Start(name, self._clock(), silent_s))

    def heard(self, incarnation: int) -> None:
        start = self._starts.get(incarnation)
        if start is not None:
            start.heard_at = self._clock()

    def over(self, incarnation: int) -> None:
        """It is a member, or has ended."""
        self._starts.pop(incarnation, None)

    def look(self) -> None:
        now = self._clock()
        away, self._looked_at = now - self._looked_at > _AWAY_S, now
        for incarnation, start in list(self._starts.items()):
            if away:
                start.heard_at = now
            elif now - start.heard_at > start.silent_s:
                del self._starts[incarnation]
                self._hangs(start.name, incarnation, start.silent_s)

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(BEAT_S)
