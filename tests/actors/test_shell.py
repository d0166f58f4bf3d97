"""The shell around a scripted core: effects in order, timers, threads, journal, failures that end the process."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import msgspec
import pytest

from cbdisagg.actors.journal import Journal, read_journal
from cbdisagg.actors.lane import Lane, Tray
from cbdisagg.actors.life import Life
from cbdisagg.actors.local import LocalMailbox, Network
from cbdisagg.actors.shell import Deed, Shell
from cbdisagg.config import Config
from cbdisagg.core.effects import Effect, Forget, Note, Retire, RunStep, Tell, Wake
from cbdisagg.core.events import CoordinatorEvent, FromCoordinatorInbox, Tick
from cbdisagg.messages import Address, AttemptId, Finished, RequestId, StepPlan, Suspect, ToCoordinator

HERE = Address("here", 1, "local://here")
PEER = Address("peer", 2, "local://peer")
PLAN = StepPlan(1, (), (), (), ())
FORGET = Forget(AttemptId(1, RequestId(1, 2), 3))


def suspect(n: int) -> FromCoordinatorInbox:
    return FromCoordinatorInbox(PEER, Suspect("x", n, "why"))


class Script:
    """A core that answers each event with the next list of effects, and remembers what it was given."""

    def __init__(self, *answers: list[Effect]) -> None:
        self.answers = list(answers)
        self.events: list[CoordinatorEvent] = []
        self.times: list[float] = []
        self.changed = asyncio.Event()

    def handle(self, event: CoordinatorEvent, now: float) -> list[Effect]:
        self.events.append(event)
        self.times.append(now)
        self.changed.set()
        return self.answers.pop(0) if self.answers else []

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.events) < count:
                self.changed.clear()
                await self.changed.wait()


class Deeds:
    def __init__(self) -> None:
        self.done: list[Deed] = []

    def perform(self, deed: Deed) -> None:
        self.done.append(deed)


class Silent:
    """A post for cores that tell nothing."""

    address = HERE

    def tell(self, to: Address, message: object) -> None:
        raise AssertionError(f"told {message} to {to}")

    def forget(self, incarnation: int) -> None: ...

    def close(self) -> None: ...


async def test_effects_are_performed_in_order(caplog: pytest.LogCaptureFixture) -> None:
    network = Network()
    decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
    here, peer = (LocalMailbox(name, n, network, decoder) for name, n in (("here", 1), ("peer", 2)))
    heard: list[tuple[Address, ToCoordinator]] = []
    peer.start(lambda sender, message: heard.append((sender, message)), lambda peer, reason: None)
    messages = [Finished(RequestId(1, n), 0, n) for n in range(2)]
    deeds = Deeds()
    core = Script([Tell(PEER, messages[0]), RunStep(PLAN), Note("warning", "careful"), FORGET, Tell(PEER, messages[1])])
    with caplog.at_level(logging.DEBUG):
        Shell(core, here, deeds).handle(suspect(1))
    network.deliver()
    assert heard == [(here.address, messages[0]), (here.address, messages[1])]
    assert deeds.done == [RunStep(PLAN), FORGET]
    assert [(record.levelname, record.message) for record in caplog.records] == [("WARNING", "careful")]


async def test_a_deed_without_hands_is_a_bug() -> None:
    with pytest.raises(TypeError, match="without an engine"):
        Shell(Script([RunStep(PLAN)]), Silent()).handle(suspect(1))


async def test_a_core_that_retires_says_so_once_all_before_it_is_told() -> None:
    network = Network()
    decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
    here = LocalMailbox("here", 1, network, decoder)
    left_behind: list[int] = []
    core = Script([Tell(PEER, Finished(RequestId(1, 0), 0, 0)), Retire()])
    Shell(core, here, on_retire=lambda: left_behind.append(len(network.queue))).handle(suspect(1))
    assert left_behind == [1]
    with pytest.raises(TypeError, match="nobody asked to leave"):
        Shell(Script([Retire()]), Silent()).handle(suspect(1))


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


async def test_a_tick_comes_at_the_last_time_asked_for_and_never_early() -> None:
    clock = Clock()
    core = Script([Wake(100.5), Wake(100.004)], [])
    shell = Shell(core, Silent(), clock=clock)
    shell.handle(suspect(1))
    rang = asyncio.Event()
    asyncio.get_running_loop().call_later(0.012, rang.set)  # the loop's time goes on, the shell's clock stands still
    await rang.wait()
    assert len(core.events) == 1
    clock.now = 100.004
    await core.until(2)
    assert core.events[1] == Tick()
    assert core.times[1] == 100.004
    shell.close()


async def test_events_of_threads_arrive_in_order_and_wake_the_loop_once_for_all() -> None:
    loop = asyncio.get_running_loop()
    core = Script()
    shell = Shell(core, Silent())
    wakes = 0
    soon = loop.call_soon_threadsafe

    def counted(*arguments: object) -> asyncio.Handle:
        nonlocal wakes
        wakes += 1
        return soon(*arguments)  # type: ignore[arg-type]

    loop.call_soon_threadsafe = counted  # type: ignore[method-assign,assignment]
    thread = threading.Thread(target=lambda: [shell.from_thread(suspect(n)) for n in range(100)])
    thread.start()
    thread.join()  # the loop stands still meanwhile
    await core.until(100)
    assert core.events == [suspect(n) for n in range(100)]
    assert wakes == 1


async def test_a_lane_works_in_order_and_stops_at_the_first_failure() -> None:
    failure: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    loop = asyncio.get_running_loop()
    done: list[int] = []
    lane = Lane("lane", lambda error: loop.call_soon_threadsafe(failure.set_result, error))

    def burst() -> None:
        raise ZeroDivisionError("broken")

    lane.do(lambda: done.append(1))
    lane.do(lambda: done.append(2))
    lane.do(burst)
    lane.do(lambda: done.append(3))
    error = await asyncio.wait_for(failure, 10)
    assert isinstance(error, ZeroDivisionError)
    assert done == [1, 2]


async def test_a_tray_filled_while_it_is_emptied_keeps_the_order() -> None:
    taken: list[int] = []
    tray: Tray[int]

    def take(number: int) -> None:
        taken.append(number)
        if number < 5:
            tray.put(number + 1)

    tray = Tray(asyncio.get_running_loop(), take)
    tray.put(0)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert taken == [0, 1, 2, 3, 4, 5]


async def test_a_failure_in_a_callback_ends_the_life() -> None:
    life = Life()
    life.loop.set_exception_handler(life.on_loop_error)

    def burst() -> None:
        raise ZeroDivisionError("broken")

    life.loop.call_soon(burst)
    with pytest.raises(ZeroDivisionError):
        await asyncio.wait_for(life.ended, 10)


async def test_a_broken_connection_does_not_end_the_life() -> None:
    life = Life()
    life.on_loop_error(life.loop, {"message": "", "exception": ConnectionResetError(), "transport": object()})
    assert not life.ended.done()
    life.stop()
    await life.ended


Check: TypeAlias = Callable[[], None]


async def test_invariants_are_checked_after_every_event() -> None:
    checks = 0

    def check() -> None:
        nonlocal checks
        checks += 1
        if checks == 2:
            raise AssertionError("page 3 has two writers")

    shell = Shell(Script(), Silent(), check=check)
    shell.handle(suspect(1))
    with pytest.raises(AssertionError, match="two writers"):
        shell.handle(suspect(2))


class Raising:
    def handle(self, event: CoordinatorEvent, now: float) -> list[Effect]:
        raise ZeroDivisionError


async def test_the_journal_holds_every_event_also_the_one_that_broke_the_core(tmp_path: Path) -> None:
    journal = Journal(tmp_path, HERE, Config())
    shell = Shell(Script([Note("info", "x")]), Silent(), journal=journal, clock=lambda: 5.25)
    shell.handle(suspect(1))
    broken = Shell(Raising(), Silent(), journal=journal, clock=lambda: 6.5)
    with pytest.raises(ZeroDivisionError):
        broken.handle(suspect(2))
    shell.close()
    header, records = read_journal(tmp_path / "here.1.0000.journal")
    assert (header.address, header.worker, header.config) == (HERE, None, Config())
    (first, second) = records
    assert first[:4] == (0, 5.25, "here", suspect(1))
    assert first[4] is not None
    assert second == (1, 6.5, "here", suspect(2), None)
