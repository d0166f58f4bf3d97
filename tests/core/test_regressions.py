"""What the state machines have found, in its smallest form."""

from __future__ import annotations

import msgspec
import pytest
from core_world import SUPERVISOR, CoordinatorActor, Setting, WorkerActor, World, expected_output

from cbdisagg.config import Config, Policy
from cbdisagg.core.request import State
from cbdisagg.messages import Address, Lead, PeerDown, Sampling, Targets

TARGETS = Targets(0.5, 0.05)


def world(*roles: str, **policy: object) -> World:
    made = World(Setting(roles or ("prefill", "decode"), Config(policy=Policy(**{"mode": "disaggregate", **policy}))))
    made.settle()
    return made


def test_a_prompt_that_is_too_long_leaves_nothing_at_the_coordinator() -> None:
    service = world()
    stream = service.api.submit([1] * service.setting.max_len, Sampling(max_tokens=1), TARGETS, None)
    service.settle()
    assert stream.ended
    assert not service.coordinator.core.placed


def test_a_stream_that_was_let_in_is_not_refused_for_a_full_queue_when_it_is_resubmitted() -> None:
    service = world("any", queue_limit=2)
    streams = [service.api.submit([1, n], Sampling(max_tokens=4), TARGETS, None) for n in range(2)]
    [worker] = service.workers
    while not worker.plans:
        next(service.actions())()
    service.kill(worker.address.incarnation)
    service.settle()
    assert [len(stream.output) for stream in streams] == [4, 4]
    service.check_quiet()


@pytest.mark.parametrize("actor", ["worker", "coordinator"])
def test_a_timer_that_rings_on_time_is_not_set_for_the_same_time_again(actor: str) -> None:
    """With a virtual clock it would ring for ever: `now - last < x` and `last + x <= now` may both hold of floats."""
    service = world("any")
    subject: WorkerActor | CoordinatorActor = service.workers[0] if actor == "worker" else service.coordinator
    for n in range(300):
        if actor == "worker":
            subject.receive(SUPERVISOR, Lead(service.coordinator.address))  # something to report
        else:
            subject.receive(SUPERVISOR, PeerDown("x", 100 + n, "killed"))
        for _ in range(3):
            assert subject.wake_at is not None
            service.now = max(service.now, subject.wake_at)
            subject.tick()
            assert subject.wake_at is None or subject.wake_at > service.now, f"set again for {service.now}"
        service.now += 0.1


def test_what_was_computed_for_an_older_submission_is_not_taken_for_the_newer_one() -> None:
    """Both ask the same prefill worker to fill pages of the same request: their attempts must differ."""
    service = world()
    prefill, decode = service.workers
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=3), TARGETS, None)
    while not prefill.core.jobs:
        service.deliver(next(iter(service.busy_pairs())))
    again = msgspec.structs.replace(stream.request, submission=1)
    service.coordinator.receive(service.api.address, again)
    stream.park()  # as the client does when it asks again
    stream.parked = False
    while prefill.plans:
        prefill.step()  # the first attempt is complete, and KvReady on its way
    service.deliver((service.coordinator.address.incarnation, decode.address.incarnation))
    [reserved] = decode.core.requests.values()
    assert reserved.spec.submission == 1
    service.deliver((prefill.address.incarnation, decode.address.incarnation))
    assert reserved.state is State.RESERVED
    service.settle()
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)
    service.check_quiet()


def run(service: World) -> None:
    """All that can happen while no time passes."""
    while (action := next(service.actions(), None)) is not None:
        action()


def test_a_suspect_s_stream_is_not_moved_to_a_newcomer_who_would_not_hear_of_its_end() -> None:
    service = world("any", "any", mode="aggregate")
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=6), TARGETS, None)
    while not stream.output:
        next(service.actions())()
    [owner] = [worker for worker in service.workers if worker.core.requests]
    [other] = [worker for worker in service.workers if worker is not owner]
    service.stopped |= {SUPERVISOR.incarnation, owner.address.incarnation}
    service.suspect(owner.address.incarnation)
    run(service)
    service.kill(other.address.incarnation)  # its successor is told of everybody but the suspect
    run(service)
    owner.relieve(stream.request.id)
    run(service)
    service.kill(owner.address.incarnation)
    service.stopped.clear()
    service.settle()
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)
    service.check_quiet()


def test_an_unknown_message_is_a_bug() -> None:
    service = world("any")
    with pytest.raises(TypeError, match="not a message to a worker"):
        service.workers[0].receive(Address("x", 1, ""), Sampling(max_tokens=1))
    with pytest.raises(TypeError, match="not a message to the coordinator"):
        service.coordinator.receive(Address("x", 1, ""), Sampling(max_tokens=1))


def test_a_stream_whose_acceptance_was_lost_goes_on_when_its_writer_dies() -> None:
    """Its tokens name the writer as well."""
    service = world("any")
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=4), TARGETS, None)
    [worker] = service.workers
    answers = (worker.address.incarnation, service.api.address.incarnation)
    while not service.queues.get(answers):
        next(service.actions())()
    service.lose(answers)  # Accepted
    while not stream.output:
        worker.step()
        service.deliver(answers)
    service.settle()
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)
    service.check_quiet()


def test_a_suspicion_that_dies_with_the_coordinator_is_told_to_the_next() -> None:
    """Else the stream waits for ever for what was lost, while its worker is well."""
    service = world("any")
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=4), TARGETS, None)
    [worker] = service.workers
    tokens = (worker.address.incarnation, service.api.address.incarnation)
    while not stream.output:
        next(service.actions())()
    while worker.plans:
        worker.step()
    while service.queues[tokens]:
        service.lose(tokens)
    old = service.coordinator.address.incarnation
    service.deliver((service.api.address.incarnation, old))
    service.queues[old, SUPERVISOR.incarnation].clear()
    service.start_coordinator()
    service.settle()
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)
    service.check_quiet()


def test_a_worker_whose_greeting_was_lost_is_replaced() -> None:
    """It will not greet the same coordinator twice, and would never be a member."""
    service = world("any")
    [worker] = service.workers
    service.start_coordinator()
    service.deliver((SUPERVISOR.incarnation, worker.address.incarnation))
    service.lose((worker.address.incarnation, service.coordinator.address.incarnation))
    service.settle()
    assert [w.address.incarnation for w in service.workers] != [worker.address.incarnation]
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=4), TARGETS, None)
    service.settle()
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)
