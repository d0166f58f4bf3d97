"""All of the service but sockets, threads and models: real cores and the real api client in an in-memory network.

Messages are FIFO for each pair of processes and pass through the codec; whoever drives the world picks what happens
next. The model is fake but looks at every byte: a position's KV is a digest of all tokens up to it, a slice refuses
to run if any earlier position of its pages holds something else, and the next token depends on all before it. So a
page that is freed too early, shared while it is written, or written after it was given away shows up as a wrong
digest.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec
from crosswise import coordinator_core

from cbdisagg.actors.blame import Blame
from cbdisagg.api.client import Client, Stream
from cbdisagg.config import Config, Workers
from cbdisagg.core.effects import (
    Check,
    Connect,
    Disconnect,
    Effect,
    Expect,
    Forget,
    Note,
    Retire,
    RunStep,
    Tell,
    Verify,
    Wake,
)
from cbdisagg.core.events import (
    Checked,
    Connected,
    FromCoordinatorInbox,
    FromWorkerInbox,
    Landed,
    Leave,
    PushDone,
    StepDone,
    Tick,
    Verified,
)
from cbdisagg.core.invariants import check_coordinator, check_worker
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import (
    COARSE,
    RECEIVER_PLACED,
    Address,
    AttemptId,
    Costs,
    Lead,
    Logprobs,
    Members,
    Page,
    PeerDown,
    PoolInfo,
    Push,
    Reported,
    RequestId,
    Return,
    Role,
    Sampled,
    Sampling,
    StepPlan,
    StepResult,
    Suspect,
    Targets,
    ToApi,
    ToCoordinator,
    Tokens,
    ToSupervisor,
    ToWorker,
    Up,
    WorkerInfo,
    encode,
    pack,
    unpack,
)

VOCAB = 7
END_ID = 0
SUPERVISOR = Address("supervisor", 1, "")


def next_token(tokens: list[int], seed: int) -> int:
    """What the fake model draws after `tokens`: a function of all of them."""
    return zlib.crc32(pack([seed, *tokens])) % VOCAB


def digest(tokens: list[int]) -> int:
    """The KV of the last of `tokens`."""
    return zlib.crc32(pack(tokens))


def expected_output(prompt: list[int], sampling: Sampling, max_len: int) -> list[int]:
    """What a request must give, wherever and however often it runs."""
    output: list[int] = []
    while len(output) < sampling.max_tokens and len(prompt) + len(output) < max_len:
        output.append(next_token(prompt + output, sampling.seed))
        if output[-1] in sampling.end_ids:
            break
    return output


@dataclass(frozen=True)
class Setting:
    """What a world is made of. `roles`: one worker each, and the config is told so.

    `kind`: how pages move, by pair of names ("" for no way). `step_s`: what a step of so many slices takes; `costs`:
    what workers think at first that it does.
    """

    roles: tuple[Role, ...]
    config: Config
    pages: int = 8
    page_size: int = 2
    max_batch: int = 3
    plans_ahead: int = 0
    checksums: bool = False
    kind: Callable[[str, str], str] = lambda prefill, decode: "shm"
    step_s: Callable[[int], float] = lambda slices: 0.01
    costs: Costs = COARSE

    def __post_init__(self) -> None:
        workers = tuple(Workers(role) for role in self.roles)
        object.__setattr__(self, "config", msgspec.structs.replace(self.config, workers=workers))

    @property
    def max_len(self) -> int:
        return self.pages * self.page_size


@dataclass
class FakeSlot:
    tokens: list[int]
    prompt_len: int
    pages: list[int]
    sampling: Sampling


@dataclass
class Data:
    """Pages on their way by a receiver-placed transport."""

    attempt: AttemptId
    pages: dict[int, list[int]]


class Actor:
    """One incarnation of a process: a core, the events it has seen, and what it has been asked to do."""

    decoder: msgspec.msgpack.Decoder[Any]

    def __init__(self, world: World, address: Address) -> None:
        self.world, self.address = world, address
        self.wake_at: float | None = None  # on the world's clock
        self.leader: Address | None = None
        self.blame = Blame()
        self.misses = False  # a message to it was lost
        self.clock_ahead = 0.0  # by so much its clock is ahead of the world's: no two hosts agree
        self.journal: list[tuple[Any, float, list[Effect]]] | None = []  # None: not kept

    def feed(self, core: Any, event: Any) -> None:
        now = self.world.now + self.clock_ahead
        effects = core.handle(event, now)
        if self.journal is not None:
            self.journal.append((event, now, effects))
        for effect in effects:
            self.perform(effect)

    def perform(self, effect: Effect) -> None:
        match effect:
            case Tell(to, message):
                self.world.send(self.address, to, message)
            case Wake(at):
                self.wake_at = at - self.clock_ahead
            case Note():
                pass
            case _:
                raise TypeError(effect)

    def receive(self, sender: Address, message: Any) -> None:
        raise NotImplementedError

    def tick(self) -> None:
        raise NotImplementedError

    def notice(self, sender: Address, message: Any) -> None:
        """What the shell of a worker or an api does before its core is told."""
        if isinstance(message, Lead):
            self.leader = message.coordinator
            for suspect in self.blame.all():
                self.world.send(self.address, self.leader, suspect)
        elif isinstance(message, Members):
            for suspect in self.blame.again(message):
                self.world.send(self.address, sender, suspect)

    def miss(self, sender: Address) -> None:
        """A message of the sender was lost: its connection has broken. A worker is replaced at the coordinator's word,
        the coordinator at the supervisor's. An api's streams are its clients': who hears it badly goes itself.
        """
        self.misses = True
        whom = self.address if sender.name.startswith("api") else sender
        suspect = Suspect(whom.name, whom.incarnation, "messages were lost")
        if whom.name == "coordinator":
            self.world.send(self.address, SUPERVISOR, suspect)
            return
        self.blame.add(suspect)
        if self.leader is not None:
            self.world.send(self.address, self.leader, suspect)

    def replay(self, core: Any) -> None:
        """Fed the same events, a fresh core wants the same done."""
        for event, now, effects in self.journal or ():
            assert core.handle(event, now) == effects, event


class CoordinatorActor(Actor):
    decoder = msgspec.msgpack.Decoder(ToCoordinator)

    def __init__(self, world: World, address: Address) -> None:
        super().__init__(world, address)
        self.core = coordinator_core(address, world.setting.config)
        self.leader = address

    def receive(self, sender: Address, message: Any) -> None:
        self._feed(FromCoordinatorInbox(sender, message))

    def tick(self) -> None:
        self.wake_at = None
        self._feed(Tick())

    def _feed(self, event: Any) -> None:
        self.feed(self.core, event)
        check_coordinator(self.core)

    def check_replay(self) -> None:
        self.replay(coordinator_core(self.address, self.world.setting.config))


class WorkerActor(Actor):
    """A worker with its pool (page -> digests), its runner and its transport."""

    decoder = msgspec.msgpack.Decoder(ToWorker)

    def __init__(self, world: World, address: Address, role: Role) -> None:
        super().__init__(world, address)
        setting = world.setting
        pool = PoolInfo(0, 0, "", 0, 0, 1, setting.pages, 64, "")
        size, most, longest = setting.page_size, setting.max_batch, setting.max_len
        self.info = WorkerInfo(address, role, "host", "f", pool, size, most, longest, setting.costs)
        self.core = WorkerCore(self.info, setting.config, setting.plans_ahead)
        self.pool = [[0] * setting.page_size for _ in range(setting.pages)]
        self.slots: dict[int, FakeSlot] = {}
        self.plans: deque[StepPlan] = deque()
        self.done: deque[Push] = deque()  # the copies of a step
        self.connects: deque[WorkerInfo] = deque()
        self.verifies: deque[Verify] = deque()
        self.expected: dict[AttemptId, tuple[int, set[int]]] = {}
        self.checks: deque[Checked] = deque()
        self.leaving = False
        self.retired = False

    def receive(self, sender: Address, message: Any) -> None:
        self.notice(sender, message)
        self._feed(FromWorkerInbox(sender, message))

    def tick(self) -> None:
        self.wake_at = None
        self._feed(Tick())

    def _feed(self, event: Any) -> None:
        self.feed(self.core, event)
        check_worker(self.core)

    def perform(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan):
                self.plans.append(plan)
            case Connect(peer):
                self.connects.append(peer)
            case Verify():
                self.verifies.append(effect)
            case Expect(attempt, source, pages):
                self.expected[attempt] = (source.incarnation, set(pages))
            case Forget(attempt):
                self.expected.pop(attempt, None)
            case Check(attempt, pages, checksums):
                right = [checksums[4 * n : 4 * n + 4] == self.checksum(page) for n, page in enumerate(pages)]
                self.checks.append(
                    Checked(attempt, tuple(page for page, ok in zip(pages, right, strict=True) if not ok))
                )
            case Retire():
                self.retired = True
            case Disconnect(peer):
                for attempt in [a for a, (source, _) in self.expected.items() if source == peer.incarnation]:
                    del self.expected[attempt]
            case _:
                super().perform(effect)

    def possible(self) -> list[str]:
        """The methods by which something can happen here by itself."""
        queues = {
            "step": self.plans,
            "push_done": self.done,
            "connect": self.connects,
            "verify": self.verifies,
            "check": self.checks,
        }
        return [name for name, queue in queues.items() if queue]

    # ------------------------------------------------------------------------------------------ the runner

    def step(self, *, only_push: bool = False) -> None:
        """Run the oldest plan. `only_push`: the process dies after its pushes, before anybody learns of the step."""
        plan = self.plans.popleft()
        for slot in plan.release:
            del self.slots[slot]
        for admit in plan.admit:
            assert admit.slot not in self.slots, "a slot is given twice"
            tokens = [*unpack(admit.prompt), *unpack(admit.output)]
            self.slots[admit.slot] = FakeSlot(tokens, len(admit.prompt) // 4, list(admit.pages), admit.sampling)
        for slot, pages in plan.grow:
            self.slots[slot].pages += pages
        sampled = [self._compute(piece) for piece in plan.slices]
        for piece in plan.slices:
            if piece.push is not None:
                self._push(piece.push)
        if not only_push:
            pushes = [piece.push for piece in plan.slices if piece.push is not None and self.world.setting.checksums]
            seconds = self.world.setting.step_s(len(plan.slices))
            sums = tuple((push.serial, b"".join(map(self.checksum, push.source))) for push in pushes)
            self._feed(StepDone(StepResult(plan.number, tuple(sampled), seconds), sums))

    def _compute(self, piece: Any) -> Sampled:
        slot, size = self.slots[piece.slot], self.world.setting.page_size
        end = piece.start + piece.count
        assert piece.count > 0 and end <= len(slot.tokens), "a slice beyond the tokens known"
        for position in range(end):
            page, offset = slot.pages[position // size], position % size
            value = digest(slot.tokens[: position + 1])
            if position >= piece.start:
                self.pool[page][offset] = value
            assert self.pool[page][offset] == value, f"{self.address.name}: page {page} holds another's KV"
        scored = max(0, min(end, slot.prompt_len - 1) - piece.start) if piece.scores else 0
        scores = tuple(Logprobs(-float(piece.start + 1 + n)) for n in range(scored))
        if not piece.draws:
            return Sampled((), (), scores)
        assert end == len(slot.tokens), "a draw that is not at the end"
        token = next_token(slot.tokens, slot.sampling.seed)
        slot.tokens.append(token)
        told = (Logprobs(-float(end)),) if slot.sampling.logprobs >= 0 else ()
        return Sampled((token,), told, scores)

    def _push(self, push: Push) -> None:
        """Shared memory is written within the step. Where the receiver places them, pages are read until PushDone."""
        if self.world.kind(self.address, push.to) not in RECEIVER_PLACED:
            self.world.place(push.to, self._content(push))
        self.done.append(push)

    def push_done(self) -> None:
        push = self.done.popleft()
        kind = self.world.kind(self.address, push.to)
        if kind in RECEIVER_PLACED:
            self.world.send_data(self.address, push.to, self._content(push))
        self._feed(PushDone(push.serial, kind, 64 * len(push.source), 0.001))

    def _content(self, push: Push) -> Data:
        pages = zip(push.source, push.target, strict=True)
        return Data(push.attempt, {there: list(self.pool[here]) for here, there in pages})

    def checksum(self, page: int) -> bytes:
        return zlib.crc32(repr(self.pool[page]).encode()).to_bytes(4, "little")

    def check(self) -> None:
        self._feed(self.checks.popleft())

    # ------------------------------------------------------------------------------------------ the end

    def leave(self) -> None:
        """SIGTERM."""
        self.leaving = True
        self._feed(Leave())

    def relieve(self, id: RequestId) -> None:
        """It wants to be rid of a request without leaving: as flow does, but whether anybody gains by it or not."""
        coordinator = self.core.peers.coordinator
        if coordinator is not None:
            self.world.send(self.address, coordinator, Return(self.core._as_it_is(self.core.requests[id])))

    def end(self) -> None:
        """Nothing is left to do here: the process ends by itself."""
        self.world.kill(self.address.incarnation)

    def written(self, data: Data) -> None:
        """A peer writes into this worker's memory, which can refuse nothing: only the protocol keeps it away."""
        for page, values in data.pages.items():
            writer = self.core.pages.writers.get(Page(page))
            assert writer == data.attempt, f"{self.address.name}: {data.attempt} writes page {page} of {writer}"
            self.pool[page] = list(values)

    def land(self, sender: int, data: Data) -> None:
        """As a receiver does: only what is expected, from whom it is expected, is written."""
        source, missing = self.expected.get(data.attempt, (None, set()))
        if source != sender or not missing >= data.pages.keys():
            return
        for page, values in data.pages.items():
            self.pool[page] = list(values)
            missing.remove(page)
        if not missing:
            del self.expected[data.attempt]
            self._feed(Landed(data.attempt))

    # ------------------------------------------------------------------------------------------- the pairing

    def connect(self) -> None:
        peer = self.connects.popleft().address
        self._feed(Connected(peer, self.world.kind(self.address, peer), 1, 0, 1e-9, ""))

    def verify(self) -> None:
        effect = self.verifies.popleft()
        self._feed(Verified(effect.peer, effect.probe.kind, 1e9, effect.probe.note))

    def check_replay(self) -> None:
        self.replay(WorkerCore(self.info, self.world.setting.config, self.world.setting.plans_ahead))


