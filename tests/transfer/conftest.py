"""Workers with real pools and transfers, several in this process; each test's sockets lie in its own folder."""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from cbdisagg.config import Transfer as Settings
from cbdisagg.messages import Address, AttemptId, Probe, Push, RequestId, WorkerInfo
from cbdisagg.transfer.base import Opened, Seen
from cbdisagg.transfer.pool import create_pool
from cbdisagg.transfer.select import make_transfer

LAYERS, PAGES, PAGE_BYTES = 5, 24, 4096
_incarnations = itertools.count(1_000)


class Worker:
    """One worker's end: its pool (random bytes), its transfer, and what the callbacks said."""

    def __init__(
        self,
        folder: Path,
        kind: str = "auto",
        host: str = "here",
        floor_gbps: float = 0.0,
        page_bytes: int = PAGE_BYTES,
        tcp_keys: tuple[str, str] | None = None,
    ) -> None:
        number = next(_incarnations)
        endpoint = "tcp://127.0.0.1:1" if tcp_keys else f"ipc://{folder}/w{number}"
        public_key, secret_key = tcp_keys or ("", "")
        self.address = Address(f"w{number}", number, endpoint, public_key)
        self.pool = create_pool(self.address, LAYERS, PAGES, page_bytes)
        self.pages = self.pool.pages
        self.pages[:] = np.random.default_rng(number).integers(0, 256, self.pages.shape, np.uint8)
        self.done: list[tuple[int, str, int, float]] = []
        self.landed: queue.SimpleQueue[AttemptId] = queue.SimpleQueue()
        self.broken: list[tuple[Address, str]] = []
        self.transfer = make_transfer(
            Settings(kind=kind, floor_gbps=floor_gbps),
            self.pool,
            self.address,
            host,
            lambda *what: self.done.append(what),
            self.landed.put,
            on_broken=lambda *what: self.broken.append(what),
            bind="127.0.0.1",
            secret_key=secret_key,
        )
        self.info = WorkerInfo(self.address, "any", host, "", self.transfer.info, 16, 8, 1024)
        self._serials = itertools.count()

    def pair_with(self, peer: Worker) -> Seen:
        """Open the way to `peer` and let it verify."""
        return peer.transfer.verify(self.address, probe_of(self.transfer.connect(peer.info)))

    def push_to(self, peer: Worker | WorkerInfo, source: tuple[int, ...], target: tuple[int, ...], n: int = 0) -> Push:
        address = peer.address
        attempt = AttemptId(address.incarnation, RequestId(7, n), 1)
        return Push(next(self._serials), attempt, address, source, target, True)

    def send(self, push: Push) -> None:
        for layer in range(self.pages.shape[0]):
            self.transfer.push(layer, push)
        self.transfer.end(push)

    def close(self) -> None:
        self.transfer.close()
        del self.pages
        self.pool.close()


def probe_of(opened: Opened) -> Probe:
    return Probe(opened.kind, opened.nbytes, opened.checksum, opened.seconds, opened.note)


@pytest.fixture
def new_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    """Makes workers, and closes them all."""
    made: list[Worker] = []

    def make(**settings: object) -> Worker:
        made.append(Worker(tmp_path, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.close()
