"""One worker as the coordinator knows it: what it has said, and what was routed to it since.

Life: said Hello -> told a Load (from then on requests may go there) -> leaving, doubted or suspected, which ends that
-> removed, when it is known to be dead or has a successor.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cbdisagg.core.forecast import prompts_before, prompts_s
from cbdisagg.core.policy import HOP_S, View, look
from cbdisagg.core.residency import Residency
from cbdisagg.messages import Address, Load, Role, WorkerInfo

UNSEEN_S = 1.0
"""A job that a worker has not said it got after so long waits at its decode worker, or never comes."""
_MEMORY = 0.1  # weight of the newest interval between two ends
_FIRST_BETWEEN_S = 1.0  # before two have been seen


@dataclass(slots=True)
class Member:
    """`submitted` counts the Submits sent to it; `unseen` holds (count, prompt tokens) of those that its Load does not
    include, `routed` is the sum of these tokens. Jobs reach it by way of a decode worker: `jobs` holds (time, prompt
    tokens) of those it has not had yet. `queued_tokens` of prompts are to be computed, from `free_at` on.
    `between_ends_s`: from the end of one request there to the next, lately.
    """

    info: WorkerInfo
    heard_at: float
    progress_at: float
    residency: Residency
    load: Load | None = None
    submitted: int = 0
    unseen: list[tuple[int, int]] = field(default_factory=list)
    jobs: list[tuple[float, int]] = field(default_factory=list)
    routed: int = 0
    queued_tokens: int = 0
    free_at: float = 0.0
    suspect: bool = False
    leaving: bool = False
    between_ends_s: float = _FIRST_BETWEEN_S
    ended_at: float | None = None

    @property
    def address(self) -> Address:
        return self.info.address

    @property
    def queued(self) -> int:
        """Requests that wait there: those it has said, and those on their way that will find no free place."""
        if self.load is None:
            return len(self.unseen)
        free = self.info.max_batch - self.load.running - self.load.reserved
        return self.load.waiting + max(0, len(self.unseen) - max(0, free))

    def submit(self, tokens: int, now: float) -> None:
        self.submitted += 1
        self.unseen.append((self.submitted, tokens))
        self.routed += tokens
        self._queue(tokens, now)

    def expect(self, tokens: int, now: float) -> None:
        """A job will come by way of a decode worker."""
        self.jobs.append((now, tokens))
        self._queue(tokens, now)

    def _queue(self, tokens: int, now: float) -> None:
        """Behind those that will not have been computed when it gets there."""
        if self.load is not None:
            at = now + HOP_S
            known, tokens_before = self.load.forecast, self.queued_tokens
            needed_s = prompts_s(known, tokens_before)
            self.queued_tokens, wait_s = prompts_before(
                known, tokens_before, needed_s, self.free_at, self.load.decodes, at
            )
            self.free_at = at + wait_s
        self.queued_tokens += tokens

    def hear(self, load: Load, now: float) -> None:
        if self.load is None or load.counters.steps != self.load.counters.steps or not load.busy:
            self.progress_at = now
        come = load.jobs - self.load.jobs if self.load is not None else 0
        self.load, self.heard_at = load, now
        self.unseen = [(count, tokens) for count, tokens in self.unseen if count > load.received]
        self.jobs = [(at, tokens) for at, tokens in self.jobs[come:] if now - at < UNSEEN_S]
        self.routed = sum(tokens for _, tokens in self.unseen)
        self.queued_tokens = load.queued_tokens + self.routed + sum(tokens for _, tokens in self.jobs)
        self.free_at = now + load.forecast.free_s

    def end(self, now: float) -> None:
        """A request has ended there."""
        if self.ended_at is not None:
            self.between_ends_s += _MEMORY * (now - self.ended_at - self.between_ends_s)
        self.ended_at = now

    def view(self, pin: Role) -> View | None:
        """None before it has told a Load."""
        load = self.load
        if load is None:
            return None
        held = load.pages_total - load.pages_free - load.pages_cached
        return look(
            self.address,
            self.info.role,
            pin,
            load.forecast,
            self.free_at,
            sequences=load.running + load.reserved + load.waiting + len(self.unseen),
            unseen=len(self.unseen),
            streams=load.decodes,
            max_batch=self.info.max_batch,
            queued_tokens=self.queued_tokens,
            room=(load.pages_total - held) * self.info.page_size - self.routed,
            between_ends_s=self.between_ends_s,
        )
