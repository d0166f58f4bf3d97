"""A world as a value: numbers for actors' states and for messages, and what any event makes of it.

Knows actors as values. A core is a function of its state and an event, so what an event does to an actor is computed
once and remembered in `Tables`: most successors of a state are found without running any code of the cores. A `Draft`
is a state that is being changed; its methods are all that can happen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from core_world import (
    SUPERVISOR,
    Actor,
    ApiActor,
    CoordinatorActor,
    Data,
    Setting,
    SupervisorActor,
    WorkerActor,
    World,
)
from msgspec.structs import replace
from walk_values import copy, message_key, picture

from cbdisagg.messages import (
    Address,
    Counters,
    Lead,
    Load,
    Message,
    PeerDown,
    Reported,
    RequestId,
    Sampling,
    Suspect,
    Targets,
    Up,
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
                prompt, sampling, sibling = self.asked[n]
                actor.submit(list(prompt), sampling, TARGETS, actor.streams[0] if sibling else None)
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


class Draft:
    """A state being changed."""

    def __init__(self, tables: Tables, state: State) -> None:
        self.tables = tables
        self.actors, self.queues, self.data = dict(state.actors), dict(state.queues), dict(state.data)
        self.dead, self.faults, self.left = state.dead, state.faults, state.left

    def state(self) -> State:
        return State(
            tuple(sorted(self.actors.items())),
            tuple(sorted(self.queues.items())),
            tuple(sorted(self.data.items())),
            self.dead,
            self.faults,
            self.left,
        )

    def spend(self, at: int) -> None:
        """One fault of this kind less may happen."""
        self.faults = (*self.faults[:at], self.faults[at] - 1, *self.faults[at + 1 :])
        self.left -= 1

    # ----------------------------------------------------------------------------------------------- what happens

    def act(self, incarnation: int, *event: Any) -> None:
        """Something happens to one actor; what it sends is on its way."""
        outcome = self.tables.outcome(self.actors[incarnation], event)
        self.actors[incarnation] = outcome.local
        for to, message in outcome.sent:
            self._enqueue(incarnation, to, message)
        for to, datum in outcome.data:
            if to in self.actors:
                self.data[incarnation, to] = (*self.data.get((incarnation, to), ()), datum)
        for to, datum in outcome.placed:
            if to in self.actors:
                self.act(to, "written", datum)

    def deliver(self, pair: Pair) -> None:
        """The supervisor kills a suspect; anybody else receives."""
        number = _take(self.queues, pair)
        if pair[1] == SUPERVISOR.incarnation:
            self._kill_suspect(self.tables.messages[number][1])
        else:
            self.act(pair[1], "receive", number)

    def deliver_data(self, pair: Pair) -> None:
        self.act(pair[1], "land", pair[0], _take(self.data, pair))

    def cut(self, pair: Pair) -> None:
        """The rest of what a process had to say has died with it."""
        del self.queues[pair]

    def cut_data(self, pair: Pair) -> None:
        del self.data[pair]

    def keep_prompt(self, ranges: tuple[range, ...]) -> None:
        """Whose incarnation is in one of the ranges receives what is on its way to it."""
        while prompt := [pair for pair in self.queues if any(pair[1] in names for names in ranges)]:
            self.deliver(min(prompt))

    # ------------------------------------------------------------------------------------------------- processes

    @property
    def coordinator(self) -> int:
        return next(n for n in self.actors if COORDINATOR <= n < WORKER)

    def start(self, incarnation: int) -> None:
        """A worker or api: the coordinator is told of it, and it of the coordinator."""
        self.actors[incarnation] = self.tables.born(incarnation)
        self._supervisor_sends(self.coordinator, self._up(incarnation))
        self._supervisor_sends(incarnation, Lead(self.tables.address(self.coordinator)))

    def kill(self, incarnation: int) -> None:
        """SIGKILL, and the supervisor's evidence of it. What it has sent may still arrive, or not."""
        self._remove(incarnation)
        self.dead = tuple(sorted((*self.dead, incarnation)))
        self._supervisor_sends(self.coordinator, self._down(incarnation))

    def push_and_die(self, incarnation: int) -> None:
        """Its copies are made, and nobody learns of the step."""
        self.act(incarnation, "push")
        self.kill(incarnation)

    def restart_coordinator(self) -> None:
        old = self.coordinator
        self._remove(old)
        self.start_coordinator(old + 1)

    def start_coordinator(self, incarnation: int) -> None:
        """It knows all that lives and has died; it says nothing of it until it is told that this was all."""
        self.actors[incarnation] = self.tables.born(incarnation)
        others = [n for n in self.actors if n != incarnation]
        for message in (*map(self._up, others), *map(self._down, self.dead)):
            self.act(incarnation, "receive", self.tables.message(SUPERVISOR, message))
        self._supervisor_sends(incarnation, Reported("host"))
        for n in others:
            self._supervisor_sends(n, Lead(self.tables.address(incarnation)))

    def suspect(self, incarnation: int) -> None:
        """Somebody finds that it lives and does nothing; it goes on until the supervisor kills it."""
        suspect = Suspect(self.tables.address(incarnation).name, incarnation, "no progress")
        self._enqueue(API, self.coordinator, self.tables.message(self.tables.address(API), suspect))

    def lose(self, pair: Pair) -> None:
        """The connection breaks: the next message is lost, and the receiver notices."""
        _take(self.queues, pair)
        self.act(pair[1], "miss", pair[0])

    def lose_data(self, pair: Pair) -> None:
        _take(self.data, pair)
        self.act(pair[1], "miss", pair[0])

    # --------------------------------------------------------------------------------------------------- sending

    def _enqueue(self, sender: int, to: int, message: int) -> None:
        """Lost if there is nobody. The supervisor does nothing with what it is told but for suspicions."""
        heard = to != SUPERVISOR.incarnation or isinstance(self.tables.messages[message][1], Suspect)
        if heard and (to in self.actors or to == SUPERVISOR.incarnation):
            self.queues[sender, to] = (*self.queues.get((sender, to), ()), message)

    def _supervisor_sends(self, to: int, message: Message) -> None:
        self._enqueue(SUPERVISOR.incarnation, to, self.tables.message(SUPERVISOR, message))

    def _kill_suspect(self, suspect: Suspect) -> None:
        if suspect.incarnation not in self.actors:
            return
        if suspect.incarnation in COORDINATORS:
            self.restart_coordinator()
        else:
            self.kill(suspect.incarnation)

    def _up(self, incarnation: int) -> Up:
        return Up(self.tables.address(incarnation), _kind(incarnation), 0)

    def _down(self, incarnation: int) -> PeerDown:
        return PeerDown(self.tables.address(incarnation).name, incarnation, "killed", _kind(incarnation))

    def _remove(self, incarnation: int) -> None:
        del self.actors[incarnation]
        for queues in (self.queues, self.data):
            for pair in [pair for pair in queues if pair[1] == incarnation]:
                del queues[pair]


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


