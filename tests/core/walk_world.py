"""A world as a value: numbers for actors' states and for messages, and what any event makes of it.

Knows actors as values. A core is a function of its state and an event, so what an event does to an actor is computed
once and remembered in `Tables`: most successors of a state are found without running any code of the cores.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

from core_world import (
    SUPERVISOR,
    Actor,
    ApiActor,
    CoordinatorActor,
    Data,
    Setting,
    WorkerActor,
)
from msgspec.structs import replace
from walk_values import copy, message_key, picture

from cbdisagg.messages import (
    Address,
    Counters,
    Load,
    RequestId,
    Sampling,
    Targets,
)

TARGETS = Targets(0.5, 0.05)
API, COORDINATOR, WORKER = 10, 20, 100
"""First incarnations; the n-th worker's is (n + 1) * WORKER. A successor's is its predecessor's plus one."""
APIS, COORDINATORS = range(API, COORDINATOR), range(COORDINATOR, WORKER)

Pair: TypeAlias = tuple[int, int]
Event: TypeAlias = tuple[Any, ...]
"""A method of an actor and its arguments, or one of the few that `Tables` spells out."""


class Ask(NamedTuple):
    """A request that is made once the service is ready; a sibling asks for another sequence of the first prompt."""

    prompt: tuple[int, ...]
    sampling: Sampling
    sibling: bool = False
    targets: Targets = TARGETS


Asked: TypeAlias = tuple[Ask, ...]


class State(NamedTuple):
    """Everything, in canonical order. Numbers name entries of the tables; so many faults may still happen."""

    actors: tuple[tuple[int, int], ...]
    queues: tuple[tuple[Pair, tuple[int, ...]], ...]
    data: tuple[tuple[Pair, tuple[int, ...]], ...]
    dead: tuple[int, ...]
    faults: tuple[int, ...]
    left: int


@dataclass(frozen=True, slots=True)
class Local:
    """One state of one actor at `now` of its own clock. What happens, happens to a copy."""

    actor: Any
    now: float
    owned: tuple[tuple[RequestId, int], ...]  # the submissions whose streams it writes


@dataclass(frozen=True, slots=True)
class Outcome:
    """What an event makes of an actor, and what it sends: (to, message), (to, data), (to, data placed at once)."""

    local: int
    sent: tuple[tuple[int, int], ...]
    data: tuple[tuple[int, int], ...]
    placed: tuple[tuple[int, int], ...]


class Site:
    """What an actor sees of the world while an event happens to it: notes what it sends."""

    def __init__(self, tables: Tables) -> None:
        self.tables = tables
        self.setting = tables.setting
        self.begin(0.0)

    def begin(self, now: float) -> None:
        self.now = now
        self.sent: list[tuple[int, int]] = []
        self.data: list[tuple[int, int]] = []
        self.placed: list[tuple[int, int]] = []

    def kind(self, prefill: Address, decode: Address) -> str:
        return self.setting.kind(prefill.name, decode.name)

    def send(self, sender: Address, to: Address, message: Any) -> None:
        self.sent.append((to.incarnation, self.tables.message(sender, message)))

    def send_data(self, sender: Address, to: Address, data: Data) -> None:
        self.data.append((to.incarnation, self.tables.datum(data)))

    def place(self, to: Address, data: Data) -> None:
        self.placed.append((to.incarnation, self.tables.datum(data)))


class Tables:
    """Actors' states, messages and data by number, and what events have been found to do."""

    def __init__(self, setting: Setting, asked: Asked) -> None:
        self.setting = setting
        self.asked = asked
        self.locals: list[Local] = []
        self.messages: list[tuple[Address, Any]] = []
        self.data: list[Data] = []
        self.outcomes: dict[tuple[int, Event], Outcome] = {}
        self._numbers: dict[Hashable, int] = {}
        self.site = Site(self)

    def _number(self, key: Hashable, table: list[Any], value: Any) -> int:
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(table)
            table.append(value)
        return number

    def message(self, sender: Address, message: Any) -> int:
        """Counters in a Load tell history, which nobody acts upon."""
        if isinstance(message, Load):
            message = replace(message, counters=Counters(page_leaks=message.counters.page_leaks))
        return self._number((sender.incarnation, message_key(message)), self.messages, (sender, message))

    def datum(self, data: Data) -> int:
        key = (data.attempt, tuple((page, tuple(values)) for page, values in data.pages.items()))
        return self._number(key, self.data, data)

    def local(self, actor: Any, now: float) -> int:
        """Free pages are wiped, so that whoever reads one notices."""
        if isinstance(actor, WorkerActor):
            for page in actor.core.pages.free:
                actor.pool[page] = [0] * self.setting.page_size
        key = (actor.address.incarnation, picture(actor))
        return self._number(key, self.locals, Local(actor, now, _owned(actor)))

    def outcome(self, local: int, event: Event) -> Outcome:
        found = self.outcomes.get((local, event))
        if found is None:
            found = self.outcomes[local, event] = self.compute(self.locals[local], event)
        return found

    def compute(self, before: Local, event: Event) -> Outcome:
        """Let it happen to a copy."""
        site = self.site
        actor = copy(before.actor, {id(site): site})
        site.begin(before.actor.wake_at if event == ("tick",) else before.now)
        self._happen(actor, event)
        if isinstance(actor, WorkerActor):
            _pair_at_once(actor)
        return Outcome(self.local(actor, site.now), tuple(site.sent), tuple(site.data), tuple(site.placed))

    def _happen(self, actor: Any, event: Event) -> None:
        match event:
            case ("receive", number):
                actor.receive(*self.messages[number])
            case ("written", number):
                actor.written(self.data[number])
            case ("land", sender, number):
                actor.land(sender, self.data[number])
            case ("ask", n):
                prompt, sampling, sibling, targets = self.asked[n]
                actor.submit(list(prompt), sampling, targets, actor.streams[0] if sibling else None)
            case ("cancel", n):
                actor.cancel(actor.streams[n])
            case ("miss", incarnation):
                actor.miss(self.address(incarnation))
            case ("push",):
                actor.step(only_push=True)
            case (name, *arguments):
                getattr(actor, name)(*arguments)

    def address(self, incarnation: int) -> Address:
        if incarnation < COORDINATOR:
            return Address("api-0", incarnation, "") if incarnation >= API else SUPERVISOR
        if incarnation < WORKER:
            return Address("coordinator", incarnation, "")
        number = incarnation // WORKER - 1
        return Address(f"{self.setting.roles[number]}-{number}", incarnation, "")

    def born(self, incarnation: int) -> int:
        """A process as it starts."""
        site: Any = self.site
        address = self.address(incarnation)
        actor: Actor
        if incarnation < COORDINATOR:
            actor = ApiActor(site, address)
        elif incarnation < WORKER:
            actor = CoordinatorActor(site, address)
        else:
            actor = WorkerActor(site, address, self.setting.roles[incarnation // WORKER - 1])
        actor.journal = None
        return self.local(actor, 0.0)


def _owned(actor: Any) -> tuple[tuple[RequestId, int], ...]:
    if not isinstance(actor, WorkerActor):
        return ()
    return tuple((id, r.spec.submission) for id, r in actor.core.requests.items() if not r.moves)


def _pair_at_once(worker: WorkerActor) -> None:
    """To connect changes nothing of a worker; to verify later is as if the Probe had come later."""
    while worker.connects:
        worker.connect()
    while worker.verifies:
        worker.verify()
