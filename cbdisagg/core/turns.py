"""In which order those that wait are looked at: by class, by what their tenant has had, by how urgent they are.

Knows tokens that were computed for each tenant, weighted: a virtual counter that only grows (the virtual token counter
of Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). Who has had least goes first. A tenant that was
away is lifted to the least counter of those that are here, so that nobody saves turns up. Nobody is overtaken for ever:
after OVERTAKES later arrivals a request comes before all that are not in the same case.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from itertools import islice

from cbdisagg.core.cost import CostModel
from cbdisagg.core.pace import Pace, token_s
from cbdisagg.core.request import Request

INPUT, OUTPUT = 1.0, 2.0
"""Weights of a token of a prompt, and of one that was drawn."""
OVERTAKES = 64
TENANTS = 4096
"""Tenants that are remembered: those that have requests here, and of the others the newest."""


class Turns:
    """`had`: weighted tokens by tenant; `here`: how many requests of each are here, none of them 0."""

    def __init__(self) -> None:
        self.had: OrderedDict[str, float] = OrderedDict()
        self.here: Counter[str] = Counter()

    def come(self, request: Request) -> None:
        tenant = request.spec.tenant
        if not self.here[tenant]:
            least = min((self.had[other] for other, count in self.here.items() if count), default=0.0)
            self.had[tenant] = max(self.had.get(tenant, 0.0), least)
            self.had.move_to_end(tenant)
            self._forget()
        self.here[tenant] += 1

    def go(self, request: Request) -> None:
        """It has ended, here or by going elsewhere."""
        tenant = request.spec.tenant
        self.here[tenant] -= 1
        if not self.here[tenant]:
            del self.here[tenant]

    def serve(self, request: Request, prompt_tokens: int, drawn: int) -> None:
        tenant = request.spec.tenant
        if tenant in self.had:
            self.had[tenant] += INPUT * prompt_tokens + OUTPUT * drawn

    def order(self, waiting: Sequence[Request], pace: Pace, cost: CostModel, now: float) -> list[Request]:
        """Those that have been overtaken too often by age, then streams that were interrupted, then the others."""
        if len(waiting) < 2:
            return list(waiting)
        each_s = token_s(cost, pace.token_budget)
        return sorted(waiting, key=lambda request: self._key(request, pace, cost, now, each_s))

    def start(self, request: Request, waiting: Sequence[Request]) -> None:
        """It leaves the queue; `waiting` are those that stay, by age."""
        for other in waiting:
            if other.order > request.order:
                return
            other.overtaken += 1

    def _key(self, request: Request, pace: Pace, cost: CostModel, now: float, each_s: float) -> tuple[object, ...]:
        if request.overtaken >= OVERTAKES:
            return (0, request.order)
        if request.first_token is not None:
            return (1, request.order)
        had = self.had.get(request.spec.tenant, 0.0)
        return (2, -request.spec.priority, had, *pace.urgency(request, cost, now, each_s))

    def _forget(self) -> None:
        for tenant in list(islice(self.had, max(0, len(self.had) - TENANTS))):
            if not self.here[tenant]:
                del self.had[tenant]
