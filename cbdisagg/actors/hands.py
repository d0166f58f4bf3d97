"""What a worker's shell does with an engine and a transport: two threads, one that computes, one that opens ways.

The computing thread does nothing but steps, in the order planned, each followed by the end of its pushes. So when the
core learns of a step, the data that it pushed have been given to the transport (all of them are in place with shm).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import assert_never

from cbdisagg.actors.lane import Lane
from cbdisagg.actors.shell import Deed
from cbdisagg.core.effects import Connect, Disconnect, Expect, Forget, RunStep, Verify
from cbdisagg.core.events import Connected, StepDone, Verified, WorkerEvent
from cbdisagg.engine.base import Runner
from cbdisagg.messages import Address, Probe, StepPlan, WorkerInfo
from cbdisagg.transfer.base import Transfer


class EngineHands:
    """`steps` is the lane in which `runner` was built: a model stays in one thread. Events go to `put`."""

    def __init__(
        self, runner: Runner, transfer: Transfer, steps: Lane, ways: Lane, put: Callable[[WorkerEvent], None]
    ) -> None:
        self._runner, self._transfer = runner, transfer
        self._steps, self._ways, self._put = steps, ways, put

    def perform(self, deed: Deed) -> None:
        match deed:
            case RunStep(plan):
                self._steps.do(partial(self._step, plan))
            case Connect(peer):
                self._ways.do(partial(self._connect, peer))
            case Verify(peer, probe):
                self._ways.do(partial(self._verify, peer, probe))
            case Disconnect(peer):
                self._transfer.disconnect(peer)
            case Expect(attempt, source, pages):
                self._transfer.expect(attempt, source, pages)
            case Forget(attempt):
                self._transfer.forget(attempt)
            case _:
                assert_never(deed)

    def _step(self, plan: StepPlan) -> None:
        result = self._runner.run(plan, self._transfer.push)
        for piece in plan.slices:
            if piece.push is not None:
                self._transfer.end(piece.push)
        self._put(StepDone(result))

    def _connect(self, peer: WorkerInfo) -> None:
        way = self._transfer.connect(peer)
        self._put(Connected(peer.address, way.kind, way.nbytes, way.checksum, way.seconds, way.note))

    def _verify(self, peer: Address, probe: Probe) -> None:
        seen = self._transfer.verify(peer, probe)
        self._put(Verified(peer, seen.kind, seen.bytes_per_s, seen.note))
