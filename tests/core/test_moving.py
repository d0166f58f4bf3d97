"""A running request goes on elsewhere: what moves, who writes, and who is left with nothing (rule 16)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import pytest
from core_world import Setting, WorkerActor, World, expected_output

from cbdisagg.api.client import Stream
from cbdisagg.config import Config, Debug, Policy
from cbdisagg.core.effects import Note
from cbdisagg.core.flow import PAUSE_S
from cbdisagg.core.request import State
from cbdisagg.messages import Accepted, KvReady, Prefill, Return, Role, Sampling, Submit, Targets

TARGETS = Targets(0.5, 0.05)
PROMPT = [1, 2, 3, 1, 2]
LONG = Sampling(max_tokens=9, logprobs=0)


def world(*roles: Role, mode: str = "aggregate", kind: str = "shm", **setting: object) -> World:
    config = Config(policy=Policy(mode=mode))  # type: ignore[arg-type]  # one of the three
    made = World(Setting(roles, config, kind=lambda *_: kind, **setting))  # type: ignore[arg-type]  # tests' own
    made.settle()
    return made


def until(service: World, true: Callable[[], bool]) -> None:
    for _ in range(5_000):
        if true():
            return
        next(service.actions())()
    raise AssertionError("it has not come to that")


def start(service: World, prompt: list[int] = PROMPT, sampling: Sampling = LONG, tokens: int = 2) -> Stream:
    """A stream that has got some tokens."""
    stream = service.api.submit(prompt, sampling, TARGETS, None)
    until(service, lambda: len(stream.output) >= tokens)
    return stream


def worker_of(service: World, stream: Stream) -> WorkerActor:
    assert stream.worker is not None
    [worker] = [worker for worker in service.workers if worker.address == stream.worker]
    return worker


def sent(service: World, kind: type) -> list[object]:
    return [message for queue in service.queues.values() for _, message in queue if isinstance(message, kind)]


def finish(service: World, *streams: Stream) -> None:
    service.settle()
    service.check_quiet()
    for stream in streams:
        wanted = expected_output(list(stream.request.prompt[::4]), stream.request.sampling, service.setting.max_len)
        assert list(stream.output) == wanted


@pytest.mark.parametrize("kind", ["shm", "zmq"])
@pytest.mark.parametrize("plans_ahead", [0, 1])
@pytest.mark.parametrize("checksums", [False, True])
def test_a_running_request_moves_with_its_pages_and_its_stream_does_not_notice(
    kind: str, plans_ahead: int, checksums: bool
) -> None:
    service = world("any", "any", kind=kind, plans_ahead=plans_ahead, checksums=checksums)
    stream = start(service)
    old = worker_of(service, stream)
    [other] = [worker for worker in service.workers if worker is not old]
    old.leave()
    until(service, lambda: old.retired)
    assert not stream.ended, "it has moved, not finished"
    taken = other.core.requests[stream.id]
    until(service, lambda: taken.state is State.RUNNING)
    assert taken.computed >= len(PROMPT), "its KV has come along"
    steps = other.core.reporter.steps
    finish(service, stream)
    assert stream.submission == 0
    assert sum(service.api.client.resumed.values()) == 0
    left = stream.request.sampling.max_tokens - 3
    assert 0 < other.core.reporter.steps - steps <= left, "no prompt has been computed again"


def test_tokens_drawn_while_it_waits_for_the_new_worker_go_along() -> None:
    service = world("any", "any")
    stream = start(service)
    old = worker_of(service, stream)
    old.leave()
    until(service, lambda: bool(sent(service, Prefill)))  # the new worker has asked, knowing so many tokens
    [asked] = sent(service, Prefill)
    assert isinstance(asked, Prefill)
    while len(old.core.requests[stream.id].output) < len(asked.request.output) // 4 + 2:
        old.step()
    until(service, lambda: bool(sent(service, KvReady)))
    [ready] = sent(service, KvReady)
    assert isinstance(ready, KvReady)
    assert len(ready.sampled.ids) >= 2
    finish(service, stream)


def test_without_a_way_for_pages_the_request_moves_alone() -> None:
    service = world("any", "any", kind="")
    stream = start(service)
    old = worker_of(service, stream)
    old.leave()
    until(service, lambda: old.retired)
    assert not stream.ended
    finish(service, stream)
    assert stream.submission == 0


def test_a_waiting_request_moves_without_being_computed_here() -> None:
    service = world("any", "any", max_batch=1)
    streams = [start(service), start(service)]  # one on each
    waiting = [service.api.submit([3, n], Sampling(max_tokens=2), TARGETS, None) for n in range(2)]
    until(service, lambda: all(stream.heard for stream in waiting))
    old = worker_of(service, waiting[0])
    old.leave()
    finish(service, *streams, *waiting)
    assert [stream.submission for stream in (*streams, *waiting)] == [0] * 4


def test_a_request_in_mid_prefill_moves_once_it_decodes() -> None:
    service = world("prefill", "decode", "decode", mode="disaggregate")
    stream = service.api.submit(PROMPT, LONG, TARGETS, None)
    until(service, lambda: any(worker.core.handoffs.reservations for worker in service.workers))
    [old] = [worker for worker in service.workers if worker.core.handoffs.reservations]
    old.leave()
    assert not sent(service, Return)
    finish(service, stream)
    assert stream.submission == 0


def test_with_nobody_to_take_it_a_request_is_finished_where_it_is() -> None:
    service = world("any")
    stream = start(service)
    [old] = service.workers
    old.leave()
    finish(service, stream)
    assert stream.submission == 0
    assert old.retired


def test_a_leaving_worker_gets_nothing_new() -> None:
    service = world("any", "any")
    stream = start(service)
    old = worker_of(service, stream)
    old.leave()
    until(service, lambda: any(member.leaving for member in service.coordinator.core.workers.values()))
    new = [start(service, [n, 3], Sampling(max_tokens=2), tokens=1) for n in range(3)]
    assert all(stream.worker != old.address for stream in new)
    finish(service, stream, *new)


def test_a_worker_that_nobody_needs_retires_at_once_and_once() -> None:
    service = world("any", "any")
    [old, _] = service.workers
    old.leave()
    assert old.retired
    service.settle()
    service.check_quiet()


def test_a_request_that_ends_before_it_has_moved_leaves_nothing_at_the_new_worker() -> None:
    service = world("any", "any")
    stream = start(service, sampling=Sampling(max_tokens=4), tokens=1)
    old = worker_of(service, stream)
    old.leave()
    until(service, lambda: bool(sent(service, Submit)))
    while old.plans:
        old.step()  # to its end, before the new worker has asked
    finish(service, stream)


def test_a_cancel_reaches_both_ends_of_a_move() -> None:
    service = world("any", "any")
    stream = start(service)
    old = worker_of(service, stream)
    old.leave()
    until(service, lambda: bool(sent(service, Prefill)))
    service.api.cancel(stream)
    service.settle()
    service.check_quiet()


@pytest.mark.parametrize("dies", ["old", "new"])
@pytest.mark.parametrize("at", [Submit, Prefill, KvReady, Accepted])
def test_a_stream_survives_a_death_at_any_moment_of_a_move(dies: str, at: type) -> None:
    """It depends on two workers until the new one has spoken; the messages of the dead one are lost."""
    service = world("any", "any", "any")
    stream = start(service)
    old = worker_of(service, stream)
    old.leave()
    until(service, lambda: bool(sent(service, at)))
    moving = [worker for worker in service.workers if stream.id in worker.core.requests and worker is not old]
    victim = old if dies == "old" or not moving else moving[0]
    for pair in [pair for pair in service.queues if pair[0] == victim.address.incarnation]:
        service.queues[pair].clear()
    service.kill(victim.address.incarnation)
    finish(service, stream)


def test_a_stream_flows_off_a_worker_that_is_late_and_loses_nothing() -> None:
    """Four on one worker, one of them with a target that it cannot meet; then a second worker comes."""
    service = World(
        Setting(
            ("any",),
            Config(debug=Debug(trace=True)),
            pages=256,
            max_batch=8,
            step_s=lambda slices: 0.01 * slices,
        )
    )
    service.settle()
    loose, tight = Targets(5.0, 1.0), Targets(5.0, 0.001)
    streams = [
        service.api.submit([1, 2, n], Sampling(max_tokens=120), tight if n == 0 else loose, None) for n in range(4)
    ]
    until(service, lambda: all(len(stream.output) >= 2 for stream in streams))
    [old] = service.workers
    service.start_worker("any-1", "any")
    other = service.workers[1]
    random = Random(0)
    while not service.coordinator.core.placement.board.everybody(lambda _: True).links.get(other.address):
        random.choice(list(service.actions()))()
    service.now += PAUSE_S
    until(service, lambda: any(stream.worker == other.address for stream in streams))
    moved = [stream for stream in streams if stream.worker == other.address]
    assert moved == [streams[1]], "the oldest of those that are equally far ahead, and not the one that is late"
    assert old.core.steps.to_relieve(service.now) is None, "it waits whether that has helped"
    finish(service, *streams)
    assert [stream.submission for stream in streams] == [0] * 4 and not sum(service.api.client.resumed.values())
    assert service.coordinator.core.decisions["remote", "relief"] >= 1
    notes = [e.text for _, _, effects in service.coordinator.journal or () for e in effects if isinstance(e, Note)]
    [why, *_] = [
        note for note in notes if note.startswith(f"request {service.api.address.incarnation}.1: any-0 > any-1")
    ]
    assert "(relief) for" in why and "instead of any-0 steps" in why


def test_a_new_coordinator_learns_who_is_leaving() -> None:
    service = world("any", "any")
    stream = start(service)
    old = worker_of(service, stream)
    old.leave()
    for pair in [pair for pair in service.queues if pair[1] == service.coordinator.address.incarnation]:
        service.queues[pair].clear()
    service.start_coordinator()
    until(service, lambda: old.retired)
    finish(service, stream)
