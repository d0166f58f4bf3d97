"""One worker: the production core, and a runner and links that take as long as the profile says.

Knows plans, pushes and self-tests, not what is computed: every draw is the same token, so an answer ends by its length.
Life of a step: RunStep -> the host prepares it -> it runs on the bus -> StepDone. Pages that a slice pushes are copied
within the step (sender-placed transports), or travel beside it, layer by layer, and land when the link has carried them
(receiver-placed ones); a worker's outgoing and incoming pushes each go one after the other.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from cbdisagg.config import Config
from cbdisagg.core.cost import Work
from cbdisagg.core.effects import Connect, Disconnect, Effect, Expect, Forget, Retire, RunStep, Verify
from cbdisagg.core.events import (
    Connected,
    FromWorkerInbox,
    Landed,
    PushDone,
    StepDone,
    Verified,
)
from cbdisagg.core.profile import Profile
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import (
    RECEIVER_PLACED,
    Address,
    AttemptId,
    Message,
    Push,
    Sampled,
    Slice,
    StepPlan,
    StepResult,
    WorkerInfo,
)
from cbdisagg.sim.bus import Bus, Span
from cbdisagg.sim.clock import Clock
from cbdisagg.sim.network import Network
from cbdisagg.sim.shell import Observer, Shell

DRAWN = Sampled((1,))
NOTHING = Sampled(())
PROBE_BYTES = 1 << 20

Peers: TypeAlias = Callable[[int], "Machine | None"]
"""The living worker of an incarnation."""
Way: TypeAlias = Callable[[Address, Address], str]
"""The kind of transport from one worker to another, "" for none."""


@dataclass(slots=True)
class Meter:
    """What one worker has done. Seconds at work are those of steps, slowed by others or not."""

    steps: int = 0
    busy_s: float = 0.0
    tokens: int = 0
    draws: int = 0
    pushed_bytes: int = 0
    most_pages: int = 0

    def add(self, other: Meter) -> None:
        """Another start of the same worker."""
        self.steps += other.steps
        self.busy_s += other.busy_s
        self.tokens += other.tokens
        self.draws += other.draws
        self.pushed_bytes += other.pushed_bytes
        self.most_pages = max(self.most_pages, other.most_pages)


class Machine:
    """A process: it receives from the network. `slow` divides its speed (a fault)."""

    def __init__(
        self,
        info: WorkerInfo,
        config: Config,
        profile: Profile,
        clock: Clock,
        network: Network,
        bus: Bus | None,
        peers: Peers,
        way: Way,
        observer: Observer | None,
    ) -> None:
        self.address, self.host, self.info = info.address, info.host, info
        self.core = WorkerCore(info, config)
        self.shell = Shell(self.core, self, clock, network, self, observer)
        self.meter = Meter()
        self.slow = 1.0
        self.on_retire: Callable[[], None] = _nothing
        self.receives_until = self.sends_until = 0.0  # when the pushes under way will have come, and gone
        self._profile, self._cost = profile, profile.cost
        self._clock, self._bus = clock, bus
        self._peers, self._way = peers, way
        self._plans: deque[StepPlan] = deque()
        self._span: Span | None = None
        self._began = 0.0
        self._expected: dict[AttemptId, int] = {}  # pages that have not landed
        self._dead = False

    def receive(self, sender: Address, message: Message) -> None:
        self.shell.handle(FromWorkerInbox(sender, message))  # type: ignore[arg-type]  # sent to a worker

    def die(self) -> None:
        self._dead = True
        self.shell.close()
        if self._bus is not None and self._span is not None:
            self._bus.drop(self._span)

    def perform(self, effect: Effect) -> None:
        match effect:
            case RunStep(plan):
                self._plans.append(plan)
                if len(self._plans) == 1:
                    self._prepare()
            case Expect(attempt, _, pages):
                self._expected[attempt] = len(pages)
            case Forget(attempt):
                self._expected.pop(attempt, None)
            case Connect(peer):
                self._connect(peer.address)
            case Verify(peer, probe):
                self._clock.after(0.0, self.shell.handle, Verified(peer, probe.kind, self._profile.B, probe.note))
            case Disconnect():
                pass
            case Retire():
                self.on_retire()
            case _:
                raise TypeError(f"{effect!r} in a simulation")

    # -------------------------------------------------------------------------------------------------- steps

    def _prepare(self) -> None:
        host = self._profile.host
        self._clock.after(host.step_s + host.token_s * len(self._plans[0].slices), self._begin)

    def _begin(self) -> None:
        if self._dead:
            return
        plan = self._plans[0]
        seconds = self.slow * (self._cost.step_s(works(plan.slices)) + self._copying_s(plan.slices))
        self._began = self._clock.now
        if self._bus is None:
            self._clock.after(seconds, self._end)
        else:
            self._span = self._bus.work(seconds, self._end)

    def _copying_s(self, slices: Iterable[Slice]) -> float:
        """What the step takes longer for pages that it copies itself."""
        pushes = (piece.push for piece in slices)
        return sum(
            self._cost.transfer_s(self._bytes(push), runs(push))
            for push in pushes
            if push is not None and self._way(self.address, push.to) not in RECEIVER_PLACED
        )

    def _end(self) -> None:
        if self._dead:
            return
        self._span = None
        plan = self._plans.popleft()
        seconds = self._clock.now - self._began
        self._count(plan, seconds)
        for piece in plan.slices:
            if piece.push is not None:
                self._push(piece.push, seconds)
        sampled = tuple(DRAWN if piece.draws else NOTHING for piece in plan.slices)
        if self._plans:
            self._prepare()
        self.shell.handle(StepDone(StepResult(plan.number, sampled, seconds)))

    def _count(self, plan: StepPlan, seconds: float) -> None:
        meter = self.meter
        meter.steps += 1
        meter.busy_s += seconds
        for piece in plan.slices:
            meter.tokens += piece.count
            meter.draws += piece.draws
        pages = self.core.pages
        meter.most_pages = max(meter.most_pages, pages.total - pages.available())

    # ------------------------------------------------------------------------------------------------- pushes

    def _bytes(self, push: Push) -> int:
        return len(push.source) * self.info.page_size * self._profile.kv_bytes

    def _push(self, push: Push, step_s: float) -> None:
        """After the step: what it has copied is there, what travels beside it lands when the links have carried it."""
        nbytes = self._bytes(push)
        kind = self._way(self.address, push.to)
        receiver = self._peers(push.to.incarnation)
        self.meter.pushed_bytes += nbytes
        whole = self._cost.transfer_s(nbytes, runs(push))
        if kind not in RECEIVER_PLACED or receiver is None:
            self.shell.handle(PushDone(push.serial, kind, nbytes, whole))
            return
        exposed = self._cost.exposed_transfer_s(nbytes, step_s, self._profile.layers, runs(push))
        now = self._clock.now
        ends = max(now + exposed, self.sends_until + whole, receiver.receives_until + whole)
        self.sends_until = receiver.receives_until = ends
        for bus in {self._bus, receiver._bus} - {None}:
            bus.push(ends - now)  # type: ignore[union-attr]  # None is taken out
        self._clock.at(ends, self.shell.handle, PushDone(push.serial, kind, nbytes, ends - now))
        self._clock.at(ends, receiver._land, push)

    def _land(self, push: Push) -> None:
        missing = self._expected.get(push.attempt)
        if missing is None:
            return
        self._expected[push.attempt] = missing - len(push.target)
        if missing == len(push.target):
            del self._expected[push.attempt]
            self.shell.handle(Landed(push.attempt))

    def _connect(self, peer: Address) -> None:
        """A self-test: a pattern is sent, and the peer told of it."""
        seconds = self._cost.transfer_s(PROBE_BYTES)
        event = Connected(peer, self._way(self.address, peer), PROBE_BYTES, 0, seconds, "")
        self._clock.after(seconds, self.shell.handle, event)


def _nothing() -> None:
    """Nobody waits for the end of a worker that was not asked to leave."""


def works(slices: Iterable[Slice]) -> Iterable[Work]:
    """What a step computes, as the cost model counts it: one token with others before it is a decode."""
    return (Work(piece.start, piece.count, piece.count == 1 and piece.start > 0) for piece in slices)


def runs(push: Push) -> int:
    """Descriptors: runs of pages that are neighbours at both ends."""
    ends = zip(push.source, push.target, strict=True)
    last = (-2, -2)
    count = 0
    for source, target in ends:
        count += (source, target) != (last[0] + 1, last[1] + 1)
        last = (source, target)
    return count