class ApiActor(Actor):
    """The real client. Of each run it sees, it checks that it continues the stream."""

    decoder = msgspec.msgpack.Decoder(ToApi)

    def __init__(self, world: World, address: Address) -> None:
        super().__init__(world, address)
        self.client = Client(
            address.incarnation, self._tell, model="m", page_size=world.setting.page_size, now=self._clock
        )
        self.streams: list[Stream] = []
        self.cancelled: set[int] = set()

    def receive(self, sender: Address, message: Any) -> None:
        self.notice(sender, message)
        living = {stream.id: stream for stream in self.streams if not stream.ended}
        if isinstance(message, Tokens):
            for run in message.runs:
                stream = living.get(run.id)
                if stream is not None and stream.submission == run.submission:
                    known = tuple(stream.output[run.index :][: len(run.ids)])  # of a message that comes twice
                    early = run.index > len(stream.output) and not (stream.in_transit or self.misses)
                    assert not early and known in ((), run.ids), f"{run} is no continuation"
                    self._check_logprobs(stream, run)
        self.client.receive(sender, message)

    def _check_logprobs(self, stream: Stream, run: Any) -> None:
        prompt_len = len(stream.request.prompt) // 4
        if stream.request.sampling.logprobs >= 0:
            assert run.logprobs == tuple(Logprobs(-float(prompt_len + run.index + n)) for n in range(len(run.ids)))
        if run.prompt_logprobs:
            assert run.prompt_logprobs == (None, *(Logprobs(-float(n)) for n in range(1, prompt_len)))

    def submit(self, prompt: list[int], sampling: Sampling, targets: Targets, sibling_of: Stream | None) -> Stream:
        group = sibling_of.id if sibling_of is not None else None
        self.streams.append(self.client.submit(prompt, sampling, targets, group=group))
        return self.streams[-1]

    def cancel(self, stream: Stream) -> None:
        if not stream.ended:
            self.cancelled.add(stream.id.n)
        stream.cancel("disconnect")

    def _tell(self, to: Address, message: Any) -> None:
        self.world.send(self.address, to, message)

    def _clock(self) -> float:
        return self.world.now

    def tick(self) -> None:
        raise AssertionError("the client sets no timer")


