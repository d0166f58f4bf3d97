"""One worker: the production core, and a runner and links that take as long as the profile says.

Knows plans, pushes and self-tests, not what is computed: every draw is the same token, so an answer ends by its length.
Life of a step: RunStep -> the host prepares it -> it runs on the bus -> StepDone. Pages that a slice pushes are copied
within the step (sender-placed transports), or travel beside it, layer by layer, and land when the link has carried them
(receiver-placed ones); a worker's outgoing and incoming pushes each go one after the other. Either way they slow who
computes on the same memory from the start of the step until the last byte is there.
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
    Address,
    AttemptId,
    Message,
    Probe,
    Push,
    Sampled,
    Slice,
    StepPlan,
    StepResult,
    WorkerInfo,
)
from cbdisagg.sim.bus import Bus, Flow, Span
from cbdisagg.sim.clock import Clock
from cbdisagg.sim.links import Link
from cbdisagg.sim.network import Network
from cbdisagg.sim.shell import Observer, Shell

DRAWN = Sampled((1,))
NOTHING = Sampled(())
PROBE_BYTES = 1 << 20

Peers: TypeAlias = Callable[[int], "Machine | None"]
"""The living worker of an incarnation."""
Way: TypeAlias = Callable[[Address, Address], "Link | None"]
"""The link from one worker to another, if there is one."""


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
        self._flows: list[tuple[Bus, Flow]] = []  # of the step at work
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
        self._stop_flows()

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
                self._clock.after(0.0, self._verify, peer, probe)
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
        pushes = [piece.push for piece in plan.slices if piece.push is not None]
        copying = sum(self._copying_s(push) for push in pushes)
        seconds = self.slow * (self._cost.step_s(works(plan.slices)) + copying)
        self._began = self._clock.now
        if self._bus is None:
            self._clock.after(seconds, self._end)
            return
        for push in pushes:
            self._start_flows(push, seconds)
        share = min(1.0, copying / seconds) if copying else 0.0
        self._span = self._bus.work(seconds, self._end, share, self.meter.busy_s)

    def _copying_s(self, push: Push) -> float:
        """What the step takes longer for pages that it copies itself."""
        link = self._way(self.address, push.to)
        if link is None or link.receiver_placed:
            return 0.0
        return link.cost.transfer_s(self._bytes(push), runs(push))

    def _start_flows(self, push: Push, step_s: float) -> None:
        """Pages that travel beside the step, all layers but the last: as thin as they are spread over it."""
        link, receiver = self._way(self.address, push.to), self._peers(push.to.incarnation)
        if link is None or receiver is None or not link.receiver_placed or not step_s:
            return
        layers = self._profile.layers
        moving_s = link.cost.transfer_s(self._bytes(push), runs(push)) * (layers - 1) / layers
        self._flows += self._flow(receiver, min(1.0, moving_s / step_s))

    def _flow(self, receiver: Machine, weight: float) -> list[tuple[Bus, Flow]]:
        """On the memory of both ends, which may be one."""
        buses = dict.fromkeys((self._bus, receiver._bus))
        return [(bus, bus.push(weight)) for bus in buses if bus is not None]

    def _stop_flows(self) -> None:
        for bus, flow in self._flows:
            bus.land(flow)
        self._flows.clear()

    def _end(self) -> None:
        if self._dead:
            return
        self._span = None
        self._stop_flows()
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
        link = self._way(self.address, push.to)
        receiver = self._peers(push.to.incarnation)
        self.meter.pushed_bytes += nbytes
        cost = link.cost if link is not None else self._cost
        whole = cost.transfer_s(nbytes, runs(push))
        if link is None or receiver is None or not link.receiver_placed:
            self.shell.handle(PushDone(push.serial, link.kind if link is not None else "", nbytes, whole))
            return
        exposed = cost.exposed_transfer_s(nbytes, step_s, self._profile.layers, runs(push))
        now = self._clock.now
        ends = max(now + exposed, self.sends_until + whole, receiver.receives_until + whole)
        self.sends_until = receiver.receives_until = ends
        for bus, flow in self._flow(receiver, exposed / (ends - now) if ends > now else 0.0):
            self._clock.at(ends, bus.land, flow)
        self._clock.at(ends, self.shell.handle, PushDone(push.serial, link.kind, nbytes, ends - now))
        self._clock.at(ends + link.late_s, receiver._land, push)

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
        link = self._way(self.address, peer)
        cost = link.cost if link is not None else self._cost
        seconds = cost.transfer_s(PROBE_BYTES) + (link.late_s if link is not None else 0.0)
        event = Connected(peer, link.kind if link is not None else "", PROBE_BYTES, 0, seconds, "")
        self._clock.after(seconds, self.shell.handle, event)

    def _verify(self, peer: Address, probe: Probe) -> None:
        link = self._way(peer, self.address)
        self.shell.handle(Verified(peer, probe.kind, link.cost.B if link is not None else 0.0, probe.note))


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
