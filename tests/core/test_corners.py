"""Cases that no walk and hardly a state machine comes to: rare numbers, late messages, who has not said a word yet."""

from __future__ import annotations

from core_world import SUPERVISOR, Setting, WorkerActor, World, expected_output

from cbdisagg.config import Config, Policy
from cbdisagg.messages import (
    Address,
    Cancel,
    Finished,
    Hello,
    Load,
    PeerDown,
    Rejected,
    Return,
    Route,
    Sampling,
    Submit,
    Targets,
    Up,
)

TARGETS = Targets(0.5, 0.05)


def world(*roles: str) -> World:
    made = World(Setting(roles, Config(policy=Policy(mode="disaggregate"))))  # type: ignore[arg-type]
    made.settle()
    return made


def sent(service: World, kind: type) -> list[object]:
    return [message for queue in service.queues.values() for _, message in queue if isinstance(message, kind)]


def test_who_died_before_it_was_announced_is_no_member() -> None:
    service = world("any")
    late = Address("api-9", 99, "")
    service.coordinator.receive(SUPERVISOR, PeerDown(late.name, late.incarnation, "killed", "api"))
    service.coordinator.receive(SUPERVISOR, Up(late, "api", 0))
    assert late.incarnation not in service.coordinator.core.apis


def test_a_worker_that_has_told_no_load_yet_gets_nothing() -> None:
    service = world("any")
    service.start_worker("any-1", "any")
    new = service.workers[-1]
    service.deliver((SUPERVISOR.incarnation, new.address.incarnation))
    hello = (new.address.incarnation, service.coordinator.address.incarnation)
    assert isinstance(service.queues[hello][0][1], Hello)
    service.deliver(hello)
    assert any(isinstance(message, Load) for _, message in service.queues[hello])
    streams = [service.api.submit([1, n], Sampling(max_tokens=2), TARGETS, None) for n in range(3)]
    api = (service.api.address.incarnation, service.coordinator.address.incarnation)
    while service.queues[api]:
        service.deliver(api)
    assert not service.queues.get((service.coordinator.address.incarnation, new.address.incarnation)) or not any(
        isinstance(message, Submit)
        for _, message in service.queues[service.coordinator.address.incarnation, new.address.incarnation]
    )
    service.settle()
    assert all(len(stream.output) == 2 for stream in streams)


def test_a_cancel_by_way_of_the_coordinator_reaches_both_ends_of_a_move() -> None:
    """The api has not heard who has its request, which is on its way to another worker meanwhile."""
    service = world("any", "any")
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=12), TARGETS, None)
    while not any(worker.core.requests for worker in service.workers):
        service.deliver(next(iter(service.busy_pairs())))
    [old] = [worker for worker in service.workers if worker.core.requests]
    answers = (old.address.incarnation, service.api.address.incarnation)
    held = service.queues.pop(answers)
    old.leave()
    while not any(isinstance(message, Submit) for message in sent(service, Submit)):
        next(service.actions())()
        if answers in service.queues:
            held += service.queues.pop(answers)
    service.api.cancel(stream)
    service.deliver((service.api.address.incarnation, service.coordinator.address.incarnation))
    assert len(sent(service, Cancel)) == 2
    service.queues[answers] = held
    service.settle()
    service.check_quiet()


def test_a_move_ends_when_the_stream_comes_again_as_its_giver_is_suspected() -> None:
    """The giver may still push: the stream goes on in pages that it does not know."""
    service = world("any", "any")
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=12), TARGETS, None)
    while not stream.output:
        next(service.actions())()
    [old] = [worker for worker in service.workers if worker.core.requests]
    [new] = [worker for worker in service.workers if worker is not old]
    old.leave()
    while not new.core.handoffs.reservations:
        next(service.actions())()
    service.suspect(old.address.incarnation)
    service.deliver((service.api.address.incarnation, service.coordinator.address.incarnation))
    to_new = (service.coordinator.address.incarnation, new.address.incarnation)
    while service.queues[to_new]:
        service.deliver(to_new)
    assert new.core.requests[stream.id].moves, "the suspect may have handed it over meanwhile"
    api = service.api.address.incarnation
    for pair in [(to_new[0], api), (api, to_new[0]), to_new]:  # before the supervisor has killed it
        while service.queues[pair]:
            service.deliver(pair)
    assert new.core.requests[stream.id].spec.submission == 1
    assert new.core.pages.quarantined
    service.settle()
    service.check_quiet()
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)


def test_what_is_too_long_to_move_stays_and_is_not_refused() -> None:
    service = world("any")
    [worker] = service.workers
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=2), TARGETS, None)
    too_long = stream.request.prompt * service.setting.max_len
    elsewhere = Address("any-9", 9, "")
    request = stream.request.__class__(
        **{name: getattr(stream.request, name) for name in stream.request.__struct_fields__}
        | {"prompt": too_long, "hashes": b"", "submission": 7}
    )
    term = service.coordinator.address.incarnation
    worker.receive(service.coordinator.address, Submit(request, Route(elsewhere, worker.address), term, moves=True))
    assert not sent(service, Rejected)
    assert any(finished.submission == 7 for finished in sent(service, Finished))  # type: ignore[attr-defined]
    service.settle()
    assert list(stream.output) == expected_output([1, 2, 3], stream.request.sampling, service.setting.max_len)


def test_what_is_returned_by_a_stranger_goes_nowhere() -> None:
    service = world("any", "any")
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=2), TARGETS, None)
    service.coordinator.receive(Address("any-9", 9, ""), Return(stream.request))
    assert not sent(service, Submit)


def test_a_landing_that_comes_after_its_attempt_is_over_changes_nothing() -> None:
    service = world("prefill", "decode")
    _, decode = service.workers
    assert isinstance(decode, WorkerActor)
    stream = service.api.submit([1, 2, 3], Sampling(max_tokens=3), TARGETS, None)
    while not decode.core.handoffs.reservations:
        next(service.actions())()
    [attempt] = decode.core.handoffs.reservations
    service.api.cancel(stream)
    service.settle()
    assert decode.core.handoffs.landed(attempt) is None
    assert decode.core.handoffs.settle(attempt) == (None, [])
