"""One worker's way to move pages: for each peer the first kind that works, in the order of KINDS.

Knows which kind each peer uses, and counts bytes and seconds of every push; how a kind works is its own file's
business. `auto` falls back and says why; a kind that the config forces does not. To add a kind: one file with a
link class, and one branch in `_open`.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeAlias, assert_never

import msgspec
import zmq

from cbdisagg.config import ConfigError
from cbdisagg.config import Transfer as Settings
from cbdisagg.messages import RECEIVER_PLACED, Address, AttemptId, PoolInfo, Probe, Push, WorkerInfo
from cbdisagg.transfer import shm
from cbdisagg.transfer.base import (
    BrokenCallback,
    LandedCallback,
    LinkFailed,
    Opened,
    PushDoneCallback,
    Seen,
)
from cbdisagg.transfer.cuda_ipc import Copier, CudaIpcLink, RunCopier
from cbdisagg.transfer.cuda_pool import DevicePool
from cbdisagg.transfer.landing import Landing
from cbdisagg.transfer.pool import MappedPool
from cbdisagg.transfer.zmq import Curve, ZmqLink, ZmqReceiver

Kind: TypeAlias = Literal["shm", "cuda_ipc", "zmq"]
KINDS: tuple[Kind, ...] = ("shm", "zmq")
DEVICE_KINDS: tuple[Kind, ...] = ("cuda_ipc", "zmq")
"""In order of preference, for pools on the host and on GPUs."""


class Link(Protocol):
    """An open way to one peer, of one kind. `close` may come from another thread, and wakes a push that waits."""

    @property
    def kind(self) -> str: ...
    def test(self) -> Opened: ...
    def push(self, layer: int, push: Push) -> None: ...
    def end(self, push: Push) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class _Way:
    """An open link, and how many pages there are at its other end."""

    link: Link
    pages: int

    def holds(self, pages: tuple[int, ...]) -> bool:
        return not pages or 0 <= min(pages) <= max(pages) < self.pages


@dataclass(slots=True)
class _Cost:
    """What a push has taken so far of its caller's time. A push without a `link` goes nowhere."""

    link: Link | None
    nbytes: int = 0
    seconds: float = 0.0


def make_transfer(
    settings: Settings,
    pool: MappedPool | DevicePool,
    me: Address,
    host: str,
    on_push_done: PushDoneCallback,
    on_landed: LandedCallback,
    *,
    copier: Copier | None = None,
    on_broken: BrokenCallback,
    bind: str = "",
    secret_key: str = "",
) -> PairwiseTransfer:
    """The transfer of worker `me`, which receives from now on. `host` is WorkerInfo.host.

    Where `me` receives messages by ipc, data come through a socket beside it; where by tcp, through a port of the
    IP address `bind`, with CURVE: `me.public_key` and `secret_key` are then the cluster's key pair. `copier`: how pages
    get from a pool on a GPU to another; None: by the driver's own copies. Raises
    ConfigError if the socket cannot be opened.
    """
    if me.endpoint.startswith("ipc:"):
        bind_endpoint, curve = f"{me.endpoint}.data", None
    else:
        bind_endpoint, curve = f"tcp://{bind}:*", Curve(me.public_key, secret_key)
    if curve and not secret_key:
        raise ValueError(f"{me.endpoint}: tcp is only for those who have CURVE keys")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    landing = Landing(me.incarnation, pool.pages)
    try:
        receiver = ZmqReceiver(context, me, bind_endpoint, curve, landing, pool.info.page_bytes, on_landed)
    except zmq.ZMQError as error:
        context.destroy(0)
        raise ConfigError(f"cannot receive KV at {bind_endpoint}: {error}") from error
    endpoint = receiver.endpoint
    if curve:  # peers reach this host by the name in our address, which need not be the one that we bind
        endpoint = f"{me.endpoint.rpartition(':')[0]}:{endpoint.rpartition(':')[2]}"
    info = msgspec.structs.replace(pool.info, data_endpoint=endpoint, data_public_key=me.public_key if curve else "")
    if isinstance(pool, DevicePool):
        copier = copier or RunCopier(pool.driver, pool.info.page_bytes)
    return PairwiseTransfer(
        settings, pool, info, me, host, context, curve, landing, receiver, on_push_done, on_broken, copier
    )


