"""What can happen to a world that is a value: a `Draft` is a state being changed, its methods are all the events.

Knows processes and the network as `core_world.World` does, and their faults; what an event makes of an actor it looks
up in the tables.
"""

from __future__ import annotations

from collections import deque
from typing import Any, Literal

from core_world import SUPERVISOR, ApiActor, CoordinatorActor, SupervisorActor, World
from walk_values import copy
from walk_world import API, COORDINATOR, COORDINATORS, WORKER, Pair, State, Tables

from cbdisagg.messages import Lead, Message, PeerDown, Reported, Suspect, Up


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
