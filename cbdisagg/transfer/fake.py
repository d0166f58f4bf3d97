"""The Transfer that tests use: pools are arrays in one process, every push is a copy. Ordered as shm: nothing lands."""

from __future__ import annotations

import numpy as np

from cbdisagg.messages import Address, AttemptId, PoolInfo, Probe, Push, WorkerInfo
from cbdisagg.transfer.base import Opened, PushDoneCallback, Seen


class FakeTransfer:
    """`network`, shared by the workers of a test, maps incarnations to their transfers."""

    def __init__(
        self, network: dict[int, FakeTransfer], me: Address, info: PoolInfo, on_push_done: PushDoneCallback
    ) -> None:
        self.info, self.pages = info, np.zeros((info.layers, info.pages, info.page_bytes), np.uint8)
        self._network, self._me, self._on_push_done = network, me, on_push_done
        network[me.incarnation] = self

    def connect(self, peer: WorkerInfo) -> Opened:
        reached = peer.address.incarnation in self._network
        return Opened("shm", 1, 0, 1.0, "") if reached else Opened("", 0, 0, 0.0, f"no {peer.address.name}")

    def verify(self, peer: Address, probe: Probe) -> Seen:
        return Seen(probe.kind, float(probe.nbytes), probe.note)

    def disconnect(self, peer: Address) -> None:
        self._network.pop(peer.incarnation, None)

    def expect(self, attempt: AttemptId, source: Address, pages: tuple[int, ...]) -> None: ...

    def forget(self, attempt: AttemptId) -> None: ...

    def push(self, layer: int, push: Push) -> None:
        if peer := self._network.get(push.to.incarnation):
            peer.pages[layer, list(push.target)] = self.pages[layer, list(push.source)]

    def end(self, push: Push) -> None:
        self._on_push_done(push.serial, "shm", len(push.source) * self.pages[:, 0].size, 0.0)

    def close(self) -> None:
        self._network.pop(self._me.incarnation, None)
