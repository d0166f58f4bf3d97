"""A whole service in one thread: real cores, engines, pools and transports; the test plays the operating system.

Knows what shells, mailboxes and the supervisor do, and does it one small thing at a time: deliver a message, run a
step, open a way, hear what a transport has to say. Which of the possible things comes next is drawn from a seed, so
every seed is another interleaving; messages stay in order between each two actors and pass through the codec. Time is
what steps and events are said to cost. After every event the invariants of the core that has handled it are checked.
"""

from __future__ import annotations

import itertools
import queue
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import msgspec
from crosswise import coordinator_core
from msgspec.structs import replace
from routes_models import PAGE, TinyModel

from cbdisagg.api.client import Client, Stream, Update
from cbdisagg.config import Config, Kv, Policy, Scheduler, Transfer, Workers
from cbdisagg.core.effects import Connect, Disconnect, Effect, Expect, Forget, Note, RunStep, Tell, Verify, Wake
from cbdisagg.core.events import (
    Connected,
    CoordinatorEvent,
    FromCoordinatorInbox,
    FromWorkerInbox,
    Landed,
    PushDone,
    StepDone,
    Tick,
    Verified,
    WorkerEvent,
)
from cbdisagg.core.invariants import check_coordinator, check_worker
from cbdisagg.core.worker import WorkerCore
from cbdisagg.engine.build import build_runner, describe
from cbdisagg.messages import (
    Address,
    AttemptId,
    Lead,
    Logprobs,
    Message,
    PeerDown,
    Prefill,
    Push,
    Reported,
    RequestId,
    Role,
    Sampling,
    StepPlan,
    Submit,
    Suspect,
    Targets,
    ToApi,
    ToCoordinator,
    ToWorker,
    Up,
    WorkerInfo,
    encode,
)
from cbdisagg.transfer.pool import create_pool
from cbdisagg.transfer.select import make_transfer

HOST = "here"
TARGETS = Targets(ttft_s=1.0, tpot_s=0.05)
STEP_S, TOKEN_S, EVENT_S = 0.004, 0.0005, 0.0001
IDLE_TICKS = 100
"""After so many wake-ups without a step or a test of a way, what is waited for will never come."""
LANDING_S = 20.0
"""How long a transport's thread may take to place what is on its way, before that counts as lost."""

_incarnations = itertools.count(1)


def make_config(
    roles: Sequence[Role],
    *,
    kind: Literal["shm", "zmq"] = "shm",
    mode: Literal["auto", "aggregate", "disaggregate"] = "disaggregate",
    token_budget: int = 64,
    mixed: bool = True,
    max_batch: int = 16,
    prefix_cache: bool = True,
) -> Config:
    return Config(
        workers=tuple(Workers(role) for role in roles),
        kv=Kv(page_size=PAGE, prefix_cache=prefix_cache),
        scheduler=Scheduler(max_batch, token_budget, mixed),
        policy=Policy(mode),
        transfer=Transfer(kind),
    )


@dataclass
class Answer:
    """What a client has got of one stream."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    reason: str = ""
    cached_tokens: int = 0
    preemptions: int = 0

    def add(self, update: Update) -> None:
        self.ids += update.ids
        self.logprobs += update.logprobs
        self.prompt_logprobs += update.prompt_logprobs
        if update.finish is not None:
            self.reason, self.preemptions = update.finish.reason, update.finish.preemptions


class Wire:
    """Messages on their way: in order between each two actors, in any order across pairs."""

    def __init__(self) -> None:
        self.queues: dict[tuple[int, int], deque[tuple[Address, bytes]]] = {}

    def put(self, sender: Address, to: Address, message: Message) -> None:
        pair = (sender.incarnation, to.incarnation)
        self.queues.setdefault(pair, deque()).append((sender, encode(message)))

    def waiting(self) -> list[tuple[int, int]]:
        return [pair for pair, messages in self.queues.items() if messages]

    def take(self, pair: tuple[int, int]) -> tuple[Address, bytes]:
        return self.queues[pair].popleft()


class _Died(Exception):
    """The process that computes is no more."""


class ApiActor:
    """The api's client; nobody reads its streams before they have ended."""

    def __init__(self, world: World) -> None:
        self.address = world.new_address("api")
        self.client = Client(
            self.address.incarnation,
            lambda to, message: world.wire.put(self.address, to, message),
            model="tiny",
            page_size=PAGE,
            now=lambda: world.now,
        )
        self._decoder: msgspec.msgpack.Decoder[ToApi] = msgspec.msgpack.Decoder(ToApi)

    def receive(self, sender: Address, body: bytes) -> None:
        self.client.receive(sender, self._decoder.decode(body))


