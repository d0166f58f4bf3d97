"""How a process has ended, in words, and how long to wait before it is started again."""

from __future__ import annotations

import signal
from dataclasses import dataclass

FIRST_DELAY_S, LAST_DELAY_S, HEALTHY_S = 0.1, 10.0, 10.0


@dataclass(slots=True)
class BackOff:
    """Doubles the delay between restarts, from FIRST_DELAY_S to LAST_DELAY_S; HEALTHY_S of life start it anew."""

    delay_s: float = FIRST_DELAY_S

    def after(self, lived_s: float) -> float:
        if lived_s >= HEALTHY_S:
            self.delay_s = FIRST_DELAY_S
        delay, self.delay_s = self.delay_s, min(LAST_DELAY_S, 2 * self.delay_s)
        return delay


def cause(status: int) -> str:
    """How a process ended, in words: asyncio gives the negative number of a signal."""
    if status >= 0:
        return f"exit status {status}"
    try:
        return signal.Signals(-status).name
    except ValueError:
        return f"signal {-status}"
