"""Pushing pages by writing them into the peer's pool on its GPU, on this one or another. Sender-placed.

Knows one peer on the same host, whose pool it has opened by CUDA IPC: once, until the peer dies. A push queues the copy
of each layer on a stream of its own, behind what the step has queued on the computing stream by then, so that layers
travel while later ones are computed, and no byte passes through the host. `end` waits for the event after the last
copy: then every byte is in the peer's memory, and the message that follows comes after the data.

The event is this process's own. To let the peer's stream wait for an event of ours would save some microseconds, and
would stop it for good if we were killed before the event comes about.
"""

from __future__ import annotations

import threading
import time
import zlib
from typing import Any, Protocol

import numpy as np

from cbdisagg.messages import Address, PoolInfo, Push, WorkerInfo
from cbdisagg.transfer.base import LinkFailed, Opened
from cbdisagg.transfer.cuda_driver import Driver
from cbdisagg.transfer.cuda_pool import (
    KIND,
    NONCE_BYTES,
    SCRATCH,
    TRIAL_BYTES,
    TRIAL_PAGES,
    DevicePool,
    layer_address,
    seats,
)
from cbdisagg.transfer.runs import merge_runs
from cbdisagg.transfer.shm import make_pattern

TRIALS, TRIAL_COPIES = 3, 4


class Copier(Protocol):
    """How pages of one layer get to another pool."""

    def prepare(self, source: tuple[int, ...], target: tuple[int, ...], stream: int) -> Any:
        """What all layers of a push have in common; kept until the push has ended."""
        ...

    def copy(self, source: int, target: int, prepared: Any, stream: int) -> None:
        """Queue a layer's pages, from and to the addresses of its first page."""
        ...


class RunCopier:
    """By the driver's own copies, one for each run of neighbouring pages."""

    def __init__(self, driver: Driver, page_bytes: int) -> None:
        self._driver, self._page_bytes = driver, page_bytes

    def prepare(self, source: tuple[int, ...], target: tuple[int, ...], stream: int) -> Any:
        return merge_runs(source, target)

    def copy(self, source: int, target: int, prepared: Any, stream: int) -> None:
        for here, there, pages in prepared:
            self._driver.copy(
                target + there * self._page_bytes, source + here * self._page_bytes, pages * self._page_bytes, stream
            )


class CudaIpcLink:
    """The way from our pool to one peer's."""

    kind = KIND

    def __init__(self, me: Address, peer: WorkerInfo, pool: DevicePool, copier: Copier) -> None:
        """Raises LinkFailed."""
        ours, theirs = pool.info, peer.pool
        if not theirs.handle:
            why = f"cannot be shared: {theirs.unshared}" if theirs.unshared else "is not on a GPU"
            raise LinkFailed(f"the KV of {peer.address.name} {why}")
        if (ours.layers, ours.page_bytes, ours.offset) != (theirs.layers, theirs.page_bytes, theirs.offset):
            raise LinkFailed(f"the pool of {peer.address.name} has another layout than ours")
        self._me, self._pool, self._copier, self._driver = me, pool, copier, pool.driver
        self._info: PoolInfo = theirs
        self._lock = threading.Lock()  # held by whoever queues on the stream
        self._prepared: dict[int, Any] = {}  # by serial
        self._marks: dict[int, int] = {}
        self._stream = 0
        self._address = self._driver.open(theirs.handle)
        try:
            self._stream = self._driver.stream()
            nonce = np.empty(NONCE_BYTES, np.uint8)
            self._driver.read(nonce, self._address, self._stream)
            self._driver.wait(self._driver.mark(self._stream))
            if nonce.tobytes() != theirs.nonce.encode():
                raise LinkFailed(f"what {peer.address.name} has exported is another pool: its nonce differs")
        except BaseException:
            self.close()
            raise

    def test(self, nbytes: int = 0) -> Opened:
        """Leave a pattern in the peer's pool, and time copies into the room for them; the best counts.

        The pattern is a page of our pool, and gets there as pages do: what is tested is what will be used. So is what
        is timed. `nbytes` of one copy, at most TRIAL_BYTES; 0: that.
        """
        pattern = make_pattern(self._me.incarnation, self._info.page_bytes)
        here = self._pool.address + TRIAL_PAGES  # whichever peer is tested, it holds the same
        self._driver.write(here, pattern, self._stream)
        targets = seats(self._me.incarnation)
        copies = self._copier.prepare((0,) * len(targets), targets, self._stream)
        self._copier.copy(here, self._address + TRIAL_PAGES, copies, self._stream)
        self._driver.wait(self._driver.mark(self._stream))
        count = (nbytes or TRIAL_BYTES) // self._info.page_bytes
        pages = self._copier.prepare(tuple(range(count)), tuple(range(count)), self._stream)
        best = min(self._timed_copies(pages) for _ in range(TRIALS))
        return Opened(KIND, TRIAL_COPIES * count * self._info.page_bytes, zlib.crc32(pattern.data), best, "")

    def _timed_copies(self, pages: Any) -> float:
        self._driver.wait(self._driver.mark(self._stream))
        start = time.perf_counter()
        for _ in range(TRIAL_COPIES):
            self._copier.copy(self._pool.address + SCRATCH, self._address + SCRATCH, pages, self._stream)
        self._driver.wait(self._driver.mark(self._stream))
        return time.perf_counter() - start

    def push(self, layer: int, push: Push) -> None:
        """Queues; waits for nothing."""
        with self._lock:
            if not self._address:
                return
            if (prepared := self._prepared.get(push.serial)) is None:
                prepared = self._copier.prepare(push.source, push.target, self._stream)
                self._prepared[push.serial] = prepared
            self._driver.follow(self._stream, self._pool.stream)
            target = layer_address(self._address, self._info, layer)
            self._copier.copy(self._pool.layer(layer), target, prepared, self._stream)
            if layer == self._info.layers - 1:
                self._marks[push.serial] = self._driver.mark(self._stream)

    def end(self, push: Push) -> None:
        with self._lock:
            mark = self._marks.pop(push.serial, 0)
        if mark:
            self._driver.wait(mark)
        with self._lock:
            self._prepared.pop(push.serial, None)

    def close(self) -> None:
        """Waits for copies in flight: memory that they write to is not given back under them."""
        with self._lock:
            address, self._address = self._address, 0
            if not address:
                return
            try:
                if self._stream:
                    self._driver.wait(self._driver.mark(self._stream))
                    self._driver.end_stream(self._stream)
            finally:
                self._driver.close(address)
