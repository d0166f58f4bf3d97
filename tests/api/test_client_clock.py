"""Streams that nobody takes on, coordinators that say nothing: what the client does by a clock, which is the test's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from cbdisagg.api.client import TICK_S, Client, RequestRejected, Stream, StreamFailed
from cbdisagg.messages import (
    STATS_HEARTBEAT_S,
    Accepted,
    Address,
    Cancel,
    Generate,
    Lead,
    Members,
    Message,
    PoolInfo,
    Rejected,
    RequestId,
    Sampling,
    Stats,
    Suspect,
    Targets,
    TokenRun,
    Tokens,
    WorkerInfo,
)

API = Address("api", 7, "ipc://api")
SUPERVISOR = Address("supervisor", 1, "ipc://supervisor")
C1, C2 = Address("coordinator", 100, "ipc://c1"), Address("coordinator", 101, "ipc://c2")
D, E = Address("d", 21, "ipc://d"), Address("e", 31, "ipc://e")
RESUME_S, SILENT_S = 20.0, 4.0
WELL = Stats((), (), {}, True, "")


def members(term: int, workers: Sequence[Address], dead: Sequence[Address] = ()) -> Members:
    pool = PoolInfo(1, 1, "", 0, 0, 1, 8, 64, "")
    infos = tuple(WorkerInfo(address, "any", "host", "f", pool, 16, 8, 512) for address in workers)
    return Members(term, (API,), infos, (), tuple((address.name, address.incarnation) for address in dead))


class Harness:
    """A client that follows C1 and knows D; all that it has told; a clock that ticks only when the test lets it."""

    def __init__(self) -> None:
        self.now = 50.0
        self.told: list[tuple[Address, Message]] = []
        self.client = Client(
            7,
            lambda to, message: self.told.append((to, message)),
            model="m",
            page_size=2,
            resume_s=RESUME_S,
            silent_s=SILENT_S,
            now=lambda: self.now,
        )
        self.client.receive(SUPERVISOR, Lead(C1))
        self.client.receive(C1, members(100, [D]))
        self.client.receive(C1, WELL)
        assert self.client.ready

    def wait(self, seconds: float, *, hearing: Address | None = None) -> None:
        """Let time pass in ticks, in which a coordinator may say that it is well."""
        for _ in range(round(seconds / TICK_S)):
            self.now += TICK_S
            if hearing is not None:
                self.client.receive(hearing, WELL)
            self.client.tick()

    def submit(self) -> Stream:
        return self.client.submit([5, 6, 7], Sampling(max_tokens=8), Targets(1.0, 0.05))

    def accepted(self) -> Stream:
        stream = self.submit()
        self.client.receive(D, Accepted(stream.id, 0, D))
        return stream

    def suspects(self) -> list[tuple[Address, Suspect]]:
        return [(to, message) for to, message in self.told if isinstance(message, Suspect)]


def failure(stream: Stream) -> Exception | None:
    """What its reader gets next, if that is an error and nothing has to be waited for."""
    if not stream.ended:
        return None
    with pytest.raises((StreamFailed, RequestRejected)) as caught:
        stream.__anext__().send(None)  # type: ignore[attr-defined]
    return caught.value


# ------------------------------------------------------------------------------------------------------- resuming


def test_a_stream_whose_worker_is_gone_waits_for_another_but_not_for_ever() -> None:
    h = Harness()
    stream = h.accepted()
    h.client.receive(C1, members(100, [], dead=[D]))
    h.wait(RESUME_S, hearing=C1)
    assert not stream.ended
    h.wait(2 * TICK_S, hearing=C1)
    error = failure(stream)
    assert isinstance(error, StreamFailed)
    assert "limits.resume_s" in error.message
    assert h.client.streams == 0
    assert Cancel(stream.id, 1, "error") in [message for _, message in h.told]


def test_refusals_on_the_way_do_not_start_the_wait_anew() -> None:
    """A worker is listed, but none can take it: it is asked for again and again."""
    h = Harness()
    stream = h.accepted()
    h.client.receive(C1, members(100, [E], dead=[D]))
    for _ in range(round(RESUME_S)):
        h.client.receive(C1, Rejected(stream.id, stream.submission, 503, "no worker is ready"))
        h.wait(1.0, hearing=C1)
    assert not stream.ended
    assert stream.submission > 10
    h.wait(1.0, hearing=C1)
    assert isinstance(failure(stream), StreamFailed)


@pytest.mark.parametrize("sign", ["accepted", "tokens"])
def test_a_stream_that_has_been_taken_on_has_all_its_time_again(sign: str) -> None:
    h = Harness()
    stream = h.accepted()
    h.client.receive(C1, members(100, [E], dead=[D]))
    h.wait(RESUME_S - 1, hearing=C1)
    if sign == "accepted":
        h.client.receive(E, Accepted(stream.id, 1, E))
    else:
        h.client.receive(E, Tokens((TokenRun(stream.id, 1, 0, (3,)),)))
    h.wait(3 * RESUME_S, hearing=C1)
    assert not stream.ended, "a worker that has it may take its time"


def test_a_request_that_no_coordinator_takes_ends_too() -> None:
    """The first has gone, and no other comes."""
    h = Harness()
    told = h.submit()
    h.client.receive(SUPERVISOR, Lead(C2))
    late = h.submit()
    running = h.accepted()
    running.hear()
    h.wait(RESUME_S + 2 * TICK_S)
    assert [isinstance(failure(stream), StreamFailed) for stream in (told, late)] == [True, True]
    assert not running.ended, "its worker does without a coordinator"


def test_without_a_worker_a_new_request_is_refused_at_once() -> None:
    h = Harness()
    h.client.receive(C1, members(100, [], dead=[D]))
    h.client.receive(C1, Stats((), (), {}, False, "no any worker is running"))
    h.told.clear()
    error = failure(h.submit())
    assert isinstance(error, RequestRejected)
    assert (error.status, error.message, error.retry_after_s) == (503, "no any worker is running", 1.0)
    assert h.told == []


# -------------------------------------------------------------------------------------------------------- silence


def test_a_coordinator_that_stops_talking_is_not_ready_and_reported_once() -> None:
    h = Harness()
    h.wait(100.0, hearing=C1)
    h.wait(SILENT_S + STATS_HEARTBEAT_S)
    assert h.client.ready
    assert h.suspects() == []
    h.wait(TICK_S)
    assert h.client.not_ready_reason == "the coordinator has said nothing for 6 s"
    h.wait(30.0)
    assert h.suspects() == [(SUPERVISOR, Suspect("coordinator", 100, "silent for 6 s"))]


def test_its_successor_is_listened_to_anew() -> None:
    h = Harness()
    h.wait(10.0)
    h.client.receive(SUPERVISOR, Lead(C2))
    h.client.receive(C2, members(101, [D]))
    h.wait(60.0)
    assert len(h.suspects()) == 1, "it may take its time to start: it has not been heard yet"
    h.client.receive(C2, WELL)
    assert h.client.ready
    h.wait(10.0)
    assert [suspect.incarnation for _, suspect in h.suspects()] == [100, 101]


def test_what_an_older_one_says_is_no_sign_of_life() -> None:
    h = Harness()
    h.client.receive(SUPERVISOR, Lead(C2))
    h.client.receive(C2, members(101, [D]))
    h.client.receive(C2, WELL)
    h.wait(10.0, hearing=C1)
    assert [suspect.incarnation for _, suspect in h.suspects()] == [101]


def test_time_in_which_we_did_not_run_ourselves_does_not_count() -> None:
    """A machine that is too busy, or that slept: what the coordinator has said meanwhile is still in our queue."""
    h = Harness()
    for _ in range(5):
        h.now += 60.0
        h.client.tick()
    assert h.client.ready
    assert h.suspects() == []


def test_a_ready_coordinator_that_comes_back_is_ready_again() -> None:
    h = Harness()
    h.wait(SILENT_S + STATS_HEARTBEAT_S + TICK_S)
    assert not h.client.ready
    h.client.receive(C1, WELL)
    assert h.client.ready


def test_a_generate_is_still_told_while_the_coordinator_is_silent() -> None:
    """It may only be slow; if it is dead, the next one is asked again."""
    h = Harness()
    h.wait(SILENT_S + STATS_HEARTBEAT_S + TICK_S)
    stream = h.submit()
    assert [message.id for _, message in h.told if isinstance(message, Generate)] == [stream.id]
    h.client.receive(SUPERVISOR, Lead(C2))
    h.client.receive(C2, members(101, [D]))
    last = [message for to, message in h.told if to == C2]
    assert [(m.id, m.submission) for m in last if isinstance(m, Generate)] == [(RequestId(7, 0), 1)]
