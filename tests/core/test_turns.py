"""Whose turn it is: classes, then tenants by the tokens they have had, then deadlines; nobody waits for ever."""

from __future__ import annotations

from collections import Counter

from core_world import Setting, World, expected_output
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from test_pace import COST, NOW, PACE, request

from cbdisagg.config import Config
from cbdisagg.core.request import Request
from cbdisagg.core.turns import OUTPUT, OVERTAKES, TENANTS, Turns
from cbdisagg.messages import Sampling, Targets


def waiting(key: int, tenant: str = "", priority: int = 0, prompt: int = 100, age: float = 0.0) -> Request:
    made = request(key, prompt, age=age)
    made.spec = replace(made.spec, tenant=tenant, priority=priority)
    return made


def order(turns: Turns, *requests: Request) -> list[int]:
    return [request.key for request in turns.order(requests, PACE, COST, NOW)]


def arrive(*requests: Request) -> Turns:
    turns = Turns()
    for each in requests:
        turns.come(each)
    return turns


def test_a_higher_class_goes_first_whatever_its_tenant_has_had() -> None:
    requests = waiting(1, "a"), waiting(2, "b", priority=1), waiting(3, "a", priority=-1)
    turns = arrive(*requests)
    turns.serve(requests[1], 10_000, 0)
    assert order(turns, *requests) == [2, 1, 3]


def test_within_a_class_the_tenant_that_has_had_least_goes_first() -> None:
    requests = waiting(1, "a", age=0.9), waiting(2, "b"), waiting(3, "c")
    turns = arrive(*requests)
    turns.serve(requests[0], 100, 0)
    turns.serve(requests[1], 0, int(100 / OUTPUT) + 1)  # an output token weighs more
    assert order(turns, *requests) == [3, 1, 2]


def test_within_a_tenant_it_is_by_deadlines() -> None:
    requests = waiting(1, age=0.1), waiting(2, age=0.5), waiting(3, age=5.0)
    assert order(arrive(*requests), *requests) == [2, 1, 3], "who is late anyway holds nobody up"


def test_a_stream_that_was_interrupted_goes_before_all_new_ones() -> None:
    stream = request(4, 100, drawn=5, first_age=0.1)
    requests = waiting(1, priority=9), stream
    assert order(arrive(*requests), *requests) == [4, 1]


def test_turns_cannot_be_saved_up_by_staying_away() -> None:
    busy, away = waiting(1, "busy"), waiting(2, "away")
    turns = arrive(busy)
    turns.serve(busy, 1000, 0)
    turns.come(away)
    assert turns.had == {"busy": 1000, "away": 1000}
    turns.serve(away, 10, 0)
    turns.go(away)
    turns.serve(busy, 500, 0)
    turns.come(away)
    assert turns.had["away"] == 1500
    turns.go(busy)
    turns.go(away)
    turns.come(away)
    assert turns.had["away"] == 1500, "what it has had is kept"


def test_who_has_been_overtaken_too_often_comes_before_every_class() -> None:
    old, young = waiting(1, priority=-5, age=0.1), [waiting(n, priority=5) for n in range(2, 2 + OVERTAKES)]
    turns = arrive(old, *young)
    for served, later in enumerate(young):
        assert order(turns, old, later)[0] == later.key, served
        turns.start(later, [old])
    late = waiting(1000, priority=100)
    assert order(turns, late, old) == [1, 1000]


def test_tenants_that_are_away_are_forgotten_in_the_end() -> None:
    turns, stays = Turns(), waiting(1, "stays")
    turns.come(stays)
    for n in range(TENANTS + 100):
        passing = waiting(2 + n, f"tenant {n}")
        turns.come(passing)
        turns.go(passing)
    assert len(turns.had) <= TENANTS + 1 and "stays" in turns.had


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 400), st.integers(1, 100)), min_size=30, max_size=60))
def test_tenants_that_always_wait_are_never_apart_by_more_than_one_turn(
    asks: list[tuple[int, int, int]],
) -> None:
    """Each has requests all the time, of its own sizes: what they have had differs by at most one request's worth."""
    sizes = [[(prompt, drawn) for tenant, prompt, drawn in asks if tenant == n] or [(50, 10)] for n in range(3)]
    heads = [waiting(n, str(n)) for n in range(3)]
    turns = arrive(*heads)
    served: Counter[int] = Counter()
    for _ in range(60):
        [first, *_] = turns.order(heads, PACE, COST, NOW)
        n = int(first.spec.tenant)
        prompt, drawn = sizes[n][served[n] % len(sizes[n])]
        served[n] += 1
        turns.serve(first, prompt, drawn)
        assert max(turns.had.values()) - min(turns.had.values()) <= 400 + OUTPUT * 100
    assert all(served[n] for n in range(3))


def test_the_client_says_whose_turn_it_is_and_the_worker_goes_by_it() -> None:
    """Through the real client, coordinator and worker: one place, three that wait for it."""
    world = World(Setting(("any",), Config(), max_batch=1))
    world.settle()
    client, sampling, targets = world.api.client, Sampling(max_tokens=2), Targets(0.5, 0.05)
    names = [("a", 0), ("a", 0), ("b", 0), ("b", -1), ("c", 7)]
    streams = [
        client.submit([1, 2, n], sampling, targets, tenant=tenant, priority=priority)
        for n, (tenant, priority) in enumerate(names)
    ]
    world.api.streams += streams
    [worker] = world.workers
    started: list[int] = []
    while not all(stream.ended for stream in streams):
        next(world.actions())()
        started += [id.n for id, r in worker.core.requests.items() if r.started is not None and id.n not in started]
    assert started == [0, 4, 2, 1, 3], "the first comes to an empty worker; c is of a higher class; a has had its turn"
    for n, stream in enumerate(streams):
        assert list(stream.output) == expected_output([1, 2, n], sampling, world.setting.max_len)
    world.settle()
    world.check_quiet()