class CoordinatorActor:
    def __init__(self, world: World, config: Config) -> None:
        self.world, self.wake_at = world, float("inf")
        self.address = world.new_address("coordinator")
        self.core = coordinator_core(self.address, config)
        self._decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)

    def receive(self, sender: Address, body: bytes) -> None:
        self._handle(FromCoordinatorInbox(sender, self._decoder.decode(body)))

    def tick(self) -> None:
        self.wake_at = float("inf")
        self._handle(Tick())

    def _handle(self, event: CoordinatorEvent) -> None:
        for effect in self.core.handle(event, self.world.now):
            match effect:
                case Tell(to, message):
                    self.world.wire.put(self.address, to, message)
                case Wake(at):
                    self.wake_at = at
                case Note():
                    pass
                case _:
                    raise TypeError(f"{effect!r} from a coordinator")
        check_coordinator(self.core)


class WorkerActor:
    """`die_in`: layers that it may still push before it is killed in the middle of a step; None: it lives."""

    def __init__(self, world: World, name: str, role: Role, model: TinyModel, config: Config, pages: int) -> None:
        self.world, self.wake_at = world, float("inf")
        self.name, self.address = name, world.new_address(name)
        about = describe(model.folder, "float32")
        max_len = min(about.context, pages * PAGE)
        self.pool = create_pool(self.address, about.layers, pages, about.page_bytes(PAGE))
        self.runner = build_runner(model.folder, "float32", self.pool.pages, PAGE, max_len, threads=1)
        self.transfer = make_transfer(
            config.transfer,
            self.pool,
            self.address,
            HOST,
            on_push_done=lambda *what: self._say(PushDone(*what)),
            on_landed=lambda attempt: self._say(Landed(attempt)),
            on_broken=lambda peer, reason: self._say(Suspect(peer.name, peer.incarnation, reason)),
        )
        pool = self.transfer.info
        batch = config.scheduler.max_batch
        self.core = WorkerCore(
            WorkerInfo(self.address, role, HOST, about.fingerprint, pool, PAGE, batch, max_len), config
        )
        self.steps: deque[StepPlan] = deque()
        self.ways: deque[Connect | Verify] = deque()
        self.said: deque[WorkerEvent | Suspect] = deque()
        self.landing: set[AttemptId] = set()
        self.die_in: int | None = None
        self._decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)

    def receive(self, sender: Address, body: bytes) -> None:
        message = self._decoder.decode(body)
        match message:
            case Prefill(request=request):
                self.world.jobs_with_output += bool(request.output)
            case Submit(request=request):
                self.world.resumed_with_output += bool(request.output)
        self._handle(FromWorkerInbox(sender, message))

    def tick(self) -> None:
        self.wake_at = float("inf")
        self._handle(Tick())

    def possible(self) -> list[Callable[[], None]]:
        """What its threads and its loop could do now, besides taking messages."""
        deeds = ((self.steps, self._step), (self.ways, self._open), (self.said, self._hear))
        return [deed for waiting, deed in deeds if waiting]

    def close(self) -> None:
        self.transfer.close()
        self.pool.close()

    def _handle(self, event: WorkerEvent) -> None:
        for effect in self.core.handle(event, self.world.now):
            self._perform(effect)
        check_worker(self.core)

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Tell(to, message):
                self.world.wire.put(self.address, to, message)
            case Wake(at):
                self.wake_at = at
            case RunStep(plan):
                self.steps.append(plan)
            case Connect() | Verify():
                self.ways.append(effect)
            case Disconnect(peer):
                self.transfer.disconnect(peer)
            case Expect(attempt, source, pages):
                self.transfer.expect(attempt, source, pages)
                if self.core.peers.receiver_placed(source):
                    self.landing.add(attempt)
            case Forget(attempt):
                self.transfer.forget(attempt)
                self.landing.discard(attempt)
            case Note():
                pass

    def _say(self, what: WorkerEvent | Suspect) -> None:
        """Any thread."""
        self.world.said.put((self, what))

    def _hear(self) -> None:
        what = self.said.popleft()
        if isinstance(what, Suspect):
            self.world.wire.put(self.address, self.world.coordinator.address, what)
        else:
            self._handle(what)

    def _step(self) -> None:
        plan = self.steps.popleft()
        self.world.idle = 0
        try:
            result = self.runner.run(plan, self._push)
        except _Died:
            self.world.kill(self.name)
            return
        for part in plan.slices:
            if part.push is not None:
                self.transfer.end(part.push)
        seconds = STEP_S + TOKEN_S * sum(part.count for part in plan.slices)
        self.world.now += seconds
        self._say(StepDone(replace(result, seconds=seconds)))

    def _push(self, layer: int, push: Push) -> None:
        if self.die_in is not None:
            if self.die_in == 0:
                raise _Died
            self.die_in -= 1
        self.transfer.push(layer, push)

    def _open(self) -> None:
        self.world.idle = 0
        match self.ways.popleft():
            case Connect(peer):
                way = self.transfer.connect(peer)
                self._say(Connected(peer.address, way.kind, way.nbytes, way.checksum, way.seconds, way.note))
            case Verify(peer, probe):
                seen = self.transfer.verify(peer, probe)
                self._say(Verified(peer, seen.kind, seen.bytes_per_s, seen.note))


