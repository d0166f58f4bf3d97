"""Who is ready, doubted, suspected: judged by what workers say of their progress, in the coordinator's own time."""

from __future__ import annotations

from core_world import SUPERVISOR, Setting, World

from cbdisagg.config import Config, Policy, Workers
from cbdisagg.messages import Load, Sampling, Stats, Suspect, Targets

SECONDS = Policy(silent_s=6.0, suspect_s=20.0)


def world() -> World:
    made = World(Setting(("any", "any"), Config(policy=SECONDS, workers=(Workers(role="any", count=2),))))
    made.settle()
    return made


def pass_time(service: World, seconds: float, says: dict[int, Load | None]) -> None:
    """The coordinator's ticks go on; the workers named say this (None: nothing), the others their heartbeats."""
    coordinator = service.coordinator
    end = service.now + seconds
    while service.now < end:
        service.now += 0.5
        for member in list(coordinator.core.workers.values()):
            load = says.get(member.address.incarnation, member.load)
            if load is not None:
                coordinator.receive(member.address, load)
        coordinator.tick()


def to_supervisor(service: World) -> list[Suspect]:
    pair = (service.coordinator.address.incarnation, SUPERVISOR.incarnation)
    return [message for _, message in service.queues.get(pair, ()) if isinstance(message, Suspect)]


def last_stats(service: World) -> Stats:
    pair = (service.coordinator.address.incarnation, service.api.address.incarnation)
    return [message for _, message in service.queues[pair] if isinstance(message, Stats)][-1]


def busy(service: World, incarnation: int) -> Load:
    load = service.coordinator.core.workers[incarnation].load
    assert load is not None
    return Load(**{name: getattr(load, name) for name in load.__struct_fields__ if name != "busy"}, busy=True)


def test_a_silent_worker_is_suspected_after_silent_s() -> None:
    service = world()
    silent = service.workers[0].address
    pass_time(service, 5, {silent.incarnation: None})
    assert not to_supervisor(service)
    pass_time(service, 2, {silent.incarnation: None})
    assert [suspect.incarnation for suspect in to_supervisor(service)] == [silent.incarnation]


def test_a_worker_with_work_and_no_progress_is_doubted_then_suspected() -> None:
    service = world()
    stuck = service.workers[0].address
    says = {stuck.incarnation: busy(service, stuck.incarnation)}
    pass_time(service, 9.5, says)
    assert last_stats(service).ready, "the other worker serves"
    assert not to_supervisor(service)
    for n in range(4):
        service.api.submit([n], Sampling(max_tokens=1), Targets(0.5, 0.05), None)
    pair = (service.api.address.incarnation, service.coordinator.address.incarnation)
    while service.queues[pair]:
        service.deliver(pair)
    placed = {placed.decode for placed in service.coordinator.core.placed.values()}
    assert placed == {service.workers[1].address}, "it is routed around"
    pass_time(service, 11, says)
    assert [suspect.incarnation for suspect in to_supervisor(service)] == [stuck.incarnation]


def test_ready_is_false_within_ten_seconds_when_all_are_stuck() -> None:
    service = world()
    says = {worker.address.incarnation: busy(service, worker.address.incarnation) for worker in service.workers}
    pass_time(service, 9.5, says)
    stats = last_stats(service)
    assert not stats.ready
    assert "any worker" in stats.reason


def test_progress_ends_a_doubt() -> None:
    service = world()
    stuck = service.workers[0].address
    pass_time(service, 9.5, {stuck.incarnation: busy(service, stuck.incarnation)})
    idle = service.workers[1].address
    pass_time(service, 12, {stuck.incarnation: service.coordinator.core.workers[idle.incarnation].load})
    assert not to_supervisor(service)
    assert last_stats(service).ready


def test_a_coordinator_that_was_stopped_suspects_nobody() -> None:
    service = world()
    service.now += 60
    service.coordinator.tick()
    assert not to_supervisor(service)
    pass_time(service, 5, {})
    assert not to_supervisor(service)


def test_the_api_hears_from_the_coordinator_though_nothing_changes() -> None:
    service = world()
    pair = (service.coordinator.address.incarnation, service.api.address.incarnation)
    service.queues.get(pair, []).clear()
    pass_time(service, 10, {})
    heard = [message for _, message in service.queues[pair] if isinstance(message, Stats)]
    assert len(heard) >= 3
