"""Pushing pages by writing them into the peer's mapped pool. Sender-placed: when `end` returns, every byte is
there.

Knows one peer on the same host. A push copies in the runner's thread, a layer at a time, and holds its own
reference to the mapping meanwhile, so `close` from another thread takes effect at the next layer and never under a
copy.
"""

from __future__ import annotations

import time
import zlib

import numpy as np
from numpy.typing import NDArray

from cbdisagg.messages import Address, Probe, Push, WorkerInfo
from cbdisagg.transfer.base import Opened, Pool, Seen
from cbdisagg.transfer.pool import SLOT_BYTES, MappedPool, PoolUnreachable, open_pool
from cbdisagg.transfer.runs import Run, copy_runs, merge_runs

KIND = "shm"
TRIALS = 5


class ShmLink:
    """The way from our pool to one peer's."""

    kind = KIND

    def __init__(self, me: Address, peer: WorkerInfo, pool: Pool) -> None:
        """Raises PoolUnreachable."""
        ours, theirs = pool.info, peer.pool
        if (ours.layers, ours.page_bytes) != (theirs.layers, theirs.page_bytes):
            raise PoolUnreachable(f"the pool of {peer.address.name} has another layout than ours")
        self._me, self._source = me, pool.pages
        self._peer = open_pool(theirs)
        self._target: NDArray[np.uint8] | None = self._peer.pages
        self._runs: dict[int, list[Run]] = {}  # by serial: the same for every layer

    def test(self) -> Opened:
        """Write a pattern into a test slot of the peer, a few times; the best counts."""
        slot = self._peer.claim_slot(self._me.incarnation)
        if slot is None:
            raise PoolUnreachable("no test slot is free in the peer's pool")
        pattern = make_pattern(self._me.incarnation, SLOT_BYTES)
        best = min(_timed_copy(pattern, slot) for _ in range(TRIALS))
        return Opened(KIND, SLOT_BYTES, zlib.crc32(pattern.data), best, "")

    def push(self, layer: int, push: Push) -> None:
        target = self._target
        if target is None:
            return
        if (runs := self._runs.get(push.serial)) is None:
            runs = self._runs[push.serial] = merge_runs(push.source, push.target)
        copy_runs(runs, self._source[layer], target[layer])

    def end(self, push: Push) -> None:
        self._runs.pop(push.serial, None)

    def close(self) -> None:
        self._target = None
        self._peer.close()


def make_pattern(seed: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes that no other seed gives, and that no memory holds by chance."""
    return np.frombuffer(np.random.default_rng(seed).bytes(nbytes), np.uint8)


def check_slot(pool: MappedPool, sender: Address, probe: Probe) -> Seen:
    """At the receiver: is the sender's pattern in its test slot? The slot is cleared either way."""
    slot = pool.find_slot(sender.incarnation)
    if slot is None or probe.nbytes > len(slot):
        return Seen("", 0.0, "shm: the test pattern did not reach this worker's pool")
    found = zlib.crc32(slot[: probe.nbytes].data)
    pool.clear_slot(sender.incarnation)
    if found != probe.checksum:
        return Seen("", 0.0, "shm: the test pattern arrived damaged")
    return Seen(KIND, probe.nbytes / max(1e-9, probe.seconds), probe.note)  # in this order a NaN is 1e-9


def _timed_copy(source: NDArray[np.uint8], target: NDArray[np.uint8]) -> float:
    start = time.perf_counter()
    target[:] = source
    return time.perf_counter() - start