class World:
    """One api, one coordinator, one worker for each role. Ready to serve once constructed; `close` it."""

    def __init__(
        self, folder: Path, model: TinyModel, roles: Sequence[Role], *, pages: int = 320, seed: int = 0, **settings: Any
    ) -> None:
        self.now = 100.0
        self.wire = Wire()
        self.said: queue.SimpleQueue[tuple[WorkerActor, WorkerEvent | Suspect]] = queue.SimpleQueue()
        self.chance = random.Random(seed)
        self._folder, self._model, self._pages = folder, model, pages
        self.config = make_config(roles, **settings)
        self.supervisor = self.new_address("supervisor")
        self.api = ApiActor(self)
        self.coordinator = CoordinatorActor(self, self.config)
        self.workers: dict[str, WorkerActor] = {}
        self.dead: list[WorkerActor] = []
        self.streams: list[Stream] = []
        self.idle = 0
        self.jobs_with_output = 0  # prefilled elsewhere with output: preempted or resumed
        self.resumed_with_output = 0
        self._introduce()
        counts: dict[Role, int] = {}
        for role in roles:
            number = counts[role] = counts.get(role, -1) + 1
            self.start_worker(f"{role}-{number}", role)
        self.run_until(self.is_ready)

    def new_address(self, name: str) -> Address:
        incarnation = next(_incarnations)
        return Address(name, incarnation, f"ipc://{self._folder}/{name}.{incarnation}")

    def start_worker(self, name: str, role: Role) -> None:
        """It will say Hello when it hears who leads."""
        worker = WorkerActor(self, name, role, self._model, self.config, self._pages)
        self.workers[name] = worker
        self.wire.put(self.supervisor, worker.address, Lead(self.coordinator.address))

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    # --------------------------------------------------------------------------------------------- what happens

    def submit(self, prompt: Sequence[int], sampling: Sampling, group: RequestId | None = None) -> Stream:
        stream = self.api.client.submit(prompt, sampling, TARGETS, group=group)
        self.streams.append(stream)
        return stream

    def kill(self, name: str) -> None:
        """SIGKILL, and the supervisor's word that it has reaped the process. What it has sent is still on its way."""
        worker = self.workers.pop(name)
        worker.close()
        self.dead.append(worker)
        incarnation = worker.address.incarnation
        for pair in [pair for pair in self.wire.queues if pair[1] == incarnation]:
            del self.wire.queues[pair]
        self.wire.put(self.supervisor, self.coordinator.address, PeerDown(name, incarnation, "killed"))

    def suspect(self, name: str) -> None:
        """Somebody finds that this worker makes no progress; it lives and works on."""
        incarnation = self.workers[name].address.incarnation
        self.wire.put(self.supervisor, self.coordinator.address, Suspect(name, incarnation, "a test says so"))

    def run(self) -> list[Answer]:
        """Until all streams submitted so far have ended and nothing is left to do; their answers, in order."""
        self.run_until(lambda: all(stream.ended for stream in self.streams))
        self.settle()
        answers = [read(stream) for stream in self.streams]
        self.streams.clear()
        return answers

    def run_until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if not self.turn():
                self.idle += 1
                assert self.idle < IDLE_TICKS, f"nobody works any more: {self._what_is_left()}"
                self._ring()

    def settle(self) -> None:
        """Until nothing is on its way and nobody works; then nobody may hold anything."""
        while self.turn():
            pass
        for worker in self.workers.values():
            core = worker.core
            assert not (core.requests or core.jobs or core.handoffs.reservations), worker.name
            assert not core.admission.computing, worker.name
            assert not (core.scheduler.flights or core.scheduler.pushes or core.pages.quarantined), worker.name
            assert core.pages.available() == core.pages.total, worker.name
            assert core.reporter.page_leaks == 0, worker.name

    def turn(self) -> bool:
        """One of the things that can happen now, drawn by chance; False if there is none."""
        self._listen()
        choices = [deed for worker in self.workers.values() for deed in worker.possible()]
        choices += [lambda pair=pair: self._deliver(pair) for pair in self.wire.waiting()]
        if choices:
            self.now += EVENT_S
            self.chance.choice(choices)()
            return True
        if not any(worker.landing for worker in self.workers.values()):
            return False
        try:
            worker, what = self.said.get(timeout=LANDING_S)
        except queue.Empty:
            raise AssertionError(f"data never landed: {self._what_is_left()}") from None
        self._heard(worker, what)
        return True

    def _listen(self) -> None:
        while not self.said.empty():
            self._heard(*self.said.get())

    def _heard(self, worker: WorkerActor, what: WorkerEvent | Suspect) -> None:
        if isinstance(what, Landed):
            worker.landing.discard(what.attempt)
        worker.said.append(what)

    def _deliver(self, pair: tuple[int, int]) -> None:
        sender, body = self.wire.take(pair)
        actors = (self.api, self.coordinator, *self.workers.values())
        for actor in actors:
            if actor.address.incarnation == pair[1]:
                actor.receive(sender, body)

    def _ring(self) -> None:
        """Time passes until somebody has asked to be woken."""
        actor = min((self.coordinator, *self.workers.values()), key=lambda actor: actor.wake_at)
        self.now = max(self.now, actor.wake_at)
        actor.tick()

    def _introduce(self) -> None:
        """What a supervisor tells a new coordinator, and its children of it."""
        leader = self.coordinator.address
        self.wire.put(self.supervisor, leader, Up(self.api.address, "api", 1))
        self.wire.put(self.supervisor, leader, Reported(HOST))
        self.wire.put(self.supervisor, self.api.address, Lead(leader))

    def is_ready(self) -> bool:
        """All workers are listed with a load, and all ways between them have been tested."""
        roles = [worker.core.info.role for worker in self.workers.values()]
        ways = sum(b != "prefill" for _, b in itertools.permutations(roles, 2))
        core = self.coordinator.core
        loads = sum(member.load is not None for member in core.workers.values())
        tested = sum(pair.kind == self.config.transfer.kind for pair in core.pairs.values())
        return self.api.client.ready and loads == len(roles) and tested == ways

    def _what_is_left(self) -> str:
        left = {
            worker.name: [
                (r.spec.id.n, r.state.value, len(r.tokens), r.computed) for r in worker.core.requests.values()
            ]
            for worker in self.workers.values()
        }
        jobs = {worker.name: list(worker.core.jobs) for worker in self.workers.values()}
        return f"requests {left}, jobs {jobs}"

    # -------------------------------------------------------------------------------------------- what was counted

    def total(self, counter: str) -> int:
        """Of one of the reporter's counters, over all living workers."""
        return sum(getattr(worker.core.reporter, counter) for worker in self.workers.values())

    def worker(self, name: str) -> WorkerActor:
        """The living one of that name, or the last that has died."""
        return self.workers.get(name) or [dead for dead in self.dead if dead.name == name][-1]

    def pushes(self, name: str) -> int:
        """Pushes that this worker has finished, by the transport that was asked for."""
        return self.worker(name).core.reporter.transfers.get(self.config.transfer.kind, 0)

    @property
    def transfer_bytes(self) -> int:
        kind = self.config.transfer.kind
        return sum(worker.core.reporter.transfer_bytes.get(kind, 0) for worker in self.workers.values())

    def local_prefills(self, reason: str) -> int:
        """Prompts that were to be computed elsewhere, and were not, for this reason."""
        return sum(worker.core.reporter.local_prefills.get(reason, 0) for worker in self.workers.values())


def read(stream: Stream) -> Answer:
    """All of a stream that has ended: reading it never waits, so it needs no event loop."""
    answer = Answer()
    while True:
        step = stream.__anext__()
        try:
            step.send(None)  # type: ignore[attr-defined]
        except StopIteration as got:
            answer.add(got.value)
        except StopAsyncIteration:
            answer.cached_tokens = stream.cached_tokens or 0
            return answer
