"""Scenarios in which one schedule shows what a rule of the protocol is for, where a walk would see no harm or no time.

Each builds a world, leads it to the place, and asserts. `mutations` runs them with and without the rule.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from core_world import SUPERVISOR, Setting, WorkerActor, World, expected_output

from cbdisagg.api.client import Stream
from cbdisagg.config import Config, Kv, Policy, Scheduler
from cbdisagg.messages import Sampling, Submit, Targets

TARGETS = Targets(0.5, 0.05)


def world(*roles: str, pages: int = 8, cache: bool = False, max_batch: int = 3) -> World:
    """A service that is ready."""
    policy = Policy(mode="disaggregate", suspect_s=1e9, silent_s=1e9)
    config = Config(kv=Kv(prefix_cache=cache), scheduler=Scheduler(token_budget=8), policy=policy)
    made = World(Setting(roles, config, pages=pages, max_batch=max_batch))  # type: ignore[arg-type]
    made.settle()
    return made


def ask(service: World, prompt: list[int], tokens: int, sibling_of: Stream | None = None) -> Stream:
    return service.api.submit(prompt, Sampling(max_tokens=tokens), TARGETS, sibling_of)


def until(service: World, condition: Callable[[], Any]) -> None:
    """Let things happen, in any order, until it is so."""
    for _ in range(1000):
        if condition():
            return
        action = next(service.actions(), None)
        if action is None:
            break
        action()
    raise AssertionError(f"it does not come to that: {service.describe()}")


def finish(service: World, *streams: Stream) -> None:
    service.settle()
    service.check_quiet()
    for stream in streams:
        prompt = list(stream.request.prompt[::4])
        assert list(stream.output) == expected_output(prompt, stream.request.sampling, service.setting.max_len)


def computed(worker: WorkerActor) -> int:
    return worker.core.reporter.generated_tokens


# ------------------------------------------------------------------------------ nobody computes for nobody


def what_is_cancelled_is_given_up_at_once() -> None:
    """Not only when its first token is refused: until then it holds its place, and later pages and a writer."""
    service = world("any", max_batch=1)
    [worker] = service.workers
    running, waiting = ask(service, [1, 2], 12), ask(service, [2, 1], 2)
    until(service, lambda: running.output and waiting.worker)
    service.api.cancel(waiting)
    for pair in service.busy_pairs():
        service.deliver(pair)
    assert waiting.id not in worker.core.requests, "it waits here and has no reader"
    finish(service, running)


def a_submission_that_arrives_after_its_stream_has_ended_is_refused() -> None:
    """Cancelled while one coordinator's Submit is on its way, which the next one knows nothing of."""
    service = world("any")
    stream = ask(service, [1, 2], 12)
    [worker] = service.workers
    service.deliver((service.api.address.incarnation, service.coordinator.address.incarnation))
    old = service.coordinator.address.incarnation
    service.start_coordinator()
    service.api.cancel(stream)
    service.deliver((old, worker.address.incarnation))
    service.settle()
    service.check_quiet()
    assert computed(worker) < 6, "the worker has gone on for a stream that has no reader"


def an_api_that_dies_has_nothing_computed_any_more() -> None:
    service = world("any")
    stream = ask(service, [1, 2], 12)
    until(service, lambda: len(stream.output) == 2)
    service.kill(service.api.address.incarnation)
    service.settle()
    service.check_quiet()
    assert computed(service.workers[0]) < 8, "the worker has gone on for an api that is dead"


# --------------------------------------------------------------------------------------------- membership


def what_an_older_coordinator_says_of_members_is_dropped() -> None:
    """Its last word, that there is no api, comes after the next one has led a request of the new api here."""
    service = world("any")
    [worker] = service.workers
    service.kill(service.api.address.incarnation)
    old = service.coordinator.address.incarnation
    down = (1, old)
    while service.coordinator.core.apis:
        service.deliver(down)  # and tells all that there is none
    late = service.queues.pop((old, worker.address.incarnation))
    service.start_coordinator()
    service.settle()
    stream = ask(service, [1, 2], 6)
    until(service, lambda: len(stream.output) == 2)
    service.queues[old, worker.address.incarnation] = late
    finish(service, stream)


def half_a_membership_is_told_to_nobody() -> None:
    """The workers greet a new coordinator before the supervisor has told it of the apis."""
    service = world("any")
    [worker] = service.workers
    stream = ask(service, [1, 2], 6)
    until(service, lambda: len(stream.output) == 2)
    service.start_coordinator()
    new = service.coordinator.address.incarnation
    service.deliver((1, worker.address.incarnation))
    service.deliver((worker.address.incarnation, new))
    while service.queues.get((new, worker.address.incarnation)):
        service.deliver((new, worker.address.incarnation))
    assert stream.id in worker.core.requests, "the worker has taken its api for dead"
    finish(service, stream)


