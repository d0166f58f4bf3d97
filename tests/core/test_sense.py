"""Messages that decode and make no sense: noted, answered where somebody might wait, and without effect."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from core_world import Setting, WorkerActor, World, expected_output
from msgspec.structs import replace

from cbdisagg.config import Config, Policy
from cbdisagg.core.request import State
from cbdisagg.messages import (
    AttemptId,
    Generate,
    KvReady,
    Prefill,
    PushStopped,
    RequestId,
    Route,
    Sampled,
    Sampling,
    StopPush,
    Submit,
    Targets,
    pack,
)


def world() -> World:
    made = World(Setting(("prefill", "decode", "decode"), Config(policy=Policy(mode="disaggregate"))))
    made.settle()
    return made


def valid_prefill(service: World, decode: WorkerActor) -> Prefill:
    id = RequestId(service.api.address.incarnation, 7)
    request = Generate(id, 0, pack([1, 2, 3]), b"", b"root", b"", Sampling(max_tokens=2), Targets(1, 1), 0.0)
    return Prefill(AttemptId(decode.address.incarnation, id, 1), request, 0, pack([0, 1]))


WRONG: dict[str, Callable[[Prefill], Prefill]] = {
    "half a page number": lambda p: replace(p, pages=p.pages[:5]),
    "no pages": lambda p: replace(p, pages=b""),
    "too few pages": lambda p: replace(p, pages=pack([0])),
    "too many pages": lambda p: replace(p, pages=pack([0, 1, 2])),
    "a page that the pool has not": lambda p: replace(p, pages=pack([0, 99])),
    "a negative page": lambda p: replace(p, pages=pack([-1, 0])),
    "a page twice": lambda p: replace(p, pages=pack([1, 1])),
    "a negative first page": lambda p: replace(p, first_page=-1, pages=pack([0, 1, 2])),
    "a first page beyond the end": lambda p: replace(p, first_page=2, pages=b""),
    "half a token": lambda p: replace(p, request=replace(p.request, prompt=b"abc")),
    "half a hash": lambda p: replace(p, request=replace(p.request, hashes=b"abc")),
    "no prompt": lambda p: replace(p, request=replace(p.request, prompt=b"")),
    "too long a prompt": lambda p: replace(p, request=replace(p.request, prompt=pack([1] * 99))),
    "another's attempt": lambda p: replace(p, attempt=p.attempt._replace(decode=5)),
    "an attempt of another request": lambda p: replace(p, attempt=p.attempt._replace(request=RequestId(1, 1))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_senseless_prefill_is_declined(wrong: str) -> None:
    service = world()
    prefill, decode, _ = service.workers
    message = WRONG[wrong](valid_prefill(service, decode))
    prefill.receive(decode.address, message)
    assert not prefill.core.supply
    [(_, answer)] = service.queues[(prefill.address.incarnation, decode.address.incarnation)]
    assert answer == PushStopped(message.attempt, "declined")
    service.settle()
    service.check_quiet()


def test_the_sensible_one_is_taken() -> None:
    service = world()
    prefill, decode, _ = service.workers
    prefill.receive(decode.address, valid_prefill(service, decode))
    assert prefill.core.jobs


def reserved(service: World) -> tuple[WorkerActor, WorkerActor, WorkerActor, AttemptId]:
    """(prefill, decode, bystander, attempt) of a hand-over in progress."""
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=3), Targets(0.5, 0.05), None)
    prefill = service.workers[0]
    while not prefill.core.jobs:
        service.deliver(next(iter(service.busy_pairs())))
    [attempt] = prefill.core.jobs
    [decode] = [worker for worker in service.workers if stream.id in worker.core.requests]
    [bystander] = [worker for worker in service.workers[1:] if worker is not decode]
    return prefill, decode, bystander, attempt


def check_goes_on(service: World) -> None:
    service.settle()
    service.check_quiet()
    [stream] = service.api.streams
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)


@pytest.mark.parametrize(
    "message",
    [
        lambda attempt: KvReady(attempt, Sampled((1,)), 0.0, 0.0),
        lambda attempt: PushStopped(attempt, "declined"),
        lambda attempt: PushStopped(attempt, "stopped"),
    ],
)
def test_only_the_worker_that_was_asked_can_end_a_reservation(message: Callable[[AttemptId], object]) -> None:
    service = world()
    _, decode, bystander, attempt = reserved(service)
    decode.receive(bystander.address, message(attempt))
    assert decode.core.handoffs.reservations[attempt].ready is None
    check_goes_on(service)


def test_only_the_owner_can_stop_a_job() -> None:
    service = world()
    prefill, _, bystander, attempt = reserved(service)
    prefill.receive(bystander.address, StopPush(attempt))
    [job] = prefill.core.jobs.values()
    assert job.state is not State.ENDED
    check_goes_on(service)


@pytest.mark.parametrize(
    "ready",
    [
        lambda attempt: KvReady(attempt, Sampled(()), 0.0, 0.0),
        lambda attempt: KvReady(attempt, Sampled((1, 2)), 0.0, 0.0),
        lambda attempt: KvReady(attempt, Sampled((-1,)), 0.0, 0.0),
        lambda attempt: KvReady(attempt, Sampled((1,)), 0.0, 0.0, b"abc"),
    ],
)
def test_a_worker_that_sends_a_senseless_kv_ready_is_suspected(ready: Callable[[AttemptId], KvReady]) -> None:
    """It may still write to the pages: they stay its own until its supervisor has killed it."""
    service = world()
    prefill, decode, _, attempt = reserved(service)
    decode.receive(prefill.address, ready(attempt))
    assert decode.core.handoffs.reservations[attempt].ready is None
    check_goes_on(service)
    assert prefill not in service.workers


def test_damaged_pages_are_computed_again() -> None:
    service = World(Setting(("prefill", "decode"), Config(policy=Policy(mode="disaggregate")), checksums=True))
    service.settle()
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=3), Targets(0.5, 0.05), None)
    decode = service.workers[1]
    while not any(isinstance(m, KvReady) for queue in service.queues.values() for _, m in queue):
        next(service.actions())()
    [reservation] = decode.core.handoffs.reservations.values()
    decode.pool[reservation.pages[0]][0] += 1
    service.settle()
    service.check_quiet()
    assert decode.core.reporter.local_prefills == {"damaged": 1}
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)


@pytest.mark.parametrize("field", [{"prompt": b"abc"}, {"output": b"abc"}, {"hashes": b"abc"}, {"prompt": b""}])
def test_a_senseless_request_is_not_taken(field: dict[str, bytes]) -> None:
    service = world()
    prefill, decode, _ = service.workers
    request = replace(valid_prefill(service, decode).request, **field)
    leader = service.coordinator.address
    decode.receive(leader, Submit(request, Route(prefill.address, decode.address), leader.incarnation))
    assert not decode.core.requests
