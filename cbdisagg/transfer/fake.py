"""The Transfer that tests use: pools are arrays in one process, every push is a copy. No sockets, no threads."""

from __future__ import annotations

import numpy as np

from cbdisagg.messages import RECEIVER_PLACED, Address, AttemptId, PoolInfo, Probe, Push, WorkerInfo
from cbdisagg.transfer.base import LandedCallback, Opened, PushDoneCallback, Seen


class FakeTransfer:
    """`network`, shared by the workers of a test, maps incarnations to transfers. `kind` may be shm or zmq."""

    def __init__(
        self,
        network: dict[int, FakeTransfer],
        me: Address,
        info: PoolInfo,
        on_push_done: PushDoneCallback,
        on_landed: LandedCallback,
        kind: str = "shm",
    ) -> None:
        self.info, self.pages = info, np.zeros((info.layers, info.pages, info.page_bytes), np.uint8)
        self._network, self._kind = network, kind
        self._on_push_done, self._on_landed = on_push_done, on_landed
        self._missing: dict[AttemptId, set[int]] = {}
        network[me.incarnation] = self

    def connect(self, peer: WorkerInfo) -> Opened:
        reached = peer.address.incarnation in self._network
        return Opened(self._kind, 1, 0, 1e-9, "") if reached else Opened("", 0, 0, 0.0, f"no {peer.address.name}")

    def verify(self, peer: Address, probe: Probe) -> Seen:
        return Seen(probe.kind, probe.nbytes / probe.seconds if probe.kind else 0.0, probe.note)

    def disconnect(self, peer: Address) -> None:
        self._network.pop(peer.incarnation, None)

    def expect(self, attempt: AttemptId, source: Address, pages: tuple[int, ...]) -> None:
        self._missing[attempt] = set(pages)

    def forget(self, attempt: AttemptId) -> None:
        self._missing.pop(attempt, None)

    def push(self, layer: int, push: Push) -> None:
        if peer := self._network.get(push.to.incarnation):
            peer.pages[layer, list(push.target)] = self.pages[layer, list(push.source)]

    def end(self, push: Push) -> None:
        self._on_push_done(push.serial, self._kind, len(push.source) * self.pages[:, 0].size, 0.0)
        if (peer := self._network.get(push.to.incarnation)) and self._kind in RECEIVER_PLACED:
            peer._arrive(push.attempt, push.target)

    def _arrive(self, attempt: AttemptId, pages: tuple[int, ...]) -> None:
        if (missing := self._missing.get(attempt)) is not None:
            missing.difference_update(pages)
            if not missing:
                del self._missing[attempt]
                self._on_landed(attempt)

    def close(self) -> None:
        self._missing.clear()