def a_route_of_an_older_coordinator_is_dropped() -> None:
    """Nobody waits for it: the newer one does not know of it, and the api has asked again."""
    service = world("any")
    [worker] = service.workers
    stream = ask(service, [1, 2], 3)
    service.deliver((service.api.address.incarnation, service.coordinator.address.incarnation))
    old = (service.coordinator.address.incarnation, worker.address.incarnation)
    late = service.queues.pop(old)
    assert any(isinstance(message, Submit) for _, message in late)
    service.start_coordinator()
    service.deliver((1, worker.address.incarnation))
    service.queues[old] = late
    while service.queues[old]:
        service.deliver(old)
    assert not worker.core.requests, "it has taken a route of the older one"
    finish(service, stream)


# ------------------------------------------------------------------------------------------------ admission


def a_reservation_leaves_each_running_request_a_page_to_grow() -> None:
    service = world("prefill", "decode", pages=4)
    _, decode = service.workers
    first = ask(service, [1, 2, 3], 4)
    until(service, lambda: len(first.output) == 1)
    second = ask(service, [2, 2, 1], 2)  # two pages: with them there would be none to grow into
    finish(service, first, second)
    assert decode.core.reporter.preemptions == 0, "one that runs has lost its pages to one that waits"


def the_latest_arrival_is_preempted() -> None:
    """So that the oldest always progresses, whoever comes after it."""
    service = world("any", pages=6)
    [worker] = service.workers
    first, second = ask(service, [1, 2, 3, 1], 5), ask(service, [2, 2, 1, 3, 1], 4)
    until(service, lambda: worker.core.reporter.preemptions)
    preempted = [request.spec.id for request in worker.core.scheduler.waiting]
    assert preempted == [second.id], "the oldest has lost its pages"
    finish(service, first, second)


def siblings_go_to_one_worker_and_join_its_prefix() -> None:
    service = world("any", "any", cache=True)
    first = ask(service, [1, 2, 3, 1, 2], 3)
    others = [ask(service, [1, 2, 3, 1, 2], 3, first) for _ in range(2)]
    until(service, lambda: all(stream.worker for stream in (first, *others)))
    assert len({stream.worker for stream in (first, *others)}) == 1, "they are not on one worker"
    [worker] = [w for w in service.workers if w.address == first.worker]
    finish(service, first, *others)
    assert worker.core.reporter.prefix_hits >= 8, "two pages for each of those that joined"


def one_token_is_not_handed_over() -> None:
    service = world("prefill", "decode")
    stream = ask(service, [1, 2, 3], 1)
    finish(service, stream)
    decisions = service.coordinator.core.decisions
    assert decisions == {("local", "one-token"): 1}, f"it took the way of {list(decisions)}"


# ---------------------------------------------------------------------------------------------------- time


def a_request_keeps_its_turn_when_it_goes_on_elsewhere() -> None:
    """One is older than what waits at the worker that it comes to, whose clock is far ahead."""
    service = world("any", "any", max_batch=1)
    service.workers[1].clock_ahead = 1000.0
    running = [ask(service, [3, n], 12) for n in range(2)]
    until(service, lambda: all(stream.worker for stream in running))
    waiting = []
    for n in range(2):
        service.now += 4.0
        waiting.append(ask(service, [n, n, n], 2))
        until(service, lambda: waiting[-1].worker)
    old, young = waiting
    assert old.worker is not None and old.worker != young.worker
    service.now += 1.0
    service.kill(old.worker.incarnation)
    until(service, lambda: young.output)
    assert old.output, "the younger one was served first"
    finish(service, *running, *waiting)


# ------------------------------------------------------------------------------ nobody gives to nobody


def what_a_suspect_has_handed_over_is_taken() -> None:
    """A new coordinator lists the receiver of a move before its giver, who hands over before it is told to stop."""
    service = world("any", "any", pages=16)
    stream = ask(service, [1, 2, 3], 12)
    until(service, lambda: stream.worker and len(stream.output) >= 2)
    [old] = [worker for worker in service.workers if worker.address == stream.worker]
    [new] = [worker for worker in service.workers if worker is not old]
    old.relieve(stream.id)
    until(service, lambda: old.core.supply.gifts)
    service.start_coordinator()
    coordinator = service.coordinator.address.incarnation
    for pair in [(SUPERVISOR.incarnation, coordinator), (SUPERVISOR.incarnation, new.address.incarnation)]:
        while service.queues[pair]:
            service.deliver(pair)
    for pair in [(new.address.incarnation, coordinator), (coordinator, new.address.incarnation)]:
        while service.queues[pair]:
            service.deliver(pair)
    assert old.address.incarnation not in new.core.peers.workers
    while stream.id in old.core.requests:
        old.step()
    finish(service, stream)
    assert stream.submission == 0
