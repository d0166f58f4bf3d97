"""What a core wants done. The shell performs effects in the order they are returned; none of them answers by value."""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from cbdisagg.messages import Address, AttemptId, Message, Probe, StepPlan, WorkerInfo


class Tell(Struct, frozen=True, tag=True):
    """Send a message to one incarnation. Never waits; lost if it is dead."""

    to: Address
    message: Message


class RunStep(Struct, frozen=True, tag=True):
    """Give the plan to the runner; StepDone follows. Plans run in the order given."""

    plan: StepPlan


class Connect(Struct, frozen=True, tag=True):
    """Open the way to push pages to this worker and send a test pattern; Connected follows."""

    peer: WorkerInfo


class Disconnect(Struct, frozen=True, tag=True):
    """The peer is dead: close what was opened for it, in both directions."""

    peer: Address


class Verify(Struct, frozen=True, tag=True):
    """Look for the test pattern that `peer` says it has sent; Verified follows."""

    peer: Address
    probe: Probe


class Expect(Struct, frozen=True, tag=True):
    """Accept data of this attempt for these pages, and only these; Landed follows where the receiver places it."""

    attempt: AttemptId
    source: Address
    pages: tuple[int, ...]


class Forget(Struct, frozen=True, tag=True):
    """Drop whatever still arrives for this attempt."""

    attempt: AttemptId


class Check(Struct, frozen=True, tag=True):
    """Compare these pages, all layers, with their CRC-32 checksums (4 bytes each, little-endian); Checked follows."""

    attempt: AttemptId
    pages: tuple[int, ...]
    checksums: bytes


class Retire(Struct, frozen=True, tag=True):
    """Nothing is left to do here, and nothing more will come: the process may end."""


class Wake(Struct, frozen=True, tag=True):
    """Send a Tick at `at` seconds, or soon after. A later Wake replaces an earlier one."""

    at: float


class Note(Struct, frozen=True, tag=True):
    """One line for the log."""

    level: Literal["debug", "info", "warning", "error"]
    text: str


Effect: TypeAlias = Tell | RunStep | Connect | Disconnect | Verify | Expect | Forget | Check | Retire | Wake | Note
