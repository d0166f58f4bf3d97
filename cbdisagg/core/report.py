"""What a worker says of its load, and when: soon after a change, and once a second in any case.

Counters only grow within an incarnation. A load is a snapshot of the core that it is given.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cbdisagg.core.effects import Effect, Tell, Wake
from cbdisagg.core.events import PushDone
from cbdisagg.messages import Counters, Load

if TYPE_CHECKING:
    from cbdisagg.core.worker import WorkerCore

SOON_S = 0.05
HEARTBEAT_S = 1.0


class Reporter:
    def __init__(self) -> None:
        self.steps = 0
        self.prompt_tokens = 0
        self.generated_tokens = 0
        self.preemptions = 0
        self.prefix_queries = 0
        self.prefix_hits = 0
        self.page_leaks = 0
        self.received = 0  # Submits from the coordinator that leads now
        self.jobs = 0  # Prefills of new prompts since it leads
        self.transfer_bytes: dict[str, int] = {}
        self.transfer_seconds: dict[str, float] = {}
        self.transfers: dict[str, int] = {}
        self.local_prefills: dict[str, int] = {}
        self._last: Load | None = None
        self._last_at = float("-inf")
        self._wake_at = float("inf")

    def stepped(self, decode: int, prefill: int) -> None:
        self.steps += 1
        self.generated_tokens += decode
        self.prompt_tokens += prefill

    def preempted(self) -> None:
        self.preemptions += 1

    def queried(self, tokens: int, hits: int) -> None:
        self.prefix_queries += tokens
        self.prefix_hits += hits

    def local_prefill(self, reason: str) -> None:
        self.local_prefills[reason] = self.local_prefills.get(reason, 0) + 1

    def transferred(self, event: PushDone) -> None:
        for totals, amount in ((self.transfer_bytes, event.nbytes), (self.transfers, 1)):
            totals[event.kind] = totals.get(event.kind, 0) + amount
        self.transfer_seconds[event.kind] = self.transfer_seconds.get(event.kind, 0.0) + event.seconds

    def renew(self) -> None:
        """A new coordinator knows nothing: report at once."""
        self.received = self.jobs = 0
        self._last, self._last_at = None, float("-inf")

    def rung(self) -> None:
        """The Wake that was set has come."""
        self._wake_at = float("inf")

    def report(self, core: WorkerCore, now: float) -> list[Effect]:
        """A Load if one is due and there is a coordinator; otherwise a Wake for when it will be."""
        if core.peers.coordinator is None:
            return []
        if now < self._last_at + SOON_S:  # written as the Wake is, so that a Tick at its very time is not too early
            return self._wake(self._last_at + SOON_S, now)
        load = self._load(core, now)
        if load == self._last and now < self._last_at + HEARTBEAT_S:
            return self._wake(self._last_at + HEARTBEAT_S, now)
        self._last, self._last_at = load, now
        return [Tell(core.peers.coordinator, load), *self._wake(now + HEARTBEAT_S, now)]

    def _wake(self, at: float, now: float) -> list[Effect]:
        """Only a Wake that is new: one that is set for earlier, and has not rung, is kept."""
        if now < self._wake_at <= at:
            return []
        self._wake_at = at
        return [Wake(at)]

    def _load(self, core: WorkerCore, now: float) -> Load:
        self._audit(core)
        waiting, running = core.scheduler.waiting, core.scheduler.running.values()
        queued = sum(len(r.tokens) for r in waiting) + sum(r.remaining for r in running if not r.decoding)
        return Load(
            busy=core.scheduler.has_work or bool(core.scheduler.flights),
            running=len(running),
            waiting=len(waiting),
            reserved=core.handoffs.waiting(),
            queued_tokens=queued,
            pages_total=core.pages.total,
            pages_free=core.pages.count_free(),
            pages_cached=len(core.pages.cached),
            counters=Counters(
                steps=self.steps,
                prompt_tokens=self.prompt_tokens,
                generated_tokens=self.generated_tokens,
                preemptions=self.preemptions,
                prefix_queries=self.prefix_queries,
                prefix_hits=self.prefix_hits,
                transfer_bytes=dict(self.transfer_bytes),
                transfer_seconds=dict(self.transfer_seconds),
                transfers=dict(self.transfers),
                page_leaks=self.page_leaks,
                local_prefills=dict(self.local_prefills),
                step_errors=tuple(core.steps.refit.errors),
                step_error_sum=core.steps.refit.error_sum,
            ),
            received=self.received,
            jobs=self.jobs,
            decodes=core.scheduler.decodes,
            forecast=core.steps.forecast(core.requests.values(), now),
        )

    def _audit(self, core: WorkerCore) -> None:
        """With no request, job, reservation, plan or push left, every page must be free or cached."""
        busy = core.requests or core.supply or core.handoffs.reservations
        if not (busy or core.scheduler.flights or core.scheduler.pushes):
            self.page_leaks = max(self.page_leaks, core.pages.total - core.pages.available())
