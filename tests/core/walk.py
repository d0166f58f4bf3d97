"""An exhaustive walk: every state that a small world of real cores can reach, in every order of events and faults.

Every event of an actor checks its invariants and, in the fake model, every byte that a step reads. Where nothing more
can happen without a fault, the supervisor starts what is missing, time is let pass, and then nothing may be left: every
stream is complete and right, every page free. No run without further faults may come back to a state that it has been
in, so each of them reaches such an end.

What is left out, and why nothing is lost by it. Time stands still until nothing else can happen, as it may: only Loads
and Stats wait for it. What goes to the supervisor but for suspicions is dropped: it does nothing with it. A way to push
is opened and verified as soon as it is asked for: a later Probe comes to the same. A new coordinator knows at once who
lives, and says nothing before it is told that these were all: that this is so, a directed scenario holds. A scenario
may say who is prompt: then its lateness is another scenario's subject.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from core_world import SUPERVISOR, ApiActor, CoordinatorActor, Setting, WorkerActor, World, expected_output
from walk_draft import Draft, world_of
from walk_world import API, COORDINATOR, WORKER, Asked, State, Tables

from cbdisagg.core.coordinator import STATS_S
from cbdisagg.messages import Members, RequestId, Tokens, unpack

PATIENCE = 8
"""Time passes this often at an end: for Loads, then Stats, then what they set going, and a heartbeat."""


@dataclass(frozen=True)
class Scenario:
    """A small world, what is asked of it, and how much may go wrong.

    `faults`: how often each may happen, `most` of them in one run: "cancel"; "lose" (a message between workers, or
    data), "lose anywhere"; "coordinator" (starts anew); "api" (dies); and with a worker's name "kill NAME", "suspect
    NAME", "leave NAME", "relieve NAME" (of a stream, as flow does), "restart NAME". A killed worker has a successor
    when "restart NAME" comes, at any time, or else at the end. A walk that sees fewer than `floor` states has missed
    some.
    """

    name: str
    setting: Setting
    asked: Asked
    faults: dict[str, int] = field(default_factory=dict)
    most: int = 1
    floor: int = 0
    prompt: tuple[range, ...] = ()  # incarnations that receive at once: their being late is another scenario's subject


class Step(NamedTuple):
    """A method of Draft and its argument; `fault` is the index of its kind among the scenario's, -1 if it is none."""

    what: str
    arguments: tuple[Any, ...]
    fault: int = -1


class WalkFailed(AssertionError):
    """The cores have done what they must not. `trace` tells the way there, `why` what was found."""

    def __init__(self, scenario: Scenario, why: BaseException, trace: list[str]) -> None:
        way = "\n  ".join(trace)
        super().__init__(f"{scenario.name}: {type(why).__name__}: {why}\nafter {len(trace)} events:\n  {way}")
        self.why, self.trace = why, trace


