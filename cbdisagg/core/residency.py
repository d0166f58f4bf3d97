"""Which prefixes a worker probably holds, as the coordinator remembers it from its own routes.

An estimate: the worker may have evicted a page, or not have computed it yet. The worker itself decides what it reuses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence

from cbdisagg.messages import Hash

STARTS = 1 << 16
NEWEST = 64
GENERATIONS = 4


class Starts:
    """Which workers were sent a prompt that begins with this page: the newest ones, of the STARTS newest pages."""

    def __init__(self) -> None:
        self._workers: OrderedDict[Hash, dict[int, None]] = OrderedDict()

    def add(self, first: Hash, worker: int) -> None:
        """`worker` by its incarnation; it may have died since, or have forgotten the page."""
        workers = self._workers.setdefault(first, {})
        self._workers.move_to_end(first)
        workers.pop(worker, None)
        workers[worker] = None
        if len(workers) > NEWEST:
            del workers[next(iter(workers))]
        if len(self._workers) > STARTS:
            self._workers.popitem(last=False)

    def of(self, first: Hash) -> list[int]:
        return list(self._workers.get(first, ()))


class Residency:
    """About `limit` page hashes, those that were routed longest ago forgotten first.

    Kept in generations that are forgotten whole: exact recency costs a linked list for each page of each prompt, which
    was a third of a decision.
    """

    def __init__(self, limit: int) -> None:
        self._room = max(1, limit // GENERATIONS)
        self._generations: deque[set[Hash]] = deque([set()], maxlen=GENERATIONS)

    def add(self, hashes: Sequence[Hash]) -> None:
        """A chain from its first page on: so the start of a prefix is never older than what follows it."""
        if len(self._generations[-1]) >= self._room:
            self._generations.append(set())
        self._generations[-1].update(hashes)

    def has(self, value: Hash) -> bool:
        """Is this page probably there?"""
        for generation in self._generations:  # noqa: SIM110  # any() takes three times as long, and is asked often
            if value in generation:
                return True
        return False

    def count(self, hashes: Sequence[Hash]) -> int:
        """Leading pages of the chain that are probably there. A chain is forgotten from its end, so it has no gaps."""
        if not hashes or not self.has(hashes[0]):
            return 0
        return bisect_left(range(len(hashes)), True, key=lambda n: not self.has(hashes[n]))
