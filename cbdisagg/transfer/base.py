"""Moving KV pages from a prefill worker's pool into a decode worker's: the seam, and who calls what from where.

A worker has one `Transfer` for all its peers; for each peer it uses the first kind that works (shm, or cuda_ipc where
the pool is on a GPU, then zmq). Life
of a pairing P -> D: D's `WorkerInfo` reaches P; P calls `connect`, which opens D's pool and writes a test pattern;
P tells D by a Probe; D calls `verify`. Life of an attempt: D calls `expect`; P's runner thread calls `push` once a
layer, and `end` is called when the step is done, by that thread or, with a device, by the one that has waited for it;
`on_push_done` fires at P when the pages are no longer read, inside `end`; at D `on_landed` fires when all expected
bytes are in place (receiver-placed kinds only); `forget` drops the rest.

Ordering: `shm` and `cuda_ipc` are sender-placed, every byte is in D's pool when `end` returns, so P's next message to D
comes after the data. `zmq` is receiver-placed, its data travel beside the messages, and D runs the request when both
have come.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from cbdisagg.messages import Address, AttemptId, PoolInfo, Probe, Push, WorkerInfo


@dataclass(frozen=True, slots=True)
class Opened:
    """What `connect` did: the kind in use ("" if none), the pattern it sent, and why it is not the first choice."""

    kind: str
    nbytes: int
    checksum: int
    seconds: float
    note: str


@dataclass(frozen=True, slots=True)
class Seen:
    """What `verify` found: the kind ("" if the pattern is not there) and the speed."""

    kind: str
    bytes_per_s: float
    note: str


class LinkFailed(Exception):
    """A kind of transport cannot be used with a peer; the message says why."""


class Pool(Protocol):
    """This worker's KV memory: one anonymous memory file, mapped, or one allocation on a GPU."""

    @property
    def info(self) -> PoolInfo: ...

    @property
    def pages(self) -> NDArray[np.uint8]:
        """All pages as bytes, shape [layers, pages, page_bytes]; the engine builds its tensors on the same memory.

        Of a pool on a GPU: what can be indexed and assigned as such an array, by layer, then by a range of pages.
        """
        ...

    def clear_slot(self, incarnation: int) -> None:
        """Forget what a peer has left here of its self-test."""
        ...

    def close(self) -> None: ...


class Transfer(Protocol):
    @property
    def info(self) -> PoolInfo:
        """This worker's pool as peers need to know it: with the endpoint for data, which the pool does not know."""
        ...

    def connect(self, peer: WorkerInfo) -> Opened:
        """Blocks while it tests; called from a thread, never twice for one incarnation."""
        ...

    def verify(self, peer: Address, probe: Probe) -> Seen:
        """Blocks while it reads the pattern; called from a thread."""
        ...

    def disconnect(self, peer: Address) -> None:
        """Close both directions. Wakes a push that waits for it; what is still pushed to it goes nowhere."""
        ...

    def expect(self, attempt: AttemptId, source: Address, pages: tuple[int, ...]) -> None: ...

    def forget(self, attempt: AttemptId) -> None: ...

    def push(self, layer: int, push: Push) -> None:
        """Runner thread: send this layer of the push's pages. May wait while too many bytes are in flight."""
        ...

    def end(self, push: Push) -> None:
        """After the last layer, when the step is done: what is left goes out, and what is on its way is waited for;
        on_push_done follows, also if the peer is dead.
        """
        ...

    def close(self) -> None: ...


PushDoneCallback = Callable[[int, str, int, float], None]
"""(serial, kind, bytes, seconds); from any thread."""
LandedCallback = Callable[[AttemptId], None]
"""From any thread."""
BrokenCallback = Callable[[Address, str], None]
"""(peer, reason): data to this peer were lost though nobody disconnected it: it is suspect. From any thread."""