class SupervisorActor(Actor):
    """Reaps what dies and starts it anew; kills suspects."""

    decoder = msgspec.msgpack.Decoder(ToSupervisor)

    def receive(self, sender: Address, message: Any) -> None:
        if not isinstance(message, Suspect) or message.incarnation not in self.world.actors:
            return
        if message.name == "coordinator":
            self.world.start_coordinator()
        else:
            self.world.kill(message.incarnation)

    def tick(self) -> None:
        raise AssertionError("the supervisor sets no timer")


@dataclass
class World:
    setting: Setting
    now: float = 0.0
    actors: dict[int, Actor] = field(default_factory=dict)
    queues: dict[tuple[int, int], deque[tuple[Address, Any]]] = field(default_factory=dict)
    data: dict[tuple[int, int], deque[Data]] = field(default_factory=dict)
    ups: list[Up] = field(default_factory=list)
    downs: list[PeerDown] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)  # incarnations that do nothing, as after SIGSTOP
    coordinator: CoordinatorActor = None  # type: ignore[assignment]  # until start_coordinator
    last_incarnation: int = 10

    def __post_init__(self) -> None:
        self.supervisor = SupervisorActor(self, SUPERVISOR)
        self.actors = {SUPERVISOR.incarnation: self.supervisor}
        self.start_api()
        self.start_coordinator()
        for number, role in enumerate(self.setting.roles):
            self.start_worker(f"{role}-{number}", role)

    # ------------------------------------------------------------------------------------------- processes

    def _incarnate(self) -> int:
        self.last_incarnation += 1
        return self.last_incarnation

    def start_coordinator(self) -> None:
        """All that lives and has died is told to it, then that this was all."""
        if self.coordinator is not None:
            self._remove(self.coordinator)
        self.coordinator = CoordinatorActor(self, Address("coordinator", self._incarnate(), ""))
        self.actors[self.coordinator.address.incarnation] = self.coordinator
        for message in (*self.ups, *self.downs, Reported("host")):
            self.send(SUPERVISOR, self.coordinator.address, message)
        for up in self.ups:
            self.send(SUPERVISOR, up.address, Lead(self.coordinator.address))

    def start_api(self) -> None:
        """Streams of an earlier api have lost their readers."""
        self.api = ApiActor(self, Address("api-0", self._incarnate(), ""))
        self.actors[self.api.address.incarnation] = self.api
        self._announce(self.api.address, "api")

    def start_worker(self, name: str, role: Role) -> None:
        worker = WorkerActor(self, Address(name, self._incarnate(), ""), role)
        self.actors[worker.address.incarnation] = worker
        self._announce(worker.address, "worker")

    def _announce(self, address: Address, kind: Literal["api", "worker"]) -> None:
        self.ups.append(Up(address, kind, 0))
        if self.coordinator is not None:
            self.send(SUPERVISOR, self.coordinator.address, self.ups[-1])
            self.send(SUPERVISOR, address, Lead(self.coordinator.address))

    def kill(self, incarnation: int, unsent: bool = False) -> None:
        """SIGKILL; the supervisor reaps it and starts a successor. What it has sent may still arrive.

        `unsent`: what it had to say was still in its own buffers.
        """
        actor = self.actors[incarnation]
        self._remove(actor)
        for queues in (self.queues, self.data) if unsent else ():
            for pair in [pair for pair in queues if pair[0] == incarnation]:
                del queues[pair]
        self.ups = [up for up in self.ups if up.address != actor.address]
        kind: Literal["api", "worker"] = "worker" if isinstance(actor, WorkerActor) else "api"
        self.downs.append(PeerDown(actor.address.name, incarnation, "killed", kind))
        self.send(SUPERVISOR, self.coordinator.address, self.downs[-1])
        if isinstance(actor, WorkerActor):
            actor.check_replay()
            self.start_worker(actor.address.name, actor.info.role)
        else:
            self.start_api()

    def suspect(self, incarnation: int) -> None:
        """Somebody finds that it lives and does nothing; it goes on until the supervisor kills it."""
        actor = self.actors[incarnation]
        suspect = Suspect(actor.address.name, incarnation, "no progress")
        self.send(self.api.address, self.coordinator.address, suspect)

    def _remove(self, actor: Actor) -> None:
        del self.actors[actor.address.incarnation]
        self.stopped.discard(actor.address.incarnation)
        for queues in (self.queues, self.data):
            for pair in [pair for pair in queues if pair[1] == actor.address.incarnation]:
                del queues[pair]

    @property
    def workers(self) -> list[WorkerActor]:
        return [actor for actor in self.actors.values() if isinstance(actor, WorkerActor)]

    def kind(self, prefill: Address, decode: Address) -> str:
        return self.setting.kind(prefill.name, decode.name)

    # --------------------------------------------------------------------------------------------- network

    def send(self, sender: Address, to: Address, message: Any) -> None:
        addressee = self.actors.get(to.incarnation)
        if addressee is not None:
            decoded = addressee.decoder.decode(encode(message))
            assert decoded == message
            self.queues.setdefault((sender.incarnation, to.incarnation), deque()).append((sender, decoded))

    def send_data(self, sender: Address, to: Address, data: Data) -> None:
        if to.incarnation in self.actors:
            self.data.setdefault((sender.incarnation, to.incarnation), deque()).append(data)

    def place(self, to: Address, data: Data) -> None:
        """As shared memory does: the pages are there at once, if the process still lives."""
        receiver = self.actors.get(to.incarnation)
        if receiver is not None:
            assert isinstance(receiver, WorkerActor)
            receiver.written(data)

    def deliver(self, pair: tuple[int, int]) -> None:
        sender, message = self.queues[pair].popleft()
        self.actors[pair[1]].receive(sender, message)

    def duplicate(self, pair: tuple[int, int]) -> None:
        """The next message of this pair comes twice."""
        self.queues[pair].insert(1, self.queues[pair][0])

    def lose(self, pair: tuple[int, int]) -> None:
        """The connection breaks: the next message is lost, and the receiver notices."""
        sender, _ = self.queues[pair].popleft()
        self.actors[pair[1]].miss(sender)

    def deliver_data(self, pair: tuple[int, int]) -> None:
        data = self.data[pair].popleft()
        receiver = self.actors[pair[1]]
        assert isinstance(receiver, WorkerActor)
        receiver.land(pair[0], data)

    # ------------------------------------------------------------------------------------------ what can happen

    def busy_pairs(self) -> list[tuple[int, int]]:
        return [pair for pair, queue in self.queues.items() if queue]

    def actions(self) -> Iterator[Callable[[], None]]:
        """Everything that can happen by itself, but for the passing of time."""
        for pair in [pair for pair in self.busy_pairs() if pair[1] not in self.stopped]:
            yield lambda pair=pair: self.deliver(pair)  # type: ignore[misc]
        for pair in [pair for pair, queue in self.data.items() if queue and pair[1] not in self.stopped]:
            yield lambda pair=pair: self.deliver_data(pair)  # type: ignore[misc]
        going = [actor for incarnation, actor in self.actors.items() if incarnation not in self.stopped]
        workers = [actor for actor in going if isinstance(actor, WorkerActor)]
        for worker in workers:
            for name in worker.possible():
                yield getattr(worker, name)
        for actor in going:
            if actor.wake_at is not None and actor.wake_at <= self.now:
                yield actor.tick
        for worker in workers:
            if worker.retired:
                yield worker.end

    def settle(self, most: int = 20_000, patience: int = 30) -> None:
        """Let everything happen that can, then let time pass, until every stream has ended and all is told.

        `patience`: how often time may pass, in vain or not.
        """
        idle = 0
        for _ in range(most):
            action = next(self.actions(), None)
            if action is not None:
                action()
                continue
            idle += 1
            if idle > patience:
                return
            wakes = [actor.wake_at for actor in self.actors.values() if actor.wake_at is not None]
            self.now = max(self.now, min(wakes) + 0.001)  # timers ring a little late, as an event loop's do
        raise AssertionError(f"no quiet after {most} events")

    def check_quiet(self) -> None:
        """Nothing is left: every stream has ended, every page is free or cached, nobody waits for anything."""
        for stream in self.api.streams:
            assert stream.ended, f"{stream.id} has not ended: {self.describe()}"
        for worker in self.workers:
            core = worker.core
            left = (
                core.requests,
                core.supply,
                core.handoffs.reservations,
                core.scheduler.flights,
                core.scheduler.pushes,
            )
            assert not any(left), f"{worker.address.name} still has {left}"
            assert not core.pages.quarantined and not core.pages.writers, f"{worker.address.name} waits for a writer"
            assert not core.admission.computing, f"{worker.address.name} waits for a prefix"
            assert core.pages.available() == core.pages.total, f"{worker.address.name} has lost pages"
            assert core.reporter.page_leaks == 0
            assert not worker.expected, f"{worker.address.name} still expects data"
            worker.check_replay()
        placed = self.coordinator.core.placed
        assert not placed, f"the coordinator still knows of {list(placed)}"
        self.coordinator.check_replay()

    def describe(self) -> str:
        """For a failure's message: who holds what."""
        return "; ".join(
            f"{w.address.name}: "
            + ", ".join(
                f"{r.spec.id.n} {'job ' if r.job else ''}{r.state.value} {r.computed}/{len(r.tokens)} {r.pages}"
                for r in [*w.core.requests.values(), *w.core.jobs.values()]
            )
            + f" free {len(w.core.pages.free)}"
            for w in self.workers
        )
