"""What routing looks at: everybody in a small fleet, the few that matter in a large one; prefixes by bisection."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdisagg.core.board import EVERYBODY, FEW, Board, Ranking
from cbdisagg.core.policy import Link, Sight, View, look
from cbdisagg.core.residency import GENERATIONS, NEWEST, STARTS, Residency, Starts
from cbdisagg.messages import Address, Forecast, Hash, Role


def address(n: int) -> Address:
    return Address(f"w{n:04}", n + 1, "")


def view(n: int, role: Role = "any", running: int = 0, queued: int = 0, pin: Role = "any") -> View:
    forecast = Forecast(step_s=0.01 + 0.001 * running, row_s=0.001, token_s=0.001)
    return look(
        address(n),
        role,
        pin,
        forecast,
        sequences=running,
        unseen=0,
        streams=running,
        max_batch=8,
        queued_tokens=queued,
        room=1000,
        between_ends_s=1.0,
    )


def links(sight: Sight) -> list[Link]:
    """Those among its views."""
    chosen = {each.address for each in sight.views}
    return [link for decode, ways in sight.links.items() for link in ways.values() if {decode, link.prefill} <= chosen]


def everybody(worker: Address) -> bool:
    return True


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(-1, 4)), max_size=40))
def test_a_ranking_is_what_sorting_gives(changes: list[tuple[int, int]]) -> None:
    ranking, numbers = Ranking(), dict[Address, int]()
    for n, number in changes:  # -1: it leaves
        if number < 0:
            ranking.drop(address(n))
            numbers.pop(address(n), None)
        else:
            ranking.put(address(n), number)
            numbers[address(n)] = number
        assert list(ranking) == sorted(numbers, key=lambda worker: (numbers[worker], worker))


@given(st.lists(st.integers(0, 9), unique=True), st.integers(-1, 10))
def test_those_below_a_number_come_from_the_greatest_on(numbers: list[int], limit: int) -> None:
    ranking = Ranking()
    for number in numbers:
        ranking.put(address(number), number)
    assert list(ranking.below(limit)) == [address(n) for n in sorted(numbers, reverse=True) if n < limit]


def test_a_small_fleet_is_looked_at_whole() -> None:
    board = Board()
    for n in reversed(range(EVERYBODY)):
        board.put(view(n, queued=n), queued=n % 2)
    board.link(Link(address(0), address(1), 1e9, 10))
    sight = board.sight({address(3): 48}, 0.05, everybody, 0.0)
    assert [each.address for each in sight.views] == [address(n) for n in range(EVERYBODY)]
    assert sight.cached == {address(3): 48}
    assert links(sight) == [Link(address(0), address(1), 1e9, 10)] and board.queued == EVERYBODY // 2
    sight = board.sight({}, 0.05, lambda worker: worker != address(0), 0.0)
    assert len(sight.views) == EVERYBODY - 1 and not links(sight)


def fleet(prefillers: int, decoders: int) -> Board:
    """Loads and queues that grow with the number; every prefill worker reaches every decode worker."""
    board = Board()
    for n in range(prefillers):
        board.put(view(n, queued=n, pin="prefill"), 0)
    for n in range(decoders):
        board.put(view(1000 + n, running=n % 7, queued=decoders - n, pin="decode"), 0)
    for p in range(prefillers):
        for d in range(decoders):
            board.link(Link(address(p), address(1000 + d), 1e9, 10))
    return board


def test_of_many_the_best_of_each_kind_are_looked_at() -> None:
    board = fleet(40, 40)
    sight = board.sight({address(1020): 64, address(30): 32}, 0.0145, everybody, 0.0)
    chosen = {each.address for each in sight.views}
    assert {address(n) for n in range(FEW)} <= chosen  # the shortest queues of those that prefill
    assert {address(1000 + n) for n in (0, 7, 14, 21, 28, 35)} <= chosen  # those without load
    assert {address(1000 + n) for n in (3, 10, 17, 24, 31, 38)} <= chosen  # the longest steps that are short enough
    assert address(1020) in chosen and address(30) in chosen  # the prefix
    assert len(sight.views) <= 5 * FEW


def test_who_does_not_serve_is_passed_over() -> None:
    board = fleet(40, 40)
    sight = board.sight({}, 0.02, lambda worker: int(worker.name[1:]) % 2 == 1, 0.0)
    assert sight.views and all(int(each.address.name[1:]) % 2 == 1 for each in sight.views)
    assert not board.has(lambda worker: False) and board.has(everybody)


def test_a_decode_worker_comes_with_a_prefill_worker_that_reaches_it() -> None:
    """In racks: the shortest queues of all may be somewhere else."""
    board = Board()
    for n in range(60):
        board.put(view(n, queued=100 + n, pin="prefill"), 0)
        board.put(view(1000 + n, running=0 if n >= 50 else 5, pin="decode"), 0)
        for near in range(n - n % 10, n - n % 10 + 10):
            board.link(Link(address(near), address(1000 + n), 1e9, 10))
            board.link(Link(address(1000 + near), address(1000 + n), 1e9, 10))
    sight = board.sight({}, 0.02, everybody, 0.0)
    reached = {link.decode for link in links(sight) if int(link.prefill.name[1:]) < 1000}
    assert reached >= {each.address for each in sight.views if each.pin == "decode" and not each.sequences}


def test_a_worker_that_is_pinned_anew_is_looked_for_elsewhere() -> None:
    board = fleet(20, 20)
    board.put(view(1000, pin="prefill"), 0)
    board.put(view(0, pin="decode"), 0)
    chosen = {each.address: each.pin for each in board.sight({}, 0.02, everybody, 0.0).views}
    assert chosen[address(1000)] == "prefill" and chosen[address(0)] == "decode"


def test_who_leaves_takes_its_links_and_its_queue_along() -> None:
    board = fleet(2, 2)
    board.put(view(0), queued=5)
    board.drop(address(0))
    board.drop(address(1001))
    board.drop(address(1001))
    assert links(board.everybody(everybody)) == [Link(address(1), address(1000), 1e9, 10)] and board.queued == 0
    board.unlink(address(1), address(1000))
    board.unlink(address(7), address(8))
    assert not links(board.everybody(everybody))


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12), st.integers(1, 12))
def test_leading_pages_are_found_by_bisection_as_by_counting(chains: list[list[int]], limit: int) -> None:
    """Pages are named by all that is before them, so a chain is known up to a point and no further."""
    residency = Residency(limit)
    for chain in chains:
        hashes = [Hash(bytes(chain[: n + 1])) for n in range(len(chain))]
        counted = next((n for n, value in enumerate(hashes) if not residency.has(value)), len(hashes))
        assert residency.count(hashes) == counted
        residency.add(hashes)


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_pages_are_forgotten_oldest_first_and_about_so_many_are_kept(limit: int) -> None:
    residency, length = Residency(limit), 5
    chains = [[Hash(bytes([n, page])) for page in range(length)] for n in range(100)]
    for n, chain in enumerate(chains):
        residency.add(chain)
        residency.add(chains[0])  # routed again and again: never the oldest
        known = [residency.count(other) for other in chains[1 : n + 1]]
        assert known == sorted(known) and residency.count(chains[0]) == length
        assert sum(known) + length <= limit + GENERATIONS * 2 * length
        assert sum(known) >= min(n * length, limit * 3 // 4 - GENERATIONS * length)


def test_who_was_sent_a_beginning_is_known_for_the_newest_of_both() -> None:
    starts = Starts()
    for worker in (*range(NEWEST + 3), 5):
        starts.add(Hash(b"first"), worker)
    assert starts.of(Hash(b"first")) == [*(n for n in range(3, NEWEST + 3) if n != 5), 5]
    assert starts.of(Hash(b"other")) == []
    for n in range(STARTS):
        starts.add(Hash(n.to_bytes(4, "big")), n)
    assert starts.of(Hash(b"first")) == [] and starts.of(Hash(bytes(4))) == [0]
