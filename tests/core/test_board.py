"""What routing looks at: everybody in a small fleet, the few that matter in a large one; prefixes by bisection."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cbdisagg.core.board import EVERYBODY, FEW, Board, Ranking
from cbdisagg.core.policy import Link, View
from cbdisagg.core.residency import NEWEST, STARTS, Residency, Starts
from cbdisagg.messages import Address, Hash, Role


def address(n: int) -> Address:
    return Address(f"w{n:04}", n + 1, "")


def view(n: int, role: Role = "any", running: int = 0, queued: int = 0) -> View:
    return View(address(n), role, running, 0, queued, 8, 0.01, 0.001, 0)


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


def test_a_small_fleet_is_looked_at_whole() -> None:
    board = Board()
    for n in reversed(range(EVERYBODY)):
        board.put(view(n, queued=n), queued=n % 2)
    board.link(Link(address(0), address(1), 1e9, 10))
    views, links = board.shortlist({address(3): 48}, everybody)
    assert [each.address for each in views] == [address(n) for n in range(EVERYBODY)]
    assert [each.cached for each in views] == [48 if n == 3 else 0 for n in range(EVERYBODY)]
    assert links == board.links() and board.queued == EVERYBODY // 2
    views, links = board.shortlist({}, lambda worker: worker != address(0))
    assert len(views) == EVERYBODY - 1 and not links


def fleet(prefillers: int, decoders: int) -> Board:
    """Loads and queues that grow with the number; every prefill worker reaches every decode worker."""
    board = Board()
    for n in range(prefillers):
        board.put(view(n, "prefill", queued=n), 0)
    for n in range(decoders):
        board.put(view(1000 + n, "decode", running=n % 7, queued=decoders - n), 0)
    for p in range(prefillers):
        for d in range(decoders):
            board.link(Link(address(p), address(1000 + d), 1e9, 10))
    return board


def test_of_many_the_best_of_each_kind_are_looked_at() -> None:
    board = fleet(40, 40)
    views, links = board.shortlist({address(1020): 64, address(30): 32}, everybody)
    chosen = {each.address for each in views}
    assert {address(n) for n in range(FEW)} <= chosen  # the shortest queues of those that prefill
    assert {address(1000 + n) for n in (0, 7, 14, 21, 28, 35)} <= chosen  # those without load
    assert {address(1039), address(1038)} <= chosen  # the shortest queues of those that decode
    assert address(1020) in chosen and address(30) in chosen  # the prefix
    assert len(views) <= 5 * FEW
    assert {(link.prefill, link.decode) for link in links} == {
        (p.address, d.address) for p in views if p.role == "prefill" for d in views if d.role == "decode"
    }


def test_who_does_not_serve_is_passed_over() -> None:
    board = fleet(40, 40)
    views, _ = board.shortlist({}, lambda worker: int(worker.name[1:]) % 2 == 1)
    assert views and all(int(each.address.name[1:]) % 2 == 1 for each in views)
    assert not board.has(lambda worker: False) and board.has(everybody)


def test_a_decode_worker_comes_with_a_prefill_worker_that_reaches_it() -> None:
    """In racks: the shortest queues of all may be somewhere else."""
    board = Board()
    for n in range(60):
        board.put(view(n, "prefill", queued=100 + n), 0)
        board.put(view(1000 + n, "decode", running=0 if n >= 50 else 5), 0)
        for near in range(n - n % 10, n - n % 10 + 10):
            board.link(Link(address(near), address(1000 + n), 1e9, 10))
            board.link(Link(address(1000 + near), address(1000 + n), 1e9, 10))
    views, links = board.shortlist({}, everybody)
    reached = {link.decode for link in links if link.prefill in {v.address for v in views if v.role == "prefill"}}
    assert reached >= {each.address for each in views if each.role == "decode" and each.running == 0}


def test_who_leaves_takes_its_links_and_its_queue_along() -> None:
    board = fleet(2, 2)
    board.put(view(0, "prefill"), queued=5)
    board.drop(address(0))
    board.drop(address(1001))
    assert board.links() == [Link(address(1), address(1000), 1e9, 10)] and board.queued == 0
    board.unlink(address(1), address(1000))
    board.unlink(address(7), address(8))
    assert not board.links()


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=12), st.integers(1, 12))
def test_leading_pages_are_found_by_bisection_as_by_counting(chains: list[list[int]], limit: int) -> None:
    """Pages are named by all that is before them, so a chain is known up to a point and no further."""
    residency = Residency(limit)
    for chain in chains:
        hashes = [Hash(bytes(chain[: n + 1])) for n in range(len(chain))]
        counted = next((n for n, value in enumerate(hashes) if not residency.has(value)), len(hashes))
        assert residency.count(hashes) == counted
        residency.add(hashes)


def test_who_was_sent_a_beginning_is_known_for_the_newest_of_both() -> None:
    starts = Starts()
    for worker in (*range(NEWEST + 3), 5):
        starts.add(Hash(b"first"), worker)
    assert starts.of(Hash(b"first")) == [*(n for n in range(3, NEWEST + 3) if n != 5), 5]
    assert starts.of(Hash(b"other")) == []
    for n in range(STARTS):
        starts.add(Hash(n.to_bytes(4, "big")), n)
    assert starts.of(Hash(b"first")) == [] and starts.of(Hash(bytes(4))) == [0]
