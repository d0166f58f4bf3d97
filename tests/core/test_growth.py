"""No container in a core or in the api's client grows with the number of requests, nor with that of the dead.

Every container that can be reached from a core is found by walking its attributes, so a new one is held to this too.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from core_world import Setting, World

from cbdisagg.api import client
from cbdisagg.config import Config, Kv, Policy
from cbdisagg.core import coordinator, residency
from cbdisagg.messages import Role, Sampling, Targets

ROLES: tuple[Role, ...] = ("prefill", "prefill", "decode", "decode")
TARGETS = Targets(0.5, 0.05)


BOUNDED = {"worker.pages._back"}
"""What fills up once and for all: each page of a pool is there once at most."""


def containers(thing: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    """(path, length) of every container that belongs to `thing`; elements of one container share a path."""
    if id(thing) in seen or isinstance(thing, (str, bytes, int, float, tuple, type, array)) or callable(thing):
        return
    seen.add(id(thing))
    if isinstance(thing, dict):
        yield path, len(thing)
        elements = list(thing.values())
    elif isinstance(thing, (list, set, frozenset, deque)):
        yield path, len(thing)
        elements = list(thing)
    else:
        names = [*getattr(thing, "__dict__", ()), *getattr(type(thing), "__slots__", ())]
        for name in names:
            yield from containers(getattr(thing, name, None), f"{path}.{name}", seen)
        return
    for element in elements:
        yield from containers(element, f"{path}[]", seen)


def sizes(world: World) -> dict[str, int]:
    """Of all containers in all cores and the client, added up by path."""
    found: dict[str, int] = {}
    owners = [("client", world.api.client), ("coordinator", world.coordinator.core)]
    owners += [("worker", worker.core) for worker in world.workers]
    for name, owner in owners:
        for path, length in containers(owner, name, set()):
            found[path] = found.get(path, 0) + length
    return {path: length for path, length in found.items() if path not in BOUNDED}


def requests(world: World, rng: random.Random, count: int) -> None:
    """Of several lengths, some with siblings, some cancelled under way; then nothing runs."""
    for _ in range(count):
        prompt = [rng.randrange(1, 9) for _ in range(rng.randrange(1, 9))]
        sampling = Sampling(max_tokens=rng.randrange(1, 6), logprobs=rng.choice([-1, 0]), seed=rng.randrange(9))
        first = world.api.submit(prompt, sampling, TARGETS, None)
        if rng.random() < 0.2:
            world.api.submit(prompt, sampling, TARGETS, first)
        for _ in range(rng.randrange(12)):
            action = next(world.actions(), None)
            if action is not None:
                action()
        if rng.random() < 0.2:
            world.api.cancel(first)
    world.settle()
    world.check_quiet()
    world.api.streams.clear()  # the world's own memory
    world.api.cancelled.clear()


@pytest.fixture(params=["shm", "zmq"])
def world(request: pytest.FixtureRequest) -> World:
    config = Config(policy=Policy(mode="disaggregate"), kv=Kv(page_size=2))
    made = World(Setting(ROLES, config, pages=12, kind=lambda *_: request.param))
    made.settle()
    return made


def grown(world: World, round_: Callable[[], None], warm_up: int, rounds: int) -> dict[str, tuple[int, int]]:
    """Containers that are larger after `rounds` more rounds than they ever were during the warm-up."""
    most: dict[str, int] = {}
    for _ in range(warm_up):
        round_()
        for path, size in sizes(world).items():
            most[path] = max(size, most.get(path, 0))
    for _ in range(rounds):
        round_()
    return {path: (most.get(path, 0), size) for path, size in sizes(world).items() if size > most.get(path, 0) + 2}


def test_nothing_grows_with_the_number_of_requests(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency, "STARTS", 16)
    rng = random.Random(1)
    assert grown(world, lambda: requests(world, rng, 8), warm_up=12, rounds=12) == {}


def test_nothing_grows_with_the_number_of_the_dead(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every worker in turn is killed again and again, under load; the coordinator, too. Most of the dead have been
    forgotten by the end, and nobody misses them.
    """
    monkeypatch.setattr(residency, "STARTS", 16)
    monkeypatch.setattr(residency, "NEWEST", 4)
    monkeypatch.setattr(coordinator, "_DEAD_KEPT", 6)
    monkeypatch.setattr(client, "GONE_KEPT", 8)
    rng = random.Random(2)
    turn = iter(range(10_000))

    def deaths() -> None:
        requests(world, rng, 1)
        workers = sorted(world.workers, key=lambda worker: worker.address.name)
        world.kill(workers[next(turn) % len(workers)].address.incarnation)
        if rng.random() < 0.1:
            world.start_coordinator()
        world.settle()

    assert grown(world, deaths, warm_up=12, rounds=20) == {}
