"""Whom a worker would rather have decoded elsewhere: when it cannot keep its streams in time any more.

Knows deadlines and the length of a step of decodes alone; asks, but decides nothing: the coordinator moves a request
only to a worker that is clearly better off with it (policy.relief). A worker asks when its tightest stream has been
short of a step for HOLD steps in a row, and then not again for PAUSE_S: one move changes both ends, and shows only
after a while.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg.core.cost import CostModel
from cbdisagg.core.pace import Pace, rows
from cbdisagg.core.request import Request

HOLD = 4
PAUSE_S = 0.5
WORTH = 16
"""Tokens that a stream must still be able to draw: below, a move costs more than it gains."""


class Flow:
    def __init__(self) -> None:
        self._short = 0  # steps in a row
        self._quiet_until = float("-inf")

    def pick(self, streams: Sequence[Request], pace: Pace, cost: CostModel, now: float) -> Request | None:
        """After a step: the stream with the most banked slack, if one has to go. It can wait for its move longest.

        One that is late itself stays: while it caught up elsewhere, prompts there would wait.
        """
        if len(streams) < 2:
            self._short = 0
            return None
        step_s = cost.sums_s(rows(streams))
        soon = now + step_s
        self._short = self._short + 1 if min(pace.latest(stream, step_s) for stream in streams) < soon else 0
        if self._short < HOLD or now < self._quiet_until:
            return None
        self._short, self._quiet_until = 0, now + PAUSE_S
        able = (stream for stream in streams if _may_go(stream) and pace.deadline(stream) > soon)
        return max(able, key=lambda stream: (pace.deadline(stream), -stream.key), default=None)


def _may_go(stream: Request) -> bool:
    left = stream.limit - len(stream.tokens)
    return left >= WORTH and stream.job is None and stream.giving is None and not stream.returned