class Walk:
    """`run` walks. `states`, `steps` and `ends` tell how far it has come."""

    def __init__(self, scenario: Scenario, tables: type[Tables] = Tables) -> None:
        self.scenario = scenario
        self.tables = tables(scenario.setting, scenario.asked)
        self.states = self.steps = self.ends = 0

    def run(self) -> None:
        """Depth first. Raises WalkFailed at the first failure."""
        start = self._boot()
        seen = {start}
        path: list[tuple[State, Iterator[Step], Step | None]] = [(start, self._steps(start), None)]
        on_path = {start}
        while path:
            state, steps, _ = path[-1]
            step = next(steps, None)
            if step is None:
                path.pop()
                on_path.remove(state)
                continue
            try:
                after = self._take(state, step)
                self.steps += 1
                assert after not in on_path, "the run comes back to where it has been"
                if after in seen:
                    continue
                seen.add(after)
                if not any(True for _ in self._events(after)):
                    self._check_end(after)
            except Exception as why:  # whatever a core raises is a finding
                raise WalkFailed(self.scenario, why, self._trace([*path, (state, steps, step)])) from why
            on_path.add(after)
            path.append((after, self._steps(after), step))
        self.states = len(seen)

    def _boot(self) -> State:
        """All have started and know each other; then everything is asked for at once."""
        kinds = self.scenario.faults
        new = Draft(self.tables, State((), (), (), (), tuple(kinds.values()), self.scenario.most))
        for incarnation in (API, *((n + 1) * WORKER for n in range(len(self.scenario.setting.roles)))):
            new.actors[incarnation] = self.tables.born(incarnation)
        new.start_coordinator(COORDINATOR)
        state = new.state()
        while (step := next(self._events(state), None)) is not None:
            state = self._take(state, step)
        new = Draft(self.tables, state)
        for n in range(len(self.scenario.asked)):
            new.act(API, "ask", n)
        return new.state()

    def _take(self, state: State, step: Step) -> State:
        new = Draft(self.tables, state)
        if step.fault >= 0:
            new.spend(step.fault)
        getattr(new, step.what)(*step.arguments)
        new.keep_prompt(self.scenario.prompt)
        after = new.state()
        self._check_owners(after)
        return after

    # -------------------------------------------------------------------------------------------- what can happen

    def _steps(self, state: State) -> Iterator[Step]:
        yield from self._events(state)
        if state.left:
            for at, kind in enumerate(self.scenario.faults):
                if state.faults[at]:
                    what, _, name = kind.partition(" ")
                    yield from (step._replace(fault=at) for step in self._faults(state, what, name))

    def _events(self, state: State) -> Iterator[Step]:
        """What can happen by itself. The coordinator's timer rings when nothing else can happen."""
        living = {SUPERVISOR.incarnation, *(incarnation for incarnation, _ in state.actors)}
        for pair, _ in state.queues:
            yield Step("deliver", (pair,))
            if pair[0] not in living:
                yield Step("cut", (pair,))
        for pair, _ in state.data:
            yield Step("deliver_data", (pair,))
            if pair[0] not in living:
                yield Step("cut_data", (pair,))
        quiet = not state.queues and not state.data
        for incarnation, local in state.actors:
            actor = self.tables.locals[local].actor
            if isinstance(actor, WorkerActor):
                for name in actor.possible():
                    quiet = False
                    yield Step("act", (incarnation, name))
                if actor.retired:
                    quiet = False
                    yield Step("kill", (incarnation,))
        for incarnation, number in state.actors if quiet else ():
            found = self.tables.locals[number]
            if isinstance(found.actor, CoordinatorActor) and (found.actor.wake_at or 0) <= found.now + STATS_S:
                yield Step("act", (incarnation, "tick"))

    def _faults(self, state: State, what: str, name: str) -> Iterator[Step]:
        named = [n for n, _ in state.actors if n >= WORKER and self.tables.address(n).name == name]
        match what:
            case "cancel":
                for n, stream in enumerate(self._streams(state)):
                    if not stream.ended:
                        yield Step("act", (API, "cancel", n))
            case "kill" | "suspect":
                yield from (Step(what, (n,)) for n in named)
                for n in named if what == "kill" else ():
                    if self.tables.locals[dict(state.actors)[n]].actor.plans:
                        yield Step("push_and_die", (n,))
            case "leave":
                for n in named:
                    if not self.tables.locals[dict(state.actors)[n]].actor.leaving:
                        yield Step("act", (n, "leave"))
            case "relieve":
                for n in named:
                    for id in self._relievable(state, n):
                        yield Step("act", (n, "relieve", id))
            case "restart" if not named:
                died = [n for n in state.dead if n >= WORKER and self.tables.address(n).name == name]
                yield from (Step("start", (n + 1,)) for n in died[-1:])
            case "lose":
                first = API if name == "anywhere" else WORKER
                yield from (Step("lose", (pair,)) for pair, _ in state.queues if min(pair) >= first)
                yield from (Step("lose_data", (pair,)) for pair, _ in state.data)
            case "coordinator":
                yield Step("restart_coordinator", ())
            case "api" if API in dict(state.actors):
                yield Step("kill", (API,))

    def _relievable(self, state: State, incarnation: int) -> list[RequestId]:
        """Streams that this worker writes, and may ask to be relieved of."""
        core = self.tables.locals[dict(state.actors)[incarnation]].actor.core
        if core.peers.coordinator is None:
            return []
        return [id for id, request in core.requests.items() if request.decoding and not request.moves]

    def _check_owners(self, state: State) -> None:
        """One worker writes the stream of a submission. Who is to take it over from another is not it yet."""
        owned = [owner for _, number in state.actors for owner in self.tables.locals[number].owned]
        assert len(set(owned)) == len(owned), f"two workers write one stream: {owned}"

    # --------------------------------------------------------------------------------------------------- the end

    def _streams(self, state: State) -> list[Any]:
        actors = [self.tables.locals[number].actor for _, number in state.actors]
        return [stream for actor in actors if isinstance(actor, ApiActor) for stream in actor.streams]

    def _check_end(self, state: State) -> None:
        """Nothing happens by itself any more: what has died is started anew, and time passes."""
        self.ends += 1
        world = world_of(self.tables, state)
        if API not in world.actors:
            world.start_api()
        living = {worker.address.name for worker in world.workers}
        for number, role in enumerate(self.scenario.setting.roles):
            if f"{role}-{number}" not in living:
                world.start_worker(f"{role}-{number}", role)
        world.settle(patience=PATIENCE)
        world.check_quiet()
        self._check_streams(world)

    def _check_streams(self, world: World) -> None:
        for stream in world.api.streams:
            wanted = expected_output(
                list(unpack(stream.request.prompt)), stream.request.sampling, world.setting.max_len
            )
            output = list(stream.output)
            assert output == wanted[: len(output)], f"{stream.id} gave {output} of {wanted}"
            if stream.id.n not in world.api.cancelled:
                assert stream._error is None, f"{stream.id} failed: {stream._error}"
                assert output == wanted, f"{stream.id} gave {output} instead of {wanted}"

    def _trace(self, path: list[tuple[State, Iterator[Step], Step | None]]) -> list[str]:
        """One line for each step, from the state before it."""
        before = path[0][0]
        lines = []
        for state, _, step in path[1:]:
            if step is not None:
                lines.append(self._describe(before, step))
            before = state
        return lines

    def _describe(self, state: State, step: Step) -> str:
        match step:
            case Step("deliver" | "lose" as what, (pair,)):
                _, message = self.tables.messages[dict(state.queues)[pair][0]]
                return f"{what} {self._name(pair[0])} > {self._name(pair[1])}: {_brief(message)}"
            case Step("deliver_data" | "lose_data" | "cut" | "cut_data" as what, (pair,)):
                return f"{what} {self._name(pair[0])} > {self._name(pair[1])}"
            case Step(what, (incarnation, *rest)):
                return " ".join(str(part) for part in (what, self._name(incarnation), *rest))
        return step.what

    def _name(self, incarnation: int) -> str:
        return SUPERVISOR.name if incarnation == SUPERVISOR.incarnation else self.tables.address(incarnation).name


def _brief(message: Any) -> str:
    """A message's kind and what it is about."""
    about = {
        name: getattr(message, name)
        for name in ("submission", "term", "attempt", "reason", "incarnation", "dead")
        if hasattr(message, name)
    }
    id = getattr(message, "id", None) or getattr(getattr(message, "request", None), "id", None)
    if id is not None:
        about["request"] = id.n
    if isinstance(message, Tokens):
        about["runs"] = [
            (run.id.n, run.submission, run.index, run.ids, run.finish and run.finish.reason) for run in message.runs
        ]
    if isinstance(message, Members):
        about["workers"] = [info.address.incarnation for info in message.workers]
    return " ".join([type(message).__name__, *(f"{name}={value}" for name, value in about.items())])