class PairwiseTransfer:
    """See `Transfer`. Made by `make_transfer`."""

    def __init__(
        self,
        settings: Settings,
        pool: MappedPool | DevicePool,
        info: PoolInfo,
        me: Address,
        host: str,
        context: zmq.Context[zmq.Socket[bytes]],
        curve: Curve | None,
        landing: Landing,
        receiver: ZmqReceiver,
        on_push_done: PushDoneCallback,
        on_broken: BrokenCallback,
        copier: Copier | None,
    ) -> None:
        self.info = info
        preferred = DEVICE_KINDS if isinstance(pool, DevicePool) else KINDS
        self._kinds = preferred if settings.kind == "auto" else (settings.kind,)
        self._copier = copier
        self._floor_bytes_per_s = settings.floor_gbps * 1e9
        self._pool, self._me, self._host, self._context, self._curve = pool, me, host, context, curve
        self._landing, self._receiver = landing, receiver
        self._on_push_done, self._on_broken = on_push_done, on_broken
        self._lock = threading.Lock()  # guards the three below; the first two are keyed by the peer's incarnation
        self._ways: dict[int, _Way] = {}
        self._inbound: dict[int, str] = {}  # the kind by which a peer pushes to us
        self._gone: dict[str, int] = {}  # by name, the newest incarnation that has died: those before it have, too
        self._costs: dict[int, _Cost] = {}  # by serial

    @property
    def drops(self) -> Counter[str]:
        """How many messages the receiver has refused, by reason."""
        return self._receiver.drops

    def connect(self, peer: WorkerInfo) -> Opened:
        reasons = []
        for kind in self._kinds:
            try:
                opened = self._try(kind, peer)
            except LinkFailed as failure:
                reasons.append(f"{kind}: {failure}")
            else:
                return replace(opened, note="; ".join(reasons))
        return Opened("", 0, 0, 0.0, "; ".join(reasons))

    def _try(self, kind: Kind, peer: WorkerInfo) -> Opened:
        """Open and test one kind; raises LinkFailed."""
        link = self._open(kind, peer)
        try:
            opened = link.test()
            with self._lock:
                if self._has_died(peer.address):  # while we were testing
                    raise LinkFailed(f"{peer.address.name} is gone")
                self._ways[peer.address.incarnation] = _Way(link, peer.pool.pages)
        except BaseException:
            link.close()
            raise
        return opened

    def _open(self, kind: Kind, peer: WorkerInfo) -> Link:
        match kind:
            case "shm":
                if peer.host != self._host:  # rule 5: only the host's own supervisor can say that a writer is dead
                    raise LinkFailed(f"{peer.address.name} is on another host, {peer.host}")
                return shm.ShmLink(self._me, peer, self._pool)
            case "cuda_ipc":
                if not isinstance(self._pool, DevicePool) or self._copier is None:
                    raise LinkFailed("this worker's KV is not on a GPU")
                if peer.host != self._host:
                    raise LinkFailed(f"{peer.address.name} is on another host, {peer.host}")
                return CudaIpcLink(self._me, peer, self._pool, self._copier)
            case "zmq":
                return ZmqLink(self._context, self._me, peer, self._pool, self._curve, self._on_broken)
            case _:
                assert_never(kind)

    def verify(self, peer: Address, probe: Probe) -> Seen:
        if self._has_died(peer):
            return Seen("", 0.0, f"{peer.name} is gone")
        match probe.kind:
            case "shm" if isinstance(self._pool, MappedPool):
                seen = shm.check_slot(self._pool, peer, probe)
            case "cuda_ipc" if isinstance(self._pool, DevicePool):
                seen = self._pool.check_seat(peer, probe)
            case "zmq":
                seen = self._receiver.wait_for_trial(peer, probe)
            case _:
                return Seen("", 0.0, probe.note)
        if seen.kind and seen.bytes_per_s < self._floor_bytes_per_s:
            return Seen(
                "",
                seen.bytes_per_s,
                f"{seen.kind}: {seen.bytes_per_s / 1e9:.2f} GB/s is below transfer.floor_gbps = "
                f"{self._floor_bytes_per_s / 1e9:g}",
            )
        if seen.kind:
            with self._lock:
                if not self._has_died(peer):
                    self._inbound[peer.incarnation] = seen.kind
        return seen

    def disconnect(self, peer: Address) -> None:
        with self._lock:
            self._gone[peer.name] = max(peer.incarnation, self._gone.get(peer.name, 0))
            way = self._ways.pop(peer.incarnation, None)
            self._inbound.pop(peer.incarnation, None)
        if way is not None:
            way.link.close()
        self._landing.forget_source(peer.incarnation)
        self._receiver.forget_trial(peer)
        self._pool.clear_slot(peer.incarnation)

    def _has_died(self, peer: Address) -> bool:
        return peer.incarnation <= self._gone.get(peer.name, -1)

    def expect(self, attempt: AttemptId, source: Address, pages: tuple[int, ...]) -> None:
        if self._inbound.get(source.incarnation) in RECEIVER_PLACED:
            self._landing.expect(attempt, source.incarnation, pages)

    def forget(self, attempt: AttemptId) -> None:
        self._landing.forget(attempt)

    def push(self, layer: int, push: Push) -> None:
        if (cost := self._costs.get(push.serial)) is None:
            cost = self._costs[push.serial] = _Cost(self._link_for(push))
        if cost.link is not None:
            start = time.perf_counter()
            cost.link.push(layer, push)
            cost.seconds += time.perf_counter() - start
            cost.nbytes += len(push.source) * self.info.page_bytes

    def end(self, push: Push) -> None:
        cost = self._costs.pop(push.serial, None) or _Cost(None)
        if cost.link is not None:
            start = time.perf_counter()
            cost.link.end(push)
            cost.seconds += time.perf_counter() - start
        kind = cost.link.kind if cost.link is not None else ""
        self._on_push_done(push.serial, kind, cost.nbytes, cost.seconds)

    def _link_for(self, push: Push) -> Link | None:
        """None if the push goes nowhere: its peer is gone, or wants what cannot be written into its pool."""
        way = self._ways.get(push.to.incarnation)
        if way is None:
            return None
        if len(push.source) != len(push.target) or not way.holds(push.target):
            self._on_broken(push.to, f"{push.to.name} wants KV in pages that it has not")
            return None
        return way.link

    def close(self) -> None:
        with self._lock:
            ways = list(self._ways.values())
            self._ways.clear()
        for way in ways:
            way.link.close()
        self._receiver.close()
        self._context.term()
