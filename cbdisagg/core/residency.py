"""Which prefixes a worker probably holds, as the coordinator remembers it from its own routes.

An estimate: the worker may have evicted a page, or not have computed it yet. The worker itself decides what it reuses.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from cbdisagg.messages import Hash

STARTS = 1 << 16
NEWEST = 64


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
    """At most `limit` page hashes, the least recently routed forgotten first."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._hashes: OrderedDict[Hash, None] = OrderedDict()

    def add(self, hashes: Sequence[Hash]) -> None:
        for value in reversed(hashes):  # the start of a prefix is the last to be forgotten
            self._hashes[value] = None
            self._hashes.move_to_end(value)
        while len(self._hashes) > self.limit:
            self._hashes.popitem(last=False)

    def has(self, value: Hash) -> bool:
        """Is this page probably there?"""
        return value in self._hashes

    def count(self, hashes: Sequence[Hash]) -> int:
        """Leading pages of the chain that are probably there. A chain is forgotten from its end, so it has no gaps."""
        if not hashes or hashes[0] not in self._hashes:
            return 0
        return bisect_left(range(len(hashes)), True, key=lambda n: hashes[n] not in self._hashes)
