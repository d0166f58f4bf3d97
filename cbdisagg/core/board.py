"""All workers as routing sees them, ranked, and the links between them: to choose costs the same among ten and 1,000.

Knows the views and links that it is given, one at a time as they change; decides nothing: `sight` names the few workers
that a decision can sensibly fall on. Among up to EVERYBODY workers these are all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping

from cbdisagg.core.policy import Link, Sight, View
from cbdisagg.messages import Address

FEW = 8
"""How many of each kind are looked at: least loaded, most loaded within limits, shortest queues, most of the prefix."""
EVERYBODY = 2 * FEW

Rank = tuple[float, Address]
Serves = Callable[[Address], bool]


class Ranking:
    """Workers by a number, the smallest first, then by address. `numbers` is to be read only."""

    def __init__(self) -> None:
        self._order: list[Rank] = []
        self.numbers: dict[Address, float] = {}

    def put(self, worker: Address, number: float) -> None:
        before = self.numbers.get(worker)
        if before == number:
            return
        if before is not None:
            del self._order[bisect_left(self._order, (before, worker))]
        self.numbers[worker] = number
        insort(self._order, (number, worker))

    def drop(self, worker: Address) -> None:
        number = self.numbers.pop(worker, None)
        if number is not None:
            del self._order[bisect_left(self._order, (number, worker))]

    def below(self, number: float) -> Iterator[Address]:
        """Those whose number is smaller, the greatest first."""
        for n in range(bisect_left(self._order, (number,)) - 1, -1, -1):
            yield self._order[n][1]

    def __iter__(self) -> Iterator[Address]:
        return (worker for _, worker in self._order)


class Board:
    """`queued`: requests that wait, at all workers together."""

    def __init__(self) -> None:
        self.queued = 0
        self._names: list[Address] = []
        self._views: dict[Address, View] = {}
        self._queued: dict[Address, int] = {}
        self._by_step, self._prefillers = Ranking(), Ranking()
        self._unranked: set[Address] = set()  # who has changed since these were last looked at
        self._links: dict[Address, dict[Address, Link]] = {}  # by decode, then by prefill worker

    def put(self, view: View, queued: int) -> None:
        """A worker is new here, or has changed. `queued`: requests that wait there."""
        worker = view.address
        if worker not in self._views:
            insort(self._names, worker)
        self._views[worker] = view
        self.queued += queued - self._queued.get(worker, 0)
        self._queued[worker] = queued
        self._unranked.add(worker)

    def drop(self, worker: Address) -> None:
        """With all links from and to it."""
        if self._views.pop(worker, None) is not None:
            self._names.remove(worker)
        self.queued -= self._queued.pop(worker, 0)
        self._unranked.discard(worker)
        for ranking in (self._by_step, self._prefillers):
            ranking.drop(worker)
        self._links.pop(worker, None)
        for links in self._links.values():
            links.pop(worker, None)

    def link(self, link: Link) -> None:
        self._links.setdefault(link.decode, {})[link.prefill] = link

    def unlink(self, prefill: Address, decode: Address) -> None:
        self._links.get(decode, {}).pop(prefill, None)

    def view(self, worker: Address) -> View:
        return self._views[worker]

    def has(self, serves: Serves) -> bool:
        """Is there anybody who serves?"""
        return any(serves(worker) for worker in self._names)

    def everybody(self, serves: Serves) -> Sight:
        """All that serve."""
        return Sight([self._views[worker] for worker in self._names if serves(worker)], {}, self._links)

    def sight(self, cached: Mapping[Address, int], step_s: float, serves: Serves, now: float) -> Sight:
        """Those on whom a route may fall.

        `cached`: tokens of the request's prompt that are probably there already; workers without any need not be named.
        `step_s`: a worker that decodes it should not have longer steps.
        """
        if len(self._names) <= EVERYBODY:
            return Sight([self._views[worker] for worker in self._names if serves(worker)], cached, self._links, now)
        chosen = sorted(self._choose(cached, step_s, serves))
        return Sight([self._views[worker] for worker in chosen], cached, self._links, now)

    def _rank(self) -> None:
        for worker in self._unranked:
            view = self._views[worker]
            if view.pin == "prefill":
                self._by_step.drop(worker)
            else:
                self._by_step.put(worker, view.step_s if view.sequences < view.max_batch else view.step_s + 1e9)
            if view.pin == "decode":
                self._prefillers.drop(worker)
            else:
                self._prefillers.put(worker, view.wait_s)
        self._unranked.clear()

    def _choose(self, cached: Mapping[Address, int], step_s: float, serves: Serves) -> set[Address]:
        self._rank()
        decoders = _first(self._by_step, serves) + _first(self._by_step.below(step_s), serves)
        best = _first(self._prefillers, serves)
        holders = sorted(cached, key=lambda worker: (-cached[worker], worker))
        chosen = {*decoders, *best, *_first(holders, serves)}
        for decoder in decoders:
            chosen.update(self._nearest(decoder, best, serves))
        return chosen

    def _nearest(self, decoder: Address, best: list[Address], serves: Serves) -> list[Address]:
        """The prefill worker with the shortest queue of those that reach it, if it is not one of the `best` anyway."""
        links = self._links.get(decoder, {})
        if len(links) > EVERYBODY and any(worker in links for worker in best):
            return []
        waits = self._prefillers.numbers
        near = sorted((waits[worker], worker) for worker in links if worker in waits)
        return next(([worker] for _, worker in near if serves(worker)), [])


def _first(workers: Iterable[Address], serves: Serves) -> list[Address]:
    """The first FEW that serve."""
    found: list[Address] = []
    for worker in workers:
        if serves(worker):
            found.append(worker)
            if len(found) == FEW:
                break
    return found
