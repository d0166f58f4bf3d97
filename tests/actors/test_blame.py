"""Who is blamed is blamed until it is known to be dead, and no longer."""

from __future__ import annotations

from cbdisagg.actors.blame import KEPT, Blame
from cbdisagg.messages import Address, Members, PoolInfo, Suspect, WorkerInfo

POOL = PoolInfo(0, 0, "", 0, 0, layers=1, pages=4, page_bytes=64, data_endpoint="")
LOST = Suspect("decode-0", 7, "messages were lost")


def members(*workers: tuple[str, int], dead: tuple[tuple[str, int], ...] = ()) -> Members:
    infos = tuple(WorkerInfo(Address(name, n, ""), "any", "here", "", POOL, 16, 8, 64) for name, n in workers)
    return Members(1, (), infos, (), dead)


def test_whoever_still_counts_a_suspect_as_a_member_is_told_again() -> None:
    blame = Blame()
    blame.add(LOST)
    assert blame.all() == [LOST]
    assert blame.again(members(("decode-0", 7), ("decode-1", 8))) == [LOST]
    assert blame.again(members(("decode-1", 8))) == [], "it knows"
    assert blame.again(members(("decode-0", 7))) == [LOST], "the next one does not"


def test_the_dead_and_the_replaced_are_forgotten() -> None:
    for evidence in (members(dead=(("decode-0", 7),)), members(("decode-0", 9))):
        blame = Blame()
        blame.add(LOST)
        assert blame.again(evidence) == []
        assert blame.all() == []


def test_many_names_do_not_fill_the_memory() -> None:
    blame = Blame()
    for n in range(3 * KEPT):
        blame.add(Suspect("x", n, "messages were lost"))
    assert [suspect.incarnation for suspect in blame.all()] == list(range(2 * KEPT, 3 * KEPT))
