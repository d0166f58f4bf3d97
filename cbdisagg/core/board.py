"""All workers as routing sees them, ranked, and the links between them: to choose costs the same among ten and 1,000.

Knows the views and links that it is given, one at a time as they change; decides nothing: `shortlist` names the few
workers that a decision can sensibly fall on. Among up to EVERYBODY workers these are all of them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from cbdisagg.core.policy import Link, View
from cbdisagg.messages import Address

FEW = 8
"""How many of each kind are looked at: least loaded, shortest queues, most of the prefix."""
EVERYBODY = 2 * FEW

Rank = tuple[float, Address]


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

    def __iter__(self) -> Iterator[Address]:
        return (worker for _, worker in self._order)


class Board:
    """`queued`: requests that wait, at all workers together."""

    def __init__(self) -> None:
        self.queued = 0
        self._views: dict[Address, View] = {}
        self._queued: dict[Address, int] = {}
        self._by_load, self._by_queue, self._prefillers = Ranking(), Ranking(), Ranking()
        self._links: dict[Address, dict[Address, Link]] = {}  # by decode, then by prefill worker

    def put(self, view: View, queued: int) -> None:
        """A worker is new here, or has changed. `queued`: requests that wait there."""
        worker = view.address
        self._views[worker] = view
        self.queued += queued - self._queued.get(worker, 0)
        self._queued[worker] = queued
        waits_s = self._wait_s(worker)
        if view.role != "prefill":
            load = view.running + view.waiting
            self._by_load.put(worker, load if load < view.max_batch else load + 1e9)
            self._by_queue.put(worker, waits_s)
        if view.role != "decode":
            self._prefillers.put(worker, waits_s)

    def drop(self, worker: Address) -> None:
        """With all links from and to it."""
        self._views.pop(worker, None)
        self.queued -= self._queued.pop(worker, 0)
        for ranking in (self._by_load, self._by_queue, self._prefillers):
            ranking.drop(worker)
        self._links.pop(worker, None)
        for links in self._links.values():
            links.pop(worker, None)

    def link(self, link: Link) -> None:
        self._links.setdefault(link.decode, {})[link.prefill] = link

    def unlink(self, prefill: Address, decode: Address) -> None:
        self._links.get(decode, {}).pop(prefill, None)

    def has(self, serves: Callable[[Address], bool]) -> bool:
        """Is there anybody who serves?"""
        return any(serves(worker) for worker in self._views)

    def views(self, serves: Callable[[Address], bool]) -> list[View]:
        """All that serve, by address."""
        return [view for worker, view in sorted(self._views.items()) if serves(worker)]

    def links(self) -> list[Link]:
        return [link for links in self._links.values() for link in links.values()]

    def shortlist(
        self, cached: Mapping[Address, int], serves: Callable[[Address], bool]
    ) -> tuple[list[View], list[Link]]:
        """Those on whom a route may fall, by address, and the links among them.

        `cached`: tokens of the request's prompt that are probably there already; workers without any need not be named.
        """
        if len(self._views) <= EVERYBODY:
            chosen = [worker for worker in sorted(self._views) if serves(worker)]
        else:
            chosen = sorted(self._choose(cached, serves))
        views = [self._views[worker] for worker in chosen]
        seen = [replace(view, cached=cached[view.address]) if view.address in cached else view for view in views]
        among = set(chosen)
        links = [link for decode in chosen for link in self._links.get(decode, {}).values() if link.prefill in among]
        return seen, links

    def _choose(self, cached: Mapping[Address, int], serves: Callable[[Address], bool]) -> set[Address]:
        chosen = set(_first(self._by_load, serves)) | set(_first(self._by_queue, serves))
        holders = sorted(cached, key=lambda worker: (-cached[worker], worker))
        chosen.update(_first(holders, serves))
        decoders = [worker for worker in chosen if self._views[worker].role != "prefill"]
        best = _first(self._prefillers, serves)
        chosen.update(best)
        for decoder in decoders:
            chosen.update(self._nearest(decoder, best, serves))
        return chosen

    def _nearest(self, decoder: Address, best: list[Address], serves: Callable[[Address], bool]) -> list[Address]:
        """The prefill worker with the shortest queue of those that reach it, if it is not one of the `best` anyway."""
        links = self._links.get(decoder, {})
        if len(links) > EVERYBODY and any(worker in links for worker in best):
            return []
        waits = self._prefillers.numbers
        near = sorted((waits[worker], worker) for worker in links if worker in waits)
        return next(([worker] for _, worker in near if serves(worker)), [])

    def _wait_s(self, worker: Address) -> float:
        view = self._views[worker]
        return view.queued_tokens * view.token_s


def _first(workers: Iterable[Address], serves: Callable[[Address], bool]) -> list[Address]:
    """The first FEW that serve."""
    found: list[Address] = []
    for worker in workers:
        if serves(worker):
            found.append(worker)
            if len(found) == FEW:
                break
    return found
