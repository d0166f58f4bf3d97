"""Whether a waiting request may start now, and if not, whom it waits for. Nobody waits in a circle across workers.

Knows the places and pages of one worker, and which pages of prefixes are being computed: a request whose next missing
page will be published by another waits for that instead of computing it again, holding nothing.
"""

from __future__ import annotations

from cbdisagg.core.handoff import Handoffs
from cbdisagg.core.policy import admissible
from cbdisagg.core.request import Request, State
from cbdisagg.core.scheduler import Scheduler
from cbdisagg.messages import Hash, Page


class Admission:
    """`hit`, everywhere: the pages of a request's prefix that are cached here now."""

    def __init__(self, scheduler: Scheduler, handoffs: Handoffs, max_batch: int) -> None:
        self.scheduler = scheduler
        self.pages = scheduler.pages
        self.handoffs = handoffs
        self.max_batch = max_batch
        self.computing: dict[Hash, Request] = {}  # pages that a running or reserved request will publish

    @property
    def full(self) -> bool:
        """No place in the batch: reserved requests have theirs already, and nobody joins a static batch that runs."""
        if self.scheduler.batch is not None and self.scheduler.batch.closed:
            return True
        return len(self.scheduler.running) + self.handoffs.waiting() >= self.max_batch

    def joins(self, request: Request, hit: int) -> bool:
        """The next page that it lacks is being computed for another request.

        A job joins only what is computed here: to wait for what a peer computes could be circular.
        """
        if not self.computing or request.wants_scores:
            return False
        chain = request.chain((len(request.tokens) - 1) // request.page_size)
        owner = self.computing.get(chain[hit]) if hit < len(chain) else None
        return owner is not None and (request.job is None or owner.state is State.RUNNING)

    def fits(self, request: Request, hit: list[Page]) -> bool:
        """Running requests keep what they need for the tokens that they already have, and a page each to grow."""
        running = self.scheduler.running.values()
        promised = sum(max(0, r.pages_for(len(r.tokens)) - len(r.pages)) for r in running)
        growing = len(running) if self.scheduler.grows else 0
        needed = self.pages_to_start(request) - len(hit)
        return not self.full and admissible(needed, self._available_beside(hit) - promised, growing)

    def pages_to_start(self, request: Request) -> int:
        """For the tokens that are known, and what is reserved ahead of them."""
        return self.scheduler.pages_to_reserve(request, len(request.tokens))

    def waits_for_peers(self, request: Request, hit: list[Page]) -> bool:
        """What it lacks, a place or pages, is not held by requests that run here."""
        if self.scheduler.flights or self.scheduler.pushes:
            return False
        if self.full:
            return not self.scheduler.running
        held = sum(len(running.pages) for running in self.scheduler.running.values())
        return self.pages_to_start(request) - len(hit) > self._available_beside(hit) + held

    def computes(self, request: Request, hit: int) -> None:
        """It has started: others may wait for its full pages from `hit` on."""
        if self.scheduler.prefix_cache:
            request.computing = request.chain(len(request.tokens) // request.page_size)[hit:]
            for value in request.computing:
                self.computing.setdefault(value, request)

    def computes_no_more(self, request: Request) -> None:
        """Its prompt is computed, or will not be: who waited for it looks again."""
        for value in request.computing:
            if self.computing.get(value) is request:
                del self.computing[value]
        request.computing = []

    def _available_beside(self, hit: list[Page]) -> int:
        """Pages that can be taken by a request that also pins its hit, which may be cached pages now."""
        return self.pages.available() - sum(page in self.pages.cached for page in hit)
