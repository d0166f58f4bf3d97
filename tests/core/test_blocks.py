"""The page pool by itself: any order of its operations keeps every page in exactly one place."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import DataObject, data, integers

from cbdisagg.core.blocks import OutOfPages, Pages
from cbdisagg.messages import AttemptId, Hash, Page, RequestId


def attempt(n: int) -> AttemptId:
    return AttemptId(1, RequestId(1, n), 1)


def hashes(*names: str) -> list[Hash]:
    return [Hash(name.encode()) for name in names]


def published(pages: Pages, *names: str) -> list[Page]:
    """Held pages under these hashes."""
    taken = pages.reserve(len(names))
    for page, value in zip(taken, hashes(*names), strict=True):
        pages.publish(page, value)
    return taken


def test_low_numbers_go_first_so_that_neighbours_form_runs() -> None:
    pages = Pages(6)
    first, second = pages.reserve(2), pages.reserve(2)
    assert (first, second) == ([0, 1], [2, 3])
    pages.release(first)
    assert pages.reserve(3) == [0, 1, 4]


def test_a_reservation_that_does_not_fit_takes_nothing() -> None:
    pages = Pages(3)
    pages.reserve(2)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 3 available"):
        pages.reserve(2)
    assert pages.available() == 1


def test_a_published_page_is_cached_when_its_last_reader_leaves_and_can_be_pinned_again() -> None:
    pages = Pages(3)
    taken = published(pages, "a", "b")
    pages.pin(taken[:1])
    pages.release(taken)
    assert list(pages.cached) == [taken[1]]
    assert pages.match(hashes("a", "b", "c"), 3) == taken
    assert pages.match(hashes("a", "b"), 1) == taken[:1]
    assert pages.match(hashes("x", "a"), 2) == []
    pages.pin(taken)
    assert not pages.cached
    assert pages.readers == {taken[0]: 2, taken[1]: 1}


def test_the_end_of_the_oldest_prefix_is_evicted_first() -> None:
    pages = Pages(4)
    old, new = published(pages, "a", "b"), published(pages, "c", "d")
    pages.release(old)
    pages.release(new)
    pages.reserve(1)
    assert pages.match(hashes("a", "b"), 2) == old[:1]
    pages.reserve(2)
    assert pages.match(hashes("a"), 1) == []
    assert pages.match(hashes("c", "d"), 2) == new[:1]


def test_a_second_copy_of_a_page_stays_private() -> None:
    pages = Pages(2)
    [first], [second] = published(pages, "a"), published(pages, "a")
    pages.release([first, second])
    assert (list(pages.cached), pages.free) == ([first], [second])


def test_a_page_with_a_writer_is_not_published_and_is_quarantined_until_the_writer_has_settled() -> None:
    pages = Pages(4)
    mine, other = pages.reserve(2, attempt(1)), pages.reserve(1, attempt(2))
    with pytest.raises(ValueError, match="remote writer"):
        pages.publish(mine[0], Hash(b"a"))
    pages.release(mine)
    assert pages.quarantined == set(mine)
    assert pages.available() == 1
    pages.settle(attempt(2))
    assert pages.quarantined == set(mine)
    pages.settle(attempt(1))
    pages.settle(attempt(1))
    assert pages.available() == 3
    pages.publish(other[0], Hash(b"a"))


def test_a_page_that_settles_while_it_is_held_stays_held() -> None:
    pages = Pages(2)
    held = pages.reserve(2, attempt(1))
    pages.settle(attempt(1))
    assert not pages.writers and pages.available() == 0
    pages.release(held)
    assert pages.available() == 2


class PagesMachine(RuleBasedStateMachine):
    """Readers, writers and hashes in any order, against a plain account of who holds what."""

    def __init__(self) -> None:
        super().__init__()
        self.pages = Pages(8)
        self.held: list[list[Page]] = []
        self.attempts: dict[int, set[Page]] = {}
        self.count = 0

    @rule(count=integers(0, 9), remote=integers(0, 3))
    def reserve(self, count: int, remote: int) -> None:
        writer = attempt(self.count) if not remote else None
        if count > self.pages.available():
            with pytest.raises(OutOfPages, match=f"{count} pages wanted"):
                self.pages.reserve(count, writer)
            return
        free = self.pages.free
        assert len(free) == self.pages.count_free()
        taken = self.pages.reserve(count, writer)
        assert count > len(free) or taken == free[:count] == sorted(taken), "not the lowest that are free"
        assert not {page for pages in self.held for page in pages} & set(taken), "a held page is given again"
        assert not set().union(*self.attempts.values()) & set(taken), "a page is given while it is written"
        self.held.append(taken)
        if writer is not None:
            self.attempts[self.count] = set(taken)
        self.count += 1

    @precondition(lambda self: self.held)
    @rule(data=data())
    def release(self, data: DataObject) -> None:
        self.pages.release(self.held.pop(data.draw(integers(0, len(self.held) - 1))))

    @precondition(lambda self: self.attempts)
    @rule(data=data())
    def settle(self, data: DataObject) -> None:
        number = sorted(self.attempts)[data.draw(integers(0, len(self.attempts) - 1))]
        self.pages.settle(attempt(number))
        del self.attempts[number]

    @precondition(lambda self: any(self.held))
    @rule(data=data(), value=integers(0, 5))
    def publish(self, data: DataObject, value: int) -> None:
        page = data.draw(integers(0, 7))
        written = set().union(*self.attempts.values())
        if any(page in pages for pages in self.held) and page not in written:
            self.pages.publish(Page(page), Hash(bytes([value])))

    @rule(value=integers(0, 5))
    def pin(self, value: int) -> None:
        hit = self.pages.match([Hash(bytes([value]))], 1)
        self.pages.pin(hit)
        self.held.append(hit)

    @invariant()
    def each_page_is_in_one_place(self) -> None:
        pages = self.pages
        places = [*pages.free, *pages.readers, *pages.cached, *pages.quarantined]
        assert sorted(places) == list(range(pages.total))

    @invariant()
    def readers_and_writers_are_counted(self) -> None:
        for page in range(self.pages.total):
            assert self.pages.readers.get(Page(page), 0) == sum(page in pages for pages in self.held)
        assert set(self.pages.writers) == set().union(*self.attempts.values())
        assert self.pages.quarantined == set(self.pages.writers) - {page for pages in self.held for page in pages}

    @invariant()
    def the_index_is_one_to_one(self) -> None:
        assert {page: value for value, page in self.pages.by_hash.items()} == self.pages.hash_of
        assert not set(self.pages.hash_of) & {*self.pages.free, *self.pages.writers}


TestPages = PagesMachine.TestCase
TestPages.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
