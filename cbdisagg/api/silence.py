"""How long somebody has said nothing, counted by one who may have been asleep himself.

A machine too busy to run us may have been too busy to run the other. So only time in which we looked counts: each look
adds what has passed since the last one, but never more than two regular steps.
"""

from __future__ import annotations


class Silence:
    """`seconds` since the last `heard`. `look` is to be called each `step_s` seconds."""

    def __init__(self, step_s: float, now: float) -> None:
        self.seconds = 0.0
        self._step_s, self._looked_at = step_s, now

    def heard(self, now: float) -> None:
        self.seconds, self._looked_at = 0.0, now

    def look(self, now: float) -> None:
        self.seconds += min(now - self._looked_at, 2 * self._step_s)
        self._looked_at = now
