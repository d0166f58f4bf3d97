"""What a worker's shell does with an engine and a transport: threads to compute, to open ways, to check pages.

The computing thread does nothing but steps, in the order planned, each followed by the end of its pushes. So when the
core learns of a step, the data that it pushed have been given to the transport (all of them are in place with shm).
Checks have a thread of their own: to open a way may take seconds, and a request waits for its check.

With a `Launcher` there is a fourth, which waits for the device: the computing thread has then queued the next step
already, and the core learns of a step when it is over and its pushes have ended, as ever.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import assert_never

from cbdisagg.actors.lane import Lane
from cbdisagg.actors.shell import Deed
from cbdisagg.core.effects import Check, Connect, Disconnect, Expect, Forget, RunStep, Verify
from cbdisagg.core.events import Checked, Connected, StepDone, Verified, WorkerEvent
from cbdisagg.engine.base import Launcher, Runner
from cbdisagg.messages import Address, AttemptId, Probe, StepPlan, StepResult, WorkerInfo
from cbdisagg.transfer.base import Pool, Transfer
from cbdisagg.transfer.checksums import damaged_pages, page_checksums

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lanes:
    """`steps` is the one in which the runner was built: a model stays in one thread."""

    steps: Lane
    ways: Lane
    checks: Lane


class EngineHands:
    """Events go to `put`. `checksums`: tell those of the pages that are pushed (debug.invariants).

    `waits`: where the steps of a `Launcher` are waited for; None: the runner is none, or runs as others do.
    """

    def __init__(
        self,
        runner: Runner,
        transfer: Transfer,
        pool: Pool,
        lanes: Lanes,
        put: Callable[[WorkerEvent], None],
        *,
        checksums: bool,
        waits: Lane | None = None,
    ) -> None:
        self._runner, self._transfer, self._pool = runner, transfer, pool
        self._lanes, self._put = lanes, put
        self._checksums, self._waits = checksums, waits

    def perform(self, deed: Deed) -> None:
        match deed:
            case RunStep(plan):
                self._lanes.steps.do(partial(self._step, plan))
            case Connect(peer):
                self._lanes.ways.do(partial(self._connect, peer))
            case Verify(peer, probe):
                self._lanes.ways.do(partial(self._verify, peer, probe))
            case Check(attempt, pages, checksums):
                self._lanes.checks.do(partial(self._check, attempt, pages, checksums))
            case Disconnect(peer):
                self._transfer.disconnect(peer)
            case Expect(attempt, source, pages):
                self._transfer.expect(attempt, source, pages)
            case Forget(attempt):
                self._transfer.forget(attempt)
            case _:
                assert_never(deed)

    def _step(self, plan: StepPlan) -> None:
        if self._waits is not None and isinstance(self._runner, Launcher):
            wait = self._runner.launch(plan, self._transfer.push)
            self._waits.do(lambda: self._end(plan, wait()))
        else:
            self._end(plan, self._runner.run(plan, self._transfer.push))

    def _end(self, plan: StepPlan, result: StepResult) -> None:
        pushes = [piece.push for piece in plan.slices if piece.push is not None]
        checksums: tuple[tuple[int, bytes], ...] = ()
        if self._checksums:  # now, for once a push has ended its pages may be somebody else's
            checksums = tuple((push.serial, page_checksums(self._pool.pages, push.source)) for push in pushes)
        for push in pushes:
            self._transfer.end(push)
        self._put(StepDone(result, checksums))

    def _check(self, attempt: AttemptId, pages: tuple[int, ...], checksums: bytes) -> None:
        self._put(Checked(attempt, damaged_pages(self._pool.pages, pages, checksums)))

    def _connect(self, peer: WorkerInfo) -> None:
        way = self._transfer.connect(peer)
        if way.note:  # whoever comes later than the service's start would fall back without a word
            log.warning("KV pages go to %s by %s: %s", peer.address.name, way.kind or "no way", way.note)
        self._put(Connected(peer.address, way.kind, way.nbytes, way.checksum, way.seconds, way.note))

    def _verify(self, peer: Address, probe: Probe) -> None:
        seen = self._transfer.verify(peer, probe)
        self._put(Verified(peer, seen.kind, seen.bytes_per_s, seen.note))
