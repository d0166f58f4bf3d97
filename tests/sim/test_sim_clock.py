"""Virtual time and what shares it: the order of calls, timers, steps that slow each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdisagg.sim.bus import Bus
from cbdisagg.sim.clock import Clock, Timer


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0]), max_size=30))
def test_calls_come_by_time_and_then_as_they_were_asked_for(times: list[float]) -> None:
    clock, came = Clock(), []
    for n, at in enumerate(times):
        clock.at(at, lambda n=n: came.append((clock.now, n)))
    assert not clock.run()
    assert came == sorted((at, n) for n, at in enumerate(times))


def test_an_effect_does_not_come_before_its_cause() -> None:
    clock = Clock()
    clock.at(2.0, lambda: clock.at(1.0, lambda: None))
    with pytest.raises(ValueError, match=r"a call for 1\.0 s, and it is 2\.0 s"):
        clock.run()


def test_a_run_ends_at_its_time_or_when_it_is_stopped() -> None:
    clock, came = Clock(), []
    for at in (1.0, 2.0, 3.0):
        clock.at(at, came.append, at)
    assert not clock.run(until=2.0)
    assert came == [1.0, 2.0]
    clock.at(2.5, clock.stop)
    assert clock.run() and came == [1.0, 2.0]
    assert not clock.run() and came == [1.0, 2.0, 3.0]


def test_a_later_wish_replaces_an_earlier_one() -> None:
    clock, rung = Clock(), []
    timer = Timer(clock, lambda: rung.append(clock.now))
    timer.set(5.0)
    timer.set(3.0)
    clock.run()
    assert rung == [3.0]
    timer.set(1.0)  # the past: at once
    clock.run()
    timer.set(9.0)
    timer.cancel()
    clock.run()
    assert rung == [3.0, 5.0]  # the clock had gone on to the call that no longer held


def test_steps_beside_each_other_slow_each_other_for_as_long_as_both_run() -> None:
    clock, ends = Clock(), {}
    bus = Bus(clock, beside_step=0.5, beside_push=0.0)
    bus.work(2.0, lambda: ends.setdefault("first", clock.now))
    clock.at(1.0, lambda: bus.work(3.0, lambda: ends.setdefault("second", clock.now)))
    clock.run()
    # One second alone, then one second of work in 1.5; by then the second has done 1.0 of 3.0, and has the rest alone.
    assert ends == {"first": pytest.approx(2.5), "second": pytest.approx(4.5)}


def test_a_push_slows_what_runs_and_a_dead_worker_s_step_no_longer_does() -> None:
    clock, ends = Clock(), {}
    bus = Bus(clock, beside_step=1.0, beside_push=1.0)
    bus.work(2.0, lambda: ends.setdefault("step", clock.now))
    clock.at(1.0, bus.land, bus.push(1.0))
    clock.run()
    assert ends == {"step": pytest.approx(2.5)}
    start = clock.now
    dead = bus.work(8.0, lambda: ends.setdefault("dead", clock.now))
    bus.work(2.0, lambda: ends.setdefault("other", clock.now))
    clock.after(1.0, bus.drop, dead)
    clock.run()
    assert ends == {"step": pytest.approx(2.5), "other": pytest.approx(start + 1.0 + 1.5)}


def test_a_push_that_is_spread_over_a_step_slows_as_much_as_one_at_full_speed() -> None:
    def end(weight: float) -> float:
        clock, ends = Clock(), []
        bus = Bus(clock, beside_step=0.0, beside_push=0.5)
        bus.work(4.0, lambda: ends.append(clock.now))
        clock.at(1.0 / weight, bus.land, bus.push(weight))
        clock.run()
        return float(ends[0])

    assert end(1.0) == pytest.approx(4.0 + 1.0 / 3)  # of one second, a third was lost
    assert end(0.25) == pytest.approx(4.0 + 4.0 / 9)  # of four, a ninth each: less at once for longer
    assert end(0.5) < end(0.25)


def test_a_step_that_copies_slows_the_others_and_not_itself() -> None:
    clock, ends = Clock(), {}
    bus = Bus(clock, beside_step=0.0, beside_push=1.0)
    bus.work(2.0, lambda: ends.setdefault("copies", clock.now), copying=0.5)
    bus.work(3.0, lambda: ends.setdefault("other", clock.now))
    clock.run()
    assert ends == {"copies": pytest.approx(2.0), "other": pytest.approx(2.0 + 3.0 - 2.0 / 1.5)}


@pytest.mark.parametrize(
    ("cores", "threads", "late"), [(0, 1, (0, 0)), (3, 1, (0, 0)), (2, 1, (0, 0.5)), (2, 2, (0, 0.5)), (5, 2, (0, 0))]
)
def test_others_take_their_time_from_who_has_worked_least_once_no_core_is_free(
    cores: int, threads: int, late: tuple[float, float]
) -> None:
    clock, ends = Clock(), {}
    bus = Bus(clock, 0.0, 0.0, cores, threads)
    bus.disturb(9.0)  # nobody is at work
    bus.work(2.0, lambda: ends.setdefault("busy", clock.now), worked=7.0)
    bus.work(3.0, lambda: ends.setdefault("idle", clock.now), worked=1.0)
    clock.at(1.0, bus.disturb, 0.5)
    clock.run()
    assert ends == {"busy": pytest.approx(2.0 + late[0]), "idle": pytest.approx(3.0 + late[1])}


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.1, 3)), min_size=1, max_size=6), st.floats(0, 1))
def test_no_step_ends_sooner_than_alone_nor_later_than_beside_all_others(
    steps: list[tuple[float, float]], beside: float
) -> None:
    clock, ends = Clock(), {}
    bus = Bus(clock, beside, 0.0)
    for n, (at, seconds) in enumerate(steps):
        clock.at(at, lambda n=n, s=seconds: bus.work(s, lambda: ends.setdefault(n, clock.now)))
    clock.run()
    slowest = 1 + beside * (len(steps) - 1)
    for n, (at, seconds) in enumerate(steps):
        assert at + seconds - 1e-9 <= ends[n] <= at + seconds * slowest + 1e-9
