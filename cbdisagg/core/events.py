"""What can happen to a core. One union per core; `handle(event, now)` is its only entry.

`now` is seconds on the process's monotonic clock. A core never sees a clock, a socket or a page's bytes.
"""

from __future__ import annotations

from typing import TypeAlias

from msgspec import Struct

from cbdisagg.messages import Address, AttemptId, StepResult, ToCoordinator, ToWorker


class FromCoordinatorInbox(Struct, frozen=True, tag=True):
    """A message to the coordinator. `sender` is the incarnation that sent it."""

    sender: Address
    message: ToCoordinator


class FromWorkerInbox(Struct, frozen=True, tag=True):
    """A message to a worker."""

    sender: Address
    message: ToWorker


class StepDone(Struct, frozen=True, tag=True):
    """The runner has finished a plan. `checksums`: (serial of a push, CRC-32 of each of its pages, 4 bytes each)."""

    result: StepResult
    checksums: tuple[tuple[int, bytes], ...] = ()


class PushDone(Struct, frozen=True, tag=True):
    """The transport no longer reads the pages of this push; `nbytes` moved in `seconds` by `kind`."""

    serial: int
    kind: str
    nbytes: int
    seconds: float


class Landed(Struct, frozen=True, tag=True):
    """Receiver-placed transports: every expected byte of this attempt is in place."""

    attempt: AttemptId


class Connected(Struct, frozen=True, tag=True):
    """The way to push to `peer` is open and a test pattern has been sent, by `kind`; empty: none works."""

    peer: Address
    kind: str
    nbytes: int
    checksum: int
    seconds: float
    note: str


class Verified(Struct, frozen=True, tag=True):
    """The test pattern of `peer`, which pushes to us, has been looked for. Empty `kind`: it is not there."""

    peer: Address
    kind: str
    bytes_per_s: float
    note: str


class Checked(Struct, frozen=True, tag=True):
    """The pages of an attempt have been compared with their checksums. `damaged`: those that differ."""

    attempt: AttemptId
    damaged: tuple[int, ...]


class Leave(Struct, frozen=True, tag=True):
    """The process has been asked to end: its requests are to go on elsewhere."""


class Tick(Struct, frozen=True, tag=True):
    """The time named by an earlier Wake has come."""


WorkerEvent: TypeAlias = FromWorkerInbox | StepDone | PushDone | Landed | Checked | Connected | Verified | Leave | Tick
CoordinatorEvent: TypeAlias = FromCoordinatorInbox | Tick
