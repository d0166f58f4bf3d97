"""One worker's decisions: what it accepts, computes, hands over and tells, as a function of the events it sees.

Knows its own requests, prefill jobs, pages and peers; not clocks, sockets, bytes or models. A request whose route names
this worker twice is computed here; one whose prefill is elsewhere waits in reserved pages. A job is the other end of
that: this worker's share of a request that another decodes. Both run in the same scheduler.

One entry: `handle(event, now) -> effects`. Every event ends the same way: tell the tokens, admit what fits, plan a step
if none is in flight, report the load.

Asked to leave, a worker returns its requests to the coordinator, which finds them another worker. Until that one takes
a request over it is served here, and what nobody takes is finished here; then the worker retires.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from cbdisagg.config import Config
from cbdisagg.core.admission import Admission
from cbdisagg.core.baselines import Baseline
from cbdisagg.core.blocks import Pages
from cbdisagg.core.effects import Connect, Disconnect, Effect, Note, Retire, RunStep, Tell, Verify
from cbdisagg.core.events import (
    Checked,
    Connected,
    FromWorkerInbox,
    Landed,
    Leave,
    PushDone,
    StepDone,
    Tick,
    Verified,
    WorkerEvent,
)
from cbdisagg.core.handoff import Handoffs, Reservation
from cbdisagg.core.knobs import configured
from cbdisagg.core.pace import Pace
from cbdisagg.core.peers import Peers
from cbdisagg.core.report import Reporter
from cbdisagg.core.request import JobTarget, Request, State, Trigger
from cbdisagg.core.scheduler import Limits, Scheduler
from cbdisagg.core.sense import wrong_kv, wrong_prefill, wrong_request
from cbdisagg.core.steps import Steps
from cbdisagg.core.streams import Streams, ends
from cbdisagg.core.supply import Supply
from cbdisagg.core.turns import Turns
from cbdisagg.messages import (
    Accepted,
    Address,
    AttemptId,
    Cancel,
    Finished,
    Generate,
    Hello,
    Knobs,
    KvReady,
    Lead,
    Leaving,
    Members,
    Moved,
    Page,
    Pair,
    Paired,
    Prefill,
    Probe,
    PushStopped,
    Rejected,
    RequestId,
    Return,
    Route,
    Sampled,
    Slice,
    Steer,
    StepPlan,
    StopPush,
    Submit,
    Suspect,
    WorkerInfo,
    unpack,
)

LOCAL_PAGES = 4
"""What is missing beyond a cached prefix, up to so many pages, costs less here than a hand-over."""


class WorkerCore:
    """`plans_ahead` 1 lets a plan be made while another is in flight, to hide the host's time behind a device's."""

    def __init__(self, info: WorkerInfo, config: Config, plans_ahead: int = 0) -> None:
        self.info = info
        self.address = info.address
        self.config = config
        self.pages = Pages(info.pool.pages)
        limits = Limits(info.max_batch, config.scheduler.token_budget, config.scheduler.mixed)
        way = Baseline(config.scheduler.batching, config.kv.allocator, info.max_len, config.scheduler.static_length)
        self.scheduler = Scheduler(self.pages, info.page_size, limits, config.kv.prefix_cache, way)
        self.handoffs = Handoffs(self.pages, self.address.incarnation)
        self.admission = Admission(self.scheduler, self.handoffs, info.max_batch)
        self.peers = Peers(info)
        self.turns = Turns()
        self.steps = Steps(self.scheduler, self._pace(configured(config)), info.costs, self.turns, plans_ahead)
        self.streams = Streams()
        self.reporter = Reporter()
        self.requests: dict[RequestId, Request] = {}
        self.supply = Supply(self.scheduler, self.admission, self.turns)
        self.jobs = self.supply.jobs
        self.leaving = False
        self.retired = False
        self._farewells: list[Effect] = []  # go after the tokens of this event
        self._key = 0
        self._now = 0.0
        self._effects: list[Effect] = []

    def handle(self, event: WorkerEvent, now: float) -> list[Effect]:
        self._now, self._effects = now, []
        match event:
            case FromWorkerInbox(sender, message):
                self._receive(sender, message)
            case StepDone():
                self._step_done(event)
            case PushDone():
                self._push_done(event)
            case Landed(attempt):
                self._complete(self.handoffs.landed(attempt))
            case Checked(attempt, damaged):
                self._checked(self.handoffs.reservations.get(attempt), damaged)
            case Leave():
                self._leave()
            case Connected():
                self._tell(event.peer, Probe(event.kind, event.nbytes, event.checksum, event.seconds, event.note))
            case Verified(peer, kind, bytes_per_s, note):
                self._verified(peer, kind, bytes_per_s, note)
            case Tick():
                self.reporter.rung()
            case _:
                assert_never(event)
        # Tokens go before the step, whose thread competes for the interpreter, and before a word on who writes next.
        self._effects += self.streams.flush(self.peers.apis)
        self._effects += self._farewells
        self._farewells = []
        self._admit()
        self._plan()
        self._return_requests()
        self._effects += self.reporter.report(self, now)
        return self._effects

    # ------------------------------------------------------------------------------------------------ inbox

    def _receive(self, sender: Address, message: object) -> None:
        match message:
            case Submit():
                self._submit(message)
            case Cancel():
                self._cancel(message)
            case Prefill():
                self._prefill(sender, message)
            case KvReady():
                self._kv_ready(sender, message)
            case StopPush(attempt) if attempt.decode == sender.incarnation:
                self._effects += self.supply.stop(sender, attempt)
            case PushStopped(attempt, reason) if self.handoffs.writes(sender, attempt):
                self._push_stopped(attempt, reason)
            case StopPush() | PushStopped():
                pass  # of an attempt that is over, or not its sender's
            case Probe():
                self._effects.append(Verify(sender, message))
            case Members():
                self._members(message)
            case Steer(knobs):
                self.steps.pace = self._pace(knobs)
            case Lead(coordinator):
                self._follow(coordinator)
            case _:
                raise TypeError(f"not a message to a worker: {message!r}")

    def _submit(self, message: Submit) -> None:
        spec = message.request
        if message.term < self.peers.term:
            return
        self.reporter.received += 1
        api = self.peers.apis.get(spec.id.api)
        problem = wrong_request(spec)
        if problem:
            self._note_senseless("a request", problem)
        if api is None or problem:
            return
        known = self.requests.get(spec.id)
        if known is not None:
            if known.spec.submission >= spec.submission:
                return
            self._end(known)
        request = self._request(spec, message.route)
        request.moves = message.moves
        if request.prompt_len >= self.info.max_len:
            text = (
                f"a prompt of {request.prompt_len} tokens does not fit the maximum context length {self.info.max_len}"
            )
            if not message.moves:
                self._tell(api, Rejected(spec.id, spec.submission, 400, text))
            self._tell(self.peers.coordinator, Finished(spec.id, spec.submission, 0))
            return
        self.requests[spec.id] = request
        self.turns.come(request)
        self.scheduler.wait(request)
        if not message.moves:  # else once it has been handed over
            self._tell(api, _accepted(request, self.address, 0))

    def _request(self, spec: Generate, route: Route, job: JobTarget | None = None) -> Request:
        self._key += 1
        length = len(spec.prompt) // 4
        limit = min(length + spec.sampling.max_tokens, self.info.max_len)
        if job is not None:
            limit = length + len(spec.output) // 4 + 1
        arrival = self._now - spec.age_s
        first = self._now - spec.first_age_s if spec.first_age_s >= 0 else None
        return Request(
            self._key, spec, route, arrival, self.info.page_size, limit, job, first_token=first, last_token=first
        )

    def _cancel(self, message: Cancel) -> None:
        request = self.requests.get(message.id)
        if request is not None and request.spec.submission <= message.submission:
            self._end(request)

    def _end(self, request: Request) -> None:
        """A local request ends, whatever it was doing. What the client is told of it has been told."""
        self._effects += self.supply.keep(request)
        self._remove(request)
        self.streams.forget(request)

    def _remove(self, request: Request) -> None:
        """It is no longer here: it has ended, or goes on elsewhere."""
        del self.requests[request.spec.id]
        self.admission.computes_no_more(request)
        if request.attempt is not None:
            self._effects += self.handoffs.abandon(request)
        request.move(Trigger.END)
        self.scheduler.drop(request)
        self.turns.go(request)
        done = Finished(request.spec.id, request.spec.submission, len(request.tokens) - request.prompt_len)
        self._tell(self.peers.coordinator, done)

    # ----------------------------------------------------------------------------------- hand-over, giving side

    def _prefill(self, sender: Address, message: Prefill) -> None:
        if message.attempt.decode == sender.incarnation and not self.supply.is_new(message.attempt):
            return
        self.reporter.jobs += not message.moves
        if self.peers.is_dead(sender):
            if message.moves:  # it may be that we have not heard of it yet: then the request stays
                self._tell(sender, PushStopped(message.attempt, "ended"))
            return
        spec = message.request
        problem = wrong_prefill(message, self.peers.met[sender.incarnation], self.info)
        if problem:
            self._note_senseless(f"a Prefill from {sender.name}", problem)
            self._tell(sender, PushStopped(message.attempt, "declined"))
            return
        pages = [Page(n) for n in unpack(message.pages)]
        known = (len(spec.prompt) + len(spec.output)) // 4
        target = JobTarget(message.attempt, sender, message.first_page, pages, known)
        if message.moves:
            self._give(spec, target)
        else:
            request = self._request(spec, Route(self.address, sender), target)
            self._effects += self.supply.start(request, target)

    def _give(self, spec: Generate, target: JobTarget) -> None:
        """Another worker takes a request over. Without KV, or without a way for it, the request goes alone."""
        request = self.requests.get(spec.id)
        if request is None or request.moves or request.spec.submission != spec.submission:
            self._tell(target.decode, PushStopped(target.attempt, "ended"))
            return
        self._effects += self.supply.keep(request)
        if target.pages and request.state is State.RUNNING and request.decoding:
            self.supply.give(request, target)
        else:
            self._hand_over(request, target, 0)

    def _hand_over(self, request: Request, target: JobTarget, computed: int) -> None:
        """Its next token is another worker's: the api is told so after the last one of ours."""
        self._farewells += self.supply.hand_over(request, target, computed, self._now)
        api = self.peers.apis.get(request.spec.id.api)
        if api is not None:
            self._farewells.append(Tell(api, _accepted(request, target.decode, request.hops + 1)))
        self._remove(request)

    def _push_done(self, event: PushDone) -> None:
        self.reporter.transferred(event)
        self._effects += self.supply.pushed(event.serial)

    # ------------------------------------------------------------------------------------ hand-over, receiving side

    def _reserve(self, request: Request, hit: list[Page], prefill: Address) -> None:
        """Pages for all of its tokens, to be written by `prefill`; the hit is pinned and never written."""
        request.attempt = self.handoffs.next_attempt(request)
        missing = request.pages_for(len(request.tokens)) - len(hit)
        request.pages = hit + self.pages.reserve(missing, request.attempt)
        request.published = len(hit)
        request.move(Trigger.RESERVE)
        spec = self._as_it_is(request)
        if self.peers.paired(prefill):
            placed = self.peers.receiver_placed(prefill)
            self._effects += self.handoffs.open(request, len(hit), prefill, placed, spec)
        else:
            self._effects += self.handoffs.open_without_data(request, prefill, spec)

    def _as_it_is(self, request: Request) -> Generate:
        """The request for another worker: with the output so far, and its age."""
        return replace(
            request.spec,
            output=request.output.tobytes(),
            hashes=b"".join(request.chain(len(request.tokens) // self.info.page_size)),
            age_s=self._now - request.arrival,
            first_age_s=-1.0 if request.first_token is None else self._now - request.first_token,
        )

    def _kv_ready(self, sender: Address, message: KvReady) -> None:
        if not self.handoffs.writes(sender, message.attempt):
            return
        problem = wrong_kv(message, len(self.handoffs.reservations[message.attempt].pages))
        if problem:
            self._note_senseless(f"a KvReady from {sender.name}", problem)
            self._tell(self.peers.coordinator, Suspect(sender.name, sender.incarnation, f"it sent {problem}"))
        else:
            self._complete(self.handoffs.kv_ready(message))

    def _complete(self, reservation: Reservation | None) -> None:
        """All KV of a reserved request is here."""
        if reservation is None:
            return
        checks = self.handoffs.checks(reservation)
        if checks:
            self._effects += checks
        else:
            self._checked(reservation, ())

    def _checked(self, reservation: Reservation | None, damaged: tuple[int, ...]) -> None:
        """Its pages are as they were sent, but for those `damaged`: it lands, now or when the step that runs ends."""
        if reservation is None or reservation.ready is None:
            return
        if not damaged and self._first_waits(reservation, reservation.ready):
            reservation.held = True
        else:
            self._land(reservation, reservation.ready, damaged)

    def _first_waits(self, reservation: Reservation, ready: KvReady) -> bool:
        request = reservation.request
        if request is None or request.first_token is not None or ready.moved is not None:
            return False
        return not ends(request, ready.sampled) and self.steps.first_waits(request, self._now)

    def _land(self, reservation: Reservation, ready: KvReady, damaged: tuple[int, ...]) -> None:
        """It runs: with the token that the prefill worker has drawn, or from where the worker that ran it stopped."""
        request, effects = self.handoffs.settle(ready.attempt)
        self._effects += effects
        if request is None:
            return  # it has ended while its pages were checked, or its first token waited
        request.queue_s, request.prefill_s = ready.queue_s, ready.prefill_s
        if ready.moved is not None:
            self._adopt(request, ready, ready.moved)
        if damaged:
            text = f"{request.spec.id}: pages {list(damaged)} from {reservation.prefill.name} are damaged"
            self._effects.append(Note("error", text))
            self._take_over(request, "damaged")
            return
        hit = request.published * self.info.page_size
        known = len(request.tokens) if ready.moved is None else max(hit, ready.moved.computed)
        request.computed = request.planned = known
        request.move(Trigger.LAND)
        self.scheduler.publish(request)
        self.scheduler.run(request)
        if ready.moved is None:
            request.scores = list(ready.sampled.prompt_logprobs)
            self._draw(request, ready.sampled)
        else:
            self.admission.computes_no_more(request)

    def _adopt(self, request: Request, ready: KvReady, moved: Moved) -> None:
        """It is ours from here on, with its history; its stream has the tokens that come along."""
        request.moves = False
        request.tokens.extend(ready.sampled.ids)
        request.wants_scores = request.wants_scores and not ready.sampled.ids
        request.cached_tokens, request.preemptions = moved.cached_tokens, moved.preemptions
        request.hops = moved.hops
        self._tell(self.peers.apis.get(request.spec.id.api), _accepted(request, self.address, moved.hops))
        if moved.decode_s >= 0:
            request.first_token = self._now - moved.decode_s
            request.last_token = self._now

    def _push_stopped(self, attempt: AttemptId, reason: str) -> None:
        request, effects = self.handoffs.settle(attempt)
        self._effects += effects
        if request is None:
            return
        if request.moves:
            self._end(request)  # it has ended where it ran, or stays there, or comes again from its api
        else:
            self._take_over(request, reason)

    def _take_over(self, request: Request, reason: str) -> None:
        """Nobody fills the reserved pages: the prompt is computed in them, here, from the prefix hit on."""
        self.reporter.local_prefill(reason)
        self._effects.append(Note("warning", f"{request.spec.id}: prompt computed on the decode worker ({reason})"))
        request.computed = request.planned = request.published * self.info.page_size
        request.started = self._now
        request.move(Trigger.TAKE_OVER)
        self.scheduler.run(request)

    # ------------------------------------------------------------------------------------------------- admit

    def _admit(self) -> None:
        """From the oldest on, as long as they fit.

        Nobody waits in a circle across workers: one that joins a prefix being computed lets others pass; a job that
        lacks what only peers can free is declined; a local request that does lets jobs pass, for peers wait for those.
        """
        jobs_only = False
        if self.admission.full and self.scheduler.running:
            return
        for request in self.steps.waiting(self._now):
            if self.admission.full and self.scheduler.running:
                return
            if jobs_only and request.job is None:
                continue
            hit = self.scheduler.match(request)
            if not request.moves and self.admission.joins(request, len(hit)):
                continue
            if self.admission.fits(request, hit):
                self._start(request, hit)
            elif not self.admission.waits_for_peers(request, hit):
                return
            elif request.job is not None:
                self._effects += self.supply.decline(request)
            else:
                jobs_only = True

    def _start(self, request: Request, hit: list[Page]) -> None:
        """It leaves the queue: computed here from its prefix hit on, or in pages reserved for a prefill worker."""
        self.scheduler.waiting.remove(request)
        self.turns.start(request, self.scheduler.waiting)
        self.pages.pin(hit)
        if request.started is None and not request.moves:
            request.started = self._now
            request.queue_s = self._now - request.arrival
            request.cached_tokens = len(hit) * self.info.page_size
            self.reporter.queried(len(request.tokens), request.cached_tokens)
        prefill = self._remote(request, len(hit))
        if prefill is not None:
            self._reserve(request, hit, prefill)
        else:
            request.pages = hit + self.scheduler.reserve_ahead(request, len(hit))
            request.published = len(hit)
            request.computed = request.planned = len(hit) * self.info.page_size
            request.move(Trigger.ADMIT)
            self.scheduler.run(request)
        self.admission.computes(request, len(hit))

    def _remote(self, request: Request, hit: int) -> Address | None:
        """The worker to ask for KV, or None to compute the prompt here; a change of route is counted."""
        prefill = request.route.prefill
        if request.moves:
            return prefill
        if request.job is not None or prefill == self.address:
            return None
        if not self.peers.paired(prefill):
            self.reporter.local_prefill("prefill-worker-lost")
            return None
        missing = len(request.tokens) - hit * self.info.page_size
        if (hit or request.preemptions) and missing <= LOCAL_PAGES * self.info.page_size:
            self.reporter.local_prefill("cached" if hit else "preempted")
            return None
        return prefill

    # -------------------------------------------------------------------------------------------------- steps

    def _plan(self) -> None:
        plan, preempted = self._next_step()
        if plan is None and preempted:  # nobody runs any more: what they held is enough for one that waits, perhaps
            self._admit()
            plan, _ = self._next_step()
        if plan is not None:
            self._effects.append(RunStep(plan))

    def _next_step(self) -> tuple[StepPlan | None, bool]:
        """The plan, if there is one, and whether somebody was preempted."""
        plan, victims = self.steps.plan(self._now)
        for victim in victims:
            self.admission.computes_no_more(victim)
            self._effects += self.supply.keep(victim)
            self.reporter.preempted()
        return plan, bool(victims)

    def _pace(self, knobs: Knobs) -> Pace:
        scheduler, gap_s = self.config.scheduler, self.config.targets.gap_ms / 1e3
        return Pace(knobs.gamma, knobs.eta, scheduler.token_budget, self.info.page_size, gap_s, knobs.catch_up)

    def _step_done(self, event: StepDone) -> None:
        checksums = dict(event.checksums)
        decode = prefill = 0
        for request, slice_, sampled in self.steps.done(event.result):
            is_decode = slice_.count == 1 and slice_.start >= request.prompt_len
            decode += is_decode
            prefill += 0 if is_decode else slice_.count
            target = _pushed_to(request, slice_)
            if target is not None and slice_.push is not None:
                target.checksums += checksums.get(slice_.push.serial, b"")
            if slice_.draws and request.job is not None:
                self._effects += self.supply.done(request, sampled, self._now)
            elif slice_.draws:
                self._draw(request, sampled)
                if target is not None and target.closing and not request.ended:
                    reach = min(slice_.start + slice_.count, target.end * self.info.page_size)
                    self._hand_over(request, target, reach)
        for reservation in self.handoffs.held():
            if reservation.ready is not None:
                self._land(reservation, reservation.ready, ())
        self.reporter.stepped(decode, prefill)
        self._ask_for_relief()

    def _ask_for_relief(self) -> None:
        """Streams are late: another worker may be better off with one. Until it takes it, it stays."""
        if self.leaving or self.peers.coordinator is None or not self.peers.workers:
            return
        stream = self.steps.to_relieve(self._now)
        if stream is not None:
            self._tell(self.peers.coordinator, Return(self._as_it_is(stream), late=True))

    def _draw(self, request: Request, sampled: Sampled) -> None:
        """Tokens drawn for a local request, here or by its prefill worker: the one place where a stream grows."""
        self.admission.computes_no_more(request)
        if request.first_token is None:
            request.first_token = self._now
        if not request.prefill_s and request.started is not None:
            request.prefill_s = self._now - request.started
        request.last_token = self._now
        if self.streams.extend(request, sampled, self._now):
            self._end(request)

    # --------------------------------------------------------------------------------------------- membership

    def _follow(self, coordinator: Address) -> None:
        """A new coordinator: say who is here, and which peers can push to us."""
        if coordinator == self.peers.coordinator or coordinator.incarnation < self.peers.term:
            return
        self.peers.term = coordinator.incarnation
        self.peers.coordinator = coordinator
        self.steps.pace = self._pace(configured(self.config))  # it says Steer if it wants others
        self._tell(coordinator, Hello(self.info))
        if self.leaving:
            self._tell(coordinator, Leaving())
        for pair in self.peers.pairs.values():
            self._tell(coordinator, Paired(pair))
        self.reporter.renew()

    def _members(self, members: Members) -> None:
        if members.term < self.peers.term:
            return
        change = self.peers.update(members)
        for worker in change.joined:
            if self.peers.pushes_to(worker):
                self._effects.append(Connect(worker))
        for worker in change.suspected:
            self._abandon_attempts(worker.address)
        for address in change.died:
            self._peer_down(address)
        for request in list(self.requests.values()):
            if request.spec.id.api not in self.peers.apis:
                self._end(request)
            elif request.moves and request.state is State.WAITING and not self.peers.serves(request.route.prefill):
                self._end(request)  # its stream comes again from its api
            elif request.giving is None:
                request.returned = False  # there may be a worker for it now

    def _abandon_attempts(self, prefill: Address) -> None:
        """A suspect may still write: its requests go on in other pages, the old ones stay quarantined.

        What it gives away is waited for: it may have handed over already, and then nobody else would have it. If the
        suspect dies instead, or is cut off, the stream comes again from its api.
        """
        for attempt in self.handoffs.of(prefill.incarnation):
            reservation = self.handoffs.reservations[attempt]
            request = reservation.request
            if request is not None and not (request.moves or reservation.complete):
                self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Its writer is not to be trusted: other pages, while the old ones are quarantined."""
        self._effects += self.handoffs.abandon(request)
        self.admission.computes_no_more(request)
        request.move(Trigger.REQUEUE)
        self.pages.release(request.pages)
        request.reset()
        self.scheduler.wait(request)

    def _peer_down(self, address: Address) -> None:
        """Evidence that a worker is dead: it writes nothing any more, and wants nothing."""
        for attempt in self.handoffs.of(address.incarnation):
            if not self.handoffs.reservations[attempt].complete:  # else all is here, and is being checked
                self._push_stopped(attempt, "prefill-worker-lost")
        self._effects += self.supply.lost(address)
        self._effects.append(Disconnect(address))

    # ----------------------------------------------------------------------------------------------- leaving

    def _leave(self) -> None:
        self.leaving = True
        self._tell(self.peers.coordinator, Leaving())
        for request in [r for r in self.requests.values() if r.moves and r.state is State.WAITING]:
            self._end(request)  # it has not been asked for yet: it stays where it is

    def _return_requests(self) -> None:
        """Whoever leaves asks for another worker for each request, but not in mid-prefill: that ends soon."""
        if not self.leaving:
            return
        for request in self.requests.values():
            free = request.state is State.WAITING or (request.state is State.RUNNING and request.decoding)
            if free and not (request.returned or request.moves) and self.peers.coordinator is not None:
                request.returned = True
                self._tell(self.peers.coordinator, Return(self._as_it_is(request)))
        left = self.requests or self.supply or self.handoffs.reservations
        if not (left or self.scheduler.flights or self.scheduler.pushes or self.retired):
            self.retired = True
            self._effects.append(Retire())

    def _verified(self, peer: Address, kind: str, bytes_per_s: float, note: str) -> None:
        pair = Pair(peer, self.address, kind, bytes_per_s, note)
        self.peers.pairs[peer.incarnation] = pair
        self._tell(self.peers.coordinator, Paired(pair))

    def _note_senseless(self, what: str, problem: str) -> None:
        self._effects.append(Note("warning", f"dropped {what} that makes no sense: {problem}"))

    def _tell(self, to: Address | None, message: object) -> None:
        if to is not None:
            self._effects.append(Tell(to, message))  # type: ignore[arg-type]  # built by the callers above


def _pushed_to(request: Request, slice_: Slice) -> JobTarget | None:
    """Where this slice has pushed, if that is still wanted."""
    target = request.job or request.giving
    if slice_.push is None or target is None or target.attempt != slice_.push.attempt:
        return None
    return target


def _accepted(request: Request, worker: Address, hops: int) -> Accepted:
    return Accepted(request.spec.id, request.spec.submission, worker, hops, len(request.tokens) - request.prompt_len)
