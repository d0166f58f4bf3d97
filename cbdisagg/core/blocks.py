"""Pages of one worker's KV pool: who reads them, who writes them, when they are free.

Knows page numbers and hashes, never bytes. Life cycle of a page:
    free -> held (reserve) -> cached (last reader leaves, the page is published) -> held again (pin) or free (evicted)
    held with a remote writer -> held (settle: the writer has finished) or, when its last reader leaves first,
    quarantined -> free (settle: the writer has stopped, or its process is known to be dead)
A page with a remote writer is never shared: it is published only after it has settled. Sharing is by whole pages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import cast

from cbdisagg.messages import AttemptId, Hash, Page


class OutOfPages(Exception):
    """The pool cannot serve a reservation now; the caller waits or preempts."""


class Pages:
    """`total` pages numbered from 0. Low numbers are handed out first, so that neighbours form runs.

    Pages that nobody has ever had are a number, not a list: a pool in a GPU's memory has tens of thousands.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._fresh = 0  # pages from here on have never been taken
        self._back: list[Page] = []  # a heap of free pages that have, all below
        self.readers: dict[Page, int] = {}
        self.writers: dict[Page, AttemptId] = {}
        self._written: dict[AttemptId, list[Page]] = {}  # the same, by attempt: a pool may have thousands of both
        self.cached: OrderedDict[Page, None] = OrderedDict()  # oldest first: the order of eviction
        self.quarantined: set[Page] = set()
        self.by_hash: dict[Hash, Page] = {}
        self.hash_of: dict[Page, Hash] = {}

    @property
    def free(self) -> list[Page]:
        """In the order in which they will be handed out."""
        return [*sorted(self._back), *_pages(self._fresh, self.total)]

    def count_free(self) -> int:
        return len(self._back) + self.total - self._fresh

    def available(self) -> int:
        """Pages that a reservation can take now, evicting cached ones if need be."""
        return self.count_free() + len(self.cached)

    def reserve(self, count: int, writer: AttemptId | None = None) -> list[Page]:
        """Take `count` pages for one new reader, to be filled here or, with a `writer`, by a remote attempt."""
        if count > self.available():
            raise OutOfPages(f"{count} pages wanted, {self.available()} of {self.total} available")
        while self.count_free() < count:
            self._evict()
        taken = self._take(count)
        for page in taken:
            self.readers[page] = 1
            if writer is not None:
                self.writers[page] = writer
        if writer is not None:
            self._written.setdefault(writer, []).extend(taken)
        return taken

    def match(self, hashes: Sequence[Hash], most: int) -> list[Page]:
        """The longest run of published pages for a chain of hashes, at most `most` pages. Does not pin them."""
        found: list[Page] = []
        for value in hashes[:most]:
            page = self.by_hash.get(value)
            if page is None:
                break
            found.append(page)
        return found

    def pin(self, pages: Iterable[Page]) -> None:
        """One more reader for each of these published pages."""
        for page in pages:
            self.cached.pop(page, None)
            self.readers[page] = self.readers.get(page, 0) + 1

    def release(self, pages: Iterable[Page]) -> None:
        """One reader leaves each page. Pages are cached in reverse order: the end of a prefix is evicted first."""
        for page in reversed(list(pages)):
            self.readers[page] -= 1
            if self.readers[page]:
                continue
            del self.readers[page]
            if page in self.writers:
                self.quarantined.add(page)
            elif page in self.hash_of:
                self.cached[page] = None
            else:
                heappush(self._back, page)

    def publish(self, page: Page, value: Hash) -> None:
        """A held page is full and its content is final: others may share it. A second copy stays private."""
        if page in self.writers:
            raise ValueError(f"page {page} has a remote writer and cannot be published")
        if value not in self.by_hash and page not in self.hash_of:
            self.by_hash[value] = page
            self.hash_of[page] = value

    def settle(self, attempt: AttemptId) -> None:
        """The remote writer `attempt` will not write again: its held pages stay, its quarantined ones are free."""
        for page in self._written.pop(attempt, ()):
            del self.writers[page]
            if page in self.quarantined:
                self.quarantined.remove(page)
                heappush(self._back, page)

    def _take(self, count: int) -> list[Page]:
        """The lowest free ones; there are so many."""
        taken = [heappop(self._back) for _ in range(min(count, len(self._back)))]
        start, self._fresh = self._fresh, self._fresh + count - len(taken)
        return [*taken, *_pages(start, self._fresh)]

    def _evict(self) -> None:
        page, _ = self.cached.popitem(last=False)
        del self.by_hash[self.hash_of.pop(page)]
        heappush(self._back, page)


def _pages(start: int, end: int) -> Iterable[Page]:
    return cast(Iterable[Page], range(start, end))
