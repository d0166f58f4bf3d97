"""A worker that hangs while it starts is noticed, and nobody else."""

from __future__ import annotations

from cbdisagg.actors.starting import SILENT_S, Starting


class Watched:
    def __init__(self) -> None:
        self.now = 0.0
        self.hanging: list[tuple[str, int]] = []
        self.starting = Starting(lambda name, n, _: self.hanging.append((name, n)), lambda: self.now)

    def wait(self, seconds: float) -> None:
        for _ in range(int(seconds)):
            self.now += 1.0
            self.starting.look()


def test_silence_while_starting_is_noticed_once() -> None:
    watched = Watched()
    watched.starting.begins("decode-0", 7)
    watched.wait(SILENT_S)
    assert not watched.hanging
    watched.wait(3 * SILENT_S)
    assert watched.hanging == [("decode-0", 7)]


def test_a_word_now_and_then_is_enough() -> None:
    watched = Watched()
    watched.starting.begins("decode-0", 7)
    for _ in range(5):
        watched.wait(SILENT_S - 1)
        watched.starting.heard(7)
    assert not watched.hanging


def test_one_that_should_only_greet_is_given_less_time() -> None:
    watched = Watched()
    watched.starting.begins("decode-0", 7, 6.0)
    watched.wait(6)
    assert not watched.hanging
    watched.wait(1)
    assert watched.hanging == [("decode-0", 7)]


def test_who_is_a_member_or_has_ended_is_not_watched() -> None:
    watched = Watched()
    watched.starting.begins("decode-0", 7)
    watched.starting.over(7)
    watched.starting.heard(7)
    watched.wait(2 * SILENT_S)
    assert not watched.hanging


def test_after_a_pause_of_its_own_it_listens_first() -> None:
    watched = Watched()
    watched.starting.begins("decode-0", 7)
    watched.now += 10 * SILENT_S
    watched.starting.look()
    assert not watched.hanging
