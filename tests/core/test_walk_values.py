"""Copies share nothing, and actors whose pictures are equal do the same whatever happens to them."""

from __future__ import annotations

import copy as copies
from collections import OrderedDict, deque
from typing import Any

import pytest
from walk import Scenario, Walk
from walk_scenarios import BY_NAME
from walk_values import copy, picture
from walk_world import Event, Local, Outcome, Tables


class Twins(Tables):
    """Keeps another actor of each picture, of another history, and has everything happen to it as well."""

    def __init__(self, *arguments: Any) -> None:
        self.twins: dict[int, Local] = {}
        self.compared: set[tuple[int, Event]] = set()
        super().__init__(*arguments)

    def local(self, actor: Any, now: float) -> int:
        number = super().local(actor, now)
        if self.locals[number].actor is not actor:
            self.twins[number] = Local(actor, now, self.locals[number].owned)
        return number

    def outcome(self, local: int, event: Event) -> Outcome:
        found = super().outcome(local, event)
        twin = self.twins.get(local)
        if twin is not None and (local, event) not in self.compared:
            self.compared.add((local, event))
            assert self.compute(twin, event) == found, f"{event}: two actors with one picture differ"
        return found


@pytest.mark.parametrize("name", ["cancel", "P dies twice", "preemption", "crossed prefix", "coordinator", "leaves"])
def test_equal_pictures_have_equal_futures(name: str) -> None:
    walk = Walk(BY_NAME[name], Twins)
    walk.run()
    assert isinstance(walk.tables, Twins)
    assert len(walk.tables.compared) > 100


def test_a_copy_is_equal_and_apart() -> None:
    """For every actor that a walk meets: a change to the copy does not show in the original."""
    walk = Walk(Scenario("small", BY_NAME["hit"].setting, BY_NAME["hit"].asked[:1]))
    walk.run()
    for local in walk.tables.locals:
        before = picture(local.actor)
        twin = copy(local.actor, {id(walk.tables.site): walk.tables.site})
        assert picture(twin) == before
        scramble(twin, set())
        assert picture(local.actor) == before


def scramble(value: Any, seen: set[int]) -> None:
    """Empty every container that can be reached."""
    if id(value) in seen:
        return
    seen.add(id(value))
    names: Any = getattr(type(value), "__slots__", None) or getattr(value, "__dict__", ())
    if type(value).__module__.startswith(("cbdisagg.core", "cbdisagg.api", "core_world")):
        for name in list(names):
            scramble(getattr(value, name, None), seen)
    if isinstance(value, (dict, list, deque, set)):
        for item in list(value.values() if isinstance(value, dict) else value):
            scramble(item, seen)
        value.clear()


def test_containers_keep_their_kind_and_their_sharing() -> None:
    shared = [1, 2]
    value = {"a": shared, "b": (shared, 3), "c": deque([shared]), "d": OrderedDict(x=shared), "e": {4}}
    twin = copy(value, {})
    assert twin == copies.deepcopy(value)
    assert twin["a"] is twin["b"][0] is twin["c"][0] is twin["d"]["x"] is not shared
    assert type(twin["d"]) is OrderedDict