def _take(queues: dict[Pair, tuple[int, ...]], pair: Pair) -> int:
    first, *rest = queues.pop(pair)
    if rest:
        queues[pair] = tuple(rest)
    return first


def _kind(incarnation: int) -> Literal["api", "worker"]:
    return "api" if incarnation < COORDINATOR else "worker"


def world_of(tables: Tables, state: State) -> World:
    """The same as a world that goes on by itself, its time that of the latest clock. Its actors are copies."""
    world = World.__new__(World)
    world.setting, world.last_incarnation, world.stopped = tables.setting, 1000 * WORKER, set()
    locals_ = {n: tables.locals[local] for n, local in state.actors}
    world.now = max(local.now for local in locals_.values())
    world.supervisor = SupervisorActor(world, SUPERVISOR)
    memo = {id(tables.site): world}
    world.actors = {SUPERVISOR.incarnation: world.supervisor} | {n: copy(x.actor, memo) for n, x in locals_.items()}
    world.queues = {pair: deque(tables.messages[n] for n in numbers) for pair, numbers in state.queues}
    world.data = {pair: deque(tables.data[n] for n in numbers) for pair, numbers in state.data}
    world.ups = [Up(tables.address(n), _kind(n), 0) for n in locals_ if not COORDINATOR <= n < WORKER]
    downs = [tables.address(n) for n in state.dead]
    world.downs = [PeerDown(a.name, a.incarnation, "killed", _kind(a.incarnation)) for a in downs]
    for actor in world.actors.values():
        if isinstance(actor, CoordinatorActor):
            world.coordinator = actor
        elif isinstance(actor, ApiActor):
            world.api = actor
    return world
