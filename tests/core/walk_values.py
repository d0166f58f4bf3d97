"""Copies of an actor that share nothing that changes, and pictures of it that are equal when its futures are.

Knows how the cores, the client and the fake runner keep their state, field by field; nothing of walks. `copy` is a deep
copy for the few kinds of values that occur here, an order of magnitude faster than copy.deepcopy. `picture` is hashable
and leaves out or renames what the future does not depend on: counters, instants, the numbers of plans, pushes and
requests (only their order counts), the order of heaps and of sets.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import is_dataclass
from enum import Enum
from operator import is_
from types import FunctionType, MethodType
from typing import Any, TypeAlias

import msgspec
from core_world import ApiActor, CoordinatorActor, FakeSlot, WorkerActor
from crosswise import Crosswise

from cbdisagg.api.client import Client, Stream
from cbdisagg.core.admission import Admission
from cbdisagg.core.blocks import Pages
from cbdisagg.core.coordinator import STATS_S, CoordinatorCore
from cbdisagg.core.events import PushDone
from cbdisagg.core.member import UNSEEN_S, Member
from cbdisagg.core.peers import Peers
from cbdisagg.core.placement import Placement
from cbdisagg.core.policy import View
from cbdisagg.core.report import Reporter
from cbdisagg.core.request import Request
from cbdisagg.core.scheduler import Scheduler
from cbdisagg.core.steps import Steps
from cbdisagg.core.streams import Streams
from cbdisagg.core.turns import Turns
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import Message, Push, Slice, StepPlan

# ------------------------------------------------------------------------------------------------------- copies

Memo: TypeAlias = dict[int, Any]

SHARED = (int, str, bytes, float, bool, type(None), Enum, msgspec.Struct, FunctionType, type)
"""Never changed in place, so that copies may share them. Frozen dataclasses and plain tuples are, too."""


def copy(value: Any, memo: Memo) -> Any:
    """A copy of all that can change. `memo` maps ids to copies made before, or to what stands for an object."""
    kind = type(value)
    if kind in _shared:
        return value
    copier = _copiers.get(kind)
    if copier is None:
        copier = _copier(kind)
        if copier is None:
            _shared.add(kind)
            return value
        _copiers[kind] = copier
    return copier(value, memo)


def _copier(kind: type) -> Callable[[Any, Memo], Any] | None:
    """None for what copies may share."""
    if issubclass(kind, SHARED) or (is_dataclass(kind) and kind.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        return None
    for known, copier in COPIERS:
        if issubclass(kind, known):
            return copier
    return _copy_object


def _copy_tuple(value: Any, memo: Memo) -> Any:
    copied = [item if type(item) in _shared else copy(item, memo) for item in value]
    return value if all(map(is_, copied, value)) else tuple(copied)


def _copy_items(value: Any, memo: Memo) -> Any:
    new = memo.get(id(value))
    if new is None:
        new = memo[id(value)] = type(value)([item if type(item) in _shared else copy(item, memo) for item in value])
    return new


def _copy_dict(value: Any, memo: Memo) -> Any:
    new = memo.get(id(value))
    if new is None:
        new = memo[id(value)] = value.copy()
        for key, item in value.items():
            if type(item) not in _shared:
                new[key] = copy(item, memo)
    return new


def _copy_object(value: Any, memo: Memo) -> Any:
    new = memo.get(id(value))
    if new is None:
        new = memo[id(value)] = object.__new__(type(value))
        for name in _fields(value):
            item = getattr(value, name)
            setattr(new, name, item if type(item) in _shared else copy(item, memo))
    return new


COPIERS: tuple[tuple[type, Callable[[Any, Memo], Any]], ...] = (
    (tuple, _copy_tuple),
    (array, lambda value, memo: value[:]),
    (set, lambda value, memo: value.copy()),
    (dict, _copy_dict),
    (list, _copy_items),
    (deque, _copy_items),
    (MethodType, lambda value, memo: MethodType(value.__func__, copy(value.__self__, memo))),
)
_shared: set[type] = set()  # found so far
_copiers: dict[type, Callable[[Any, Memo], Any]] = {}


def _fields(value: Any) -> Iterable[str]:
    slots: Iterable[str] | None = getattr(type(value), "__slots__", None)
    return vars(value) if slots is None else slots


# ----------------------------------------------------------------------------------------------------- pictures

OMITTED: dict[type, frozenset[str]] = {
    WorkerActor: frozenset({"world", "journal", "info", "wake_at", "address"}),
    CoordinatorActor: frozenset({"world", "journal", "wake_at", "address"}),
    ApiActor: frozenset({"world", "journal", "wake_at", "address"}),
    WorkerCore: frozenset({"info", "address", "config", "_key", "_now", "_effects"}),
    CoordinatorCore: frozenset({"address", "config", "_now", "_effects", "_stats_at", "_wake_at"}),
    Scheduler: frozenset({"page_size", "limits", "prefix_cache", "_number", "_serial"}),
    **dict.fromkeys((Placement, Crosswise), frozenset({"config", "term", "workers", "knobs", "_serves"})),
    View: frozenset({"forecast", "free_at", "place_s", "queued_s", "step_s"}),  # all alike here
    Member: frozenset(
        {"heard_at", "progress_at", "jobs", "queued_tokens", "free_at", "between_ends_s", "ended_at"}
    ),  # silence is a fault here, no timer
    Client: frozenset({"resumed", "stats", "_now", "_tell", "_model", "_page_size", "_incarnation"}),
    Stream: frozenset({"request", "born", "began", "_cancel", "_unread", "_waiter"}),
    Peers: frozenset({"me"}),
    Request: frozenset({"key", "arrival", "page_size", "started", "first_token", "last_token", "passed", "overtaken"}),
    FakeSlot: frozenset(),
}
"""What the future does not depend on: constants of an incarnation, instants (time stands still), what readers see."""


class Picture:
    """One picture being taken: what has been seen gets a number, so that shared objects and cycles show as such."""

    def __init__(self) -> None:
        self._seen: dict[int, int] = {}
        self._serials: dict[int, int] = {}
        self.keys: list[int] = []  # of the requests, as they were seen

    def of(self, value: Any) -> Hashable:
        kind = type(value)
        if kind in PLAIN:
            return value  # type: ignore[no-any-return]
        drawn = _drawn.get(kind)
        if drawn is None:
            drawn = _drawn[kind] = next((how for known, how in BY_KIND if issubclass(kind, known)), Picture._object)
        return drawn(self, value)

    def _items(self, values: Iterable[Any]) -> Hashable:
        return tuple([value if type(value) in PLAIN else self.of(value) for value in values])

    def _dict(self, value: dict[Any, Any]) -> Hashable:
        return (self._items(value), self._items(value.values()))

    def _object(self, value: Any) -> Hashable:
        number = self._seen.get(id(value))
        if number is not None:
            return ("seen", number)
        self._seen[id(value)] = len(self._seen)
        omitted = OMITTED.get(type(value), frozenset())
        return self._items([getattr(value, name) for name in _fields(value) if name not in omitted])

    # Kinds whose numbers only name, or say what is known otherwise.

    def _request(self, request: Request) -> Hashable:
        if id(request) not in self._seen:
            self.keys.append(request.key)
        return self._object(request)

    def _scheduler(self, scheduler: Scheduler) -> Hashable:
        """Plans and running requests by their order alone: what the ended ones were called is no matter."""
        return (
            self.of(scheduler.waiting),
            tuple(self.of(scheduler.running[key]) for key in sorted(scheduler.running)),
            self.of(list(scheduler.flights.values())),
            tuple((self._serial(serial), self.of(pushed)) for serial, pushed in scheduler.pushes.items()),
            tuple(sorted(scheduler._free_slots)),
            tuple(scheduler._released),
            scheduler._decode_turn,
        )

    def _plan(self, plan: StepPlan) -> Hashable:
        return (plan.release, self.of(plan.admit), plan.grow, self.of(plan.slices))

    def _push(self, push: Push) -> Hashable:
        return (self._serial(push.serial), push.attempt, push.to.incarnation, push.source, push.target, push.last)

    def _slice(self, piece: Slice) -> Hashable:
        return (piece.slot, piece.start, piece.count, piece.draws, piece.scores, self.of(piece.push))

    def _push_done(self, event: PushDone) -> Hashable:
        return self._serial(event.serial)

    def _serial(self, serial: int) -> int:
        return self._serials.setdefault(serial, len(self._serials))

    def _pages(self, pages: Pages) -> Hashable:
        return (
            tuple(sorted(pages.readers.items())),
            tuple(sorted(pages.writers.items())),
            tuple(pages.cached),
            tuple(sorted(pages.quarantined)),
            tuple(sorted(pages.by_hash.items())),
        )

    def _reporter(self, reporter: Reporter) -> Hashable:
        return (reporter.page_leaks, reporter._last is None)

    def _admission(self, admission: Admission) -> Hashable:
        return tuple((value, self.of(request)) for value, request in admission.computing.items())

    def _coordinator(self, core: CoordinatorCore) -> Hashable:
        """Instants count by whether they are recent: Stats are held back, jobs are counted for a while."""
        recent = [[tokens for at, tokens in m.jobs if core._now < at + UNSEEN_S] for m in core.workers.values()]
        return (core._now < core._stats_at + STATS_S, self.of(recent), self._object(core))


PLAIN = frozenset({int, str, bytes, float, bool, type(None)})
_drawn: dict[type, Callable[[Picture, Any], Hashable]] = {
    Request: Picture._request,
    Scheduler: Picture._scheduler,
    StepPlan: Picture._plan,
    Slice: Picture._slice,
    Push: Picture._push,
    PushDone: Picture._push_done,
    Pages: Picture._pages,
    Reporter: Picture._reporter,
    Admission: Picture._admission,
    CoordinatorCore: Picture._coordinator,
    Steps: lambda picture, steps: None,  # what is learnt, and when it is thought to end: time stands still
    Turns: lambda picture, turns: None,  # one tenant, who has had what it has had
    Streams: lambda picture, streams: None,  # flushed at the end of each event
    Counter: lambda picture, counts: None,
    OrderedDict: lambda picture, ordered: tuple(ordered),
}
"""How kinds are drawn; those not named as BY_KIND says, and by their fields otherwise."""
BY_KIND: tuple[tuple[type, Callable[[Picture, Any], Hashable]], ...] = (
    (Exception, lambda picture, error: str(error)),
    (msgspec.Struct, lambda picture, struct: (type(struct).__name__, msgspec.msgpack.encode(struct))),
    (dict, Picture._dict),
    (set, lambda picture, values: tuple(sorted(values))),
    (tuple, Picture._items),
    (list, Picture._items),
    (deque, Picture._items),
    (Enum, lambda picture, member: member.value),
    (array, lambda picture, numbers: numbers.tobytes()),
)


def picture(actor: WorkerActor | CoordinatorActor | ApiActor) -> Hashable:
    """Equal for two actors that do the same whatever comes. Of the keys of requests the order counts: their age."""
    taken = Picture()
    shape = taken.of(actor)
    return shape, tuple(sorted(range(len(taken.keys)), key=taken.keys.__getitem__))


def message_key(message: Message) -> bytes:
    """Equal for equal messages. The type's name is part of it: some are encoded as arrays."""
    return type(message).__name__.encode() + msgspec.msgpack.encode(message)
