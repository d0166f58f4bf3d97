"""Which sequences get tokens in the next step, and what the last step means for their pages.

Knows progress, not phase: each step gives running requests tokens until `computed` reaches the tokens known; one whose
newest token alone is missing gets that one, the others what the pace gives them (pace.py). Pages are taken as sequences
grow. When the pool is empty the latest arrival is preempted and recomputed later; requests are served in
order of arrival, so the oldest always progresses. Plans pin what they name: a request that ends while a plan or push
reads its pages keeps them until that is done.

Life of a plan: `plan()` -> runner -> `commit()`. One plan may be in flight while the next is made: token counts then
run ahead in `planned`, and nobody is preempted.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import TypeAlias

from cbdisagg.core.baselines import Baseline
from cbdisagg.core.blocks import Pages
from cbdisagg.core.pace import Shares
from cbdisagg.core.request import JobTarget, Request, State, Trigger
from cbdisagg.messages import Admit, Page, Push, Sampled, Slice, Slot, StepPlan, StepResult

Outcome: TypeAlias = tuple[Request, Slice, Sampled]
Share: TypeAlias = Callable[[Sequence[Request], Sequence[Request]], Shares]
"""(streams that lack their newest token alone, prompts that lack more) -> what the next step computes of them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`token_budget`: tokens of one step. `mixed` false: a step holds prefill or decode tokens, never both."""

    max_batch: int
    token_budget: int
    mixed: bool


OWN_WAY = Baseline()
"""Continuous batching, pages as tokens come."""


class Scheduler:
    """`baseline`: how to batch and how many pages to hold, if not in our own way."""

    def __init__(
        self, pages: Pages, page_size: int, limits: Limits, prefix_cache: bool, baseline: Baseline = OWN_WAY
    ) -> None:
        self.pages = pages
        self.page_size = page_size
        self.limits = limits
        self.prefix_cache = prefix_cache
        self.pages_to_reserve = baseline.pages_to_reserve
        self.reserves = baseline.reserves
        self.grows = baseline.grows
        self.batch = baseline.static_batch(pages, page_size)
        self.waiting: list[Request] = []  # by order of arrival
        self.running: dict[int, Request] = {}
        self.flights: dict[int, list[tuple[Request, Slice]]] = {}
        self.pushes: dict[int, tuple[Request, JobTarget]] = {}  # serial -> whose pages it reads
        self._number = 0
        self._serial = 0
        slots = limits.max_batch * (1 if self.batch is None else 2)  # padding of prompts takes slots of its own
        self._free_slots = [Slot(n) for n in range(slots)]
        self._released: list[Slot] = []
        self._decode_turn = False  # with mixed = false: whose step is next

    # -------------------------------------------------------------------------------------------- membership

    def wait(self, request: Request) -> None:
        insort(self.waiting, request, key=lambda waiting: waiting.order)

    def run(self, request: Request) -> None:
        self.running[request.key] = request

    def drop(self, request: Request) -> None:
        """It leaves the queue or the batch for good; its pages go when nothing reads them any more."""
        if request.key in self.running:
            del self.running[request.key]
            if self.batch is not None and self.batch.keep(request):
                self._end_batch()
                return
        elif request in self.waiting:
            self.waiting.remove(request)
        self._vacate(request)
        self._end_batch()

    def unpin(self, request: Request) -> None:
        """A plan or push no longer reads its pages."""
        request.in_flight -= 1
        if request.ended and request.slot is None and not request.in_flight:
            self._give_back(request)

    # ------------------------------------------------------------------------------------------------- plan

    @property
    def has_work(self) -> bool:
        if any(_ready(request) for request in self.running.values()):
            return True
        return self.batch is not None and self.batch.closed and not self.running

    @property
    def decodes(self) -> int:
        return sum(1 for request in self.running.values() if request.decoding)

    def plan(self, share: Share) -> tuple[StepPlan | None, list[Request]]:
        """The next step and the requests preempted for it."""
        ready = sorted((r for r in self.running.values() if _ready(r)), key=lambda request: request.order)
        ready = self._one_kind(ready)
        streams = [request for request in ready if request.decoding]
        prompts = [request for request in ready if not request.decoding]
        shares = share(streams, prompts)
        victims: list[Request] = []
        chosen = self._choose(ready, shares, victims)
        if not chosen and streams and not shares.decodes:
            chosen = self._choose(streams, Shares(), victims)  # the prompts find no pages now: others go on
        given = {request.key for request, _ in chosen}
        for prompt in prompts:
            prompt.passed = 0 if prompt.key in given else prompt.passed + 1
        if self.batch is not None:
            left = self.limits.token_budget - len(streams) - sum(shares.chunks.values())
            chosen += self.batch.shares(bool(prompts), max(0, left))
        if not chosen:
            return None, victims
        return self._number_plan(chosen), victims

    def _choose(self, ready: list[Request], shares: Shares, victims: list[Request]) -> list[tuple[Request, int]]:
        """Who gets how many tokens. By order of arrival: pages of later arrivals go to earlier ones."""
        chosen: list[tuple[Request, int]] = []
        taken: set[int] = set()
        for request in ready:
            if request.state is not State.RUNNING:
                continue  # preempted for an older one
            count = int(shares.decodes) if request.decoding else shares.chunks.get(request.key, 0)
            count = self._grow(request, count, taken, victims) if count else 0
            if count:
                chosen.append((request, count))
                taken.add(request.key)
        return chosen

    def _one_kind(self, ready: list[Request]) -> list[Request]:
        """With mixed = false, decode and prefill take turns when both have work. A static batch goes in lockstep."""
        if self.batch is not None:
            return self.batch.lockstep(ready, self.running.values())
        if self.limits.mixed:
            return ready
        decoding = [request for request in ready if request.decoding]
        if not decoding or len(decoding) == len(ready):
            return ready
        self._decode_turn = not self._decode_turn
        return decoding if self._decode_turn else [request for request in ready if not request.decoding]

    def _grow(self, request: Request, count: int, taken: set[int], victims: list[Request]) -> int:
        """Pages for `count` more tokens; preempts later arrivals if need be. The tokens that it can have (0: none)."""
        while True:
            missing = request.pages_for(request.planned + count) - len(request.pages)
            if missing > 0:
                missing = self.pages_to_reserve(request, request.planned + count) - len(request.pages)
            if missing <= self.pages.available():
                if missing > 0:
                    request.pages += self.pages.reserve(missing)
                return count
            fits = (len(request.pages) + self.pages.available()) * self.page_size - request.planned
            if 0 < fits < count and not request.decoding:
                count = fits
                continue
            if self.flights:
                return 0  # what is in flight may end or may be preempted afterwards
            others = [r for r in self.running.values() if r.key not in taken and not r.in_flight]
            if not others:
                return 0  # pushes still read their pages; PushDone brings the next plan
            victim = max(others, key=lambda other: other.order)
            self.preempt(victim)
            victims.append(victim)
            if victim is request:
                return 0

    def reserve_ahead(self, request: Request, hit: int) -> list[Page]:
        """What its allocator takes at the start, beyond the `hit` pages of its prefix."""
        if not self.reserves:
            return []
        return self.pages.reserve(self.pages_to_reserve(request, len(request.tokens)) - hit)

    def preempt(self, request: Request) -> None:
        """Its pages are given back, its tokens kept; it waits in its old place."""
        request.move(Trigger.PREEMPT)
        del self.running[request.key]
        self._leave_slot(request)
        self.pages.release(request.pages)
        request.preemptions += 1
        request.reset()
        self.wait(request)
        self._end_batch()

    def _number_plan(self, chosen: list[tuple[Request, int]]) -> StepPlan:
        release, self._released = tuple(self._released), []
        for slot in release:
            heappush(self._free_slots, slot)
        admit: list[Admit] = []
        grow: list[tuple[int, tuple[int, ...]]] = []
        flight: list[tuple[Request, Slice]] = []
        for request, count in chosen:
            if request.slot is None:
                request.slot = heappop(self._free_slots)
                admit.append(_admit(request))
            elif request.granted < len(request.pages):
                grow.append((request.slot, tuple(request.pages[request.granted :])))
            request.granted = len(request.pages)
            flight.append((request, self._slice(request, count)))
        if self.batch is not None:
            for filler in self.batch.filled():
                self._leave_slot(filler)
        number, self._number = self._number, self._number + 1
        self.flights[number] = flight
        return StepPlan(number, release, tuple(admit), tuple(grow), tuple(slice_ for _, slice_ in flight))

    def _slice(self, request: Request, count: int) -> Slice:
        assert request.slot is not None
        start, end = request.planned, request.planned + count
        draws = int(end == len(request.tokens) + request.draws_in_flight)
        push = self._push(request, end, bool(draws))
        request.planned = end
        request.draws_in_flight += draws
        request.in_flight += 1
        return Slice(request.slot, start, count, draws, request.wants_scores, push)

    def _push(self, request: Request, end: int, draws: bool) -> Push | None:
        """The pages that are complete once the slice has reached `end`, and at the last one the partial page too."""
        target = request.job or request.giving
        if target is None:
            return None
        last = draws if request.job else self._closes(target, request.planned, end)
        complete = min(request.pages_for(end) if last else end // self.page_size, target.end)
        if complete <= target.pushed:
            return None
        first, target.pushed = target.pushed, complete
        source = tuple(request.pages[first:complete])
        pages = tuple(target.pages[first - target.first_page : complete - target.first_page])
        serial, self._serial = self._serial, self._serial + 1
        self.pushes[serial] = (request, target)
        target.pushes += 1
        target.closing = last
        request.in_flight += 1
        return Push(serial, target.attempt, target.decode, source, pages, last)

    def _closes(self, target: JobTarget, start: int, end: int) -> bool:
        """A request that moves takes two steps: full pages go with the first, and what is then left with the second."""
        return target.pushed >= min(start // self.page_size, target.end) or end // self.page_size >= target.end

    # ----------------------------------------------------------------------------------------------- commit

    def commit(self, result: StepResult) -> list[Outcome]:
        """The plan is done: unpins what it named. What living requests got."""
        outcomes: list[Outcome] = []
        for (request, slice_), sampled in zip(self.flights.pop(result.number), result.sampled, strict=True):
            request.draws_in_flight -= slice_.draws
            self.unpin(request)
            if request.ended:
                if request.slot is not None:
                    request.tokens.extend(sampled.ids)  # padding goes on with what it draws
                continue
            request.computed = slice_.start + slice_.count
            if request.wants_scores:
                request.scores.extend(sampled.prompt_logprobs)
            self.publish(request)
            outcomes.append((request, slice_, sampled))
        self._end_batch()
        return outcomes

    def publish(self, request: Request) -> None:
        """Full pages that are computed enter the prefix index."""
        if not self.prefix_cache:
            return
        full = request.computed // self.page_size
        if full > request.published:
            hashes = request.chain(full)
            for n in range(request.published, full):
                self.pages.publish(request.pages[n], hashes[n])
            request.published = full

    def match(self, request: Request) -> list[Page]:
        """The pages of its prefix that are cached here. Its last token is always computed: it gives the logits."""
        if not self.prefix_cache or request.wants_scores:
            return []
        most = (len(request.tokens) - 1) // self.page_size
        return self.pages.match(request.chain(most), most)

    def _end_batch(self) -> None:
        """The padding of a static batch goes with its last member, or when it has run as long as it must."""
        if self.batch is not None and self.batch.closed and self.batch.over and not self.running:
            for request in self.batch.end():
                self._vacate(request)

    def _vacate(self, request: Request) -> None:
        self._leave_slot(request)
        if not request.in_flight:
            self._give_back(request)

    def _leave_slot(self, request: Request) -> None:
        if request.slot is not None:
            self._released.append(request.slot)
            request.slot = None

    def _give_back(self, request: Request) -> None:
        self.pages.release(request.pages)
        request.pages = []


def _ready(request: Request) -> bool:
    if request.giving is not None and request.giving.closing:
        return False
    known = len(request.tokens) + request.draws_in_flight
    return request.remaining > 0 and known < request.limit


def _admit(request: Request) -> Admit:
    return Admit(
        slot=request.slot if request.slot is not None else -1,
        prompt=request.spec.prompt,
        output=request.output.tobytes(),
        pages=tuple(request.pages),
        sampling=request.spec.sampling,
    )
