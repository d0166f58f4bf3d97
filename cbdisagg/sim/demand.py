"""The same requests at any rate: what clients ask of a service, with the clock that they ask by turned up or down.

Knows requests and the pattern of their arrivals, not who answers them. Two services that are asked at the same rate are
asked the same, at the same instants: differences between them are theirs, not luck.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from cbdisagg.sim.workload import Ask

FEWEST = 200
"""Requests of a run, if there are so many: one in a hundred is then two."""


@dataclass(frozen=True, slots=True)
class Demand:
    """`asks` come at one per second on average. `seconds`: requests come for so long at least, if there are enough:
    a queue that grows is not seen in less time than the targets allow it.
    """

    asks: tuple[Ask, ...]
    seconds: float

    def at(self, rate: float) -> list[Ask]:
        """The first requests, `rate` per second on average."""
        count = min(len(self.asks), max(FEWEST, round(rate * self.seconds)))
        return [replace(ask, arrival_s=ask.arrival_s / rate) for ask in self.asks[:count]]

    @property
    def prompt_tokens(self) -> float:
        """Of a request, on average."""
        return sum(ask.length for ask in self.asks) / len(self.asks)

    @property
    def output_tokens(self) -> float:
        return sum(ask.output_tokens for ask in self.asks) / len(self.asks)


def demand(asks: Iterable[Ask], seconds: float) -> Demand:
    """Of requests by arrival, however fast they came. Requests that all come at once are spread evenly."""
    found = list(asks)
    span = found[-1].arrival_s - found[0].arrival_s
    if span <= 0:
        return Demand(tuple(replace(ask, arrival_s=float(n)) for n, ask in enumerate(found)), seconds)
    start, scale = found[0].arrival_s, max(1, len(found) - 1) / span
    return Demand(tuple(replace(ask, arrival_s=scale * (ask.arrival_s - start)) for ask in found), seconds)
