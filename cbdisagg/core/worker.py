"""One worker's decisions: what it accepts, computes, hands over and tells, as a function of the events it sees.

Knows its own requests, prefill jobs, pages and peers; not clocks, sockets, bytes or models. A request whose route names
this worker twice is computed here; one whose prefill is elsewhere waits in reserved pages. A job is the other end of
that: this worker's share of a request that another decodes. Both run in the same scheduler.

One entry: `handle(event, now) -> effects`. Every event ends the same way: tell the tokens, admit what fits, plan a step
if none is in flight, report the load.
"""

from __future__ import annotations

from typing import assert_never

from msgspec.structs import replace

from cbdisagg.config import Config
from cbdisagg.core.admission import Admission
from cbdisagg.core.blocks import Pages
from cbdisagg.core.effects import Connect, Disconnect, Effect, Note, RunStep, Tell, Verify
from cbdisagg.core.events import Connected, FromWorkerInbox, Landed, PushDone, StepDone, Tick, Verified, WorkerEvent
from cbdisagg.core.handoff import Handoffs, Reservation
from cbdisagg.core.peers import Peers
from cbdisagg.core.policy import StepModel, local_allowance, prefill_allowance
from cbdisagg.core.report import Reporter
from cbdisagg.core.request import JobTarget, Request, State, Trigger
from cbdisagg.core.scheduler import Limits, Scheduler
from cbdisagg.core.streams import Streams
from cbdisagg.messages import (
    Accepted,
    Address,
    AttemptId,
    Cancel,
    Finished,
    Generate,
    Hello,
    KvReady,
    Lead,
    Members,
    Page,
    Pair,
    Paired,
    Prefill,
    Probe,
    PushStopped,
    Rejected,
    RequestId,
    Route,
    Sampled,
    StopPush,
    Submit,
    WorkerInfo,
    unpack,
)


class WorkerCore:
    """`plans_ahead` 1 lets a plan be made while another is in flight, to hide the host's time behind a device's."""

    def __init__(self, info: WorkerInfo, config: Config, plans_ahead: int = 0) -> None:
        self.info = info
        self.address = info.address
        self.config = config
        self.plans_ahead = plans_ahead
        self.pages = Pages(info.pool.pages)
        limits = Limits(info.max_batch, config.scheduler.token_budget, config.scheduler.mixed)
        self.scheduler = Scheduler(self.pages, info.page_size, limits, config.kv.prefix_cache)
        self.handoffs = Handoffs(self.pages, self.address.incarnation)
        self.admission = Admission(self.scheduler, self.handoffs, info.max_batch)
        self.peers = Peers(info)
        self.model = StepModel()
        self.streams = Streams()
        self.reporter = Reporter()
        self.requests: dict[RequestId, Request] = {}
        self.jobs: dict[AttemptId, Request] = {}
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
            case Connected():
                self._tell(event.peer, Probe(event.kind, event.nbytes, event.checksum, event.seconds, event.note))
            case Verified(peer, kind, bytes_per_s, note):
                self._verified(peer, kind, bytes_per_s, note)
            case Tick():
                self.reporter.rung()
            case _:
                assert_never(event)
        self._effects += self.streams.flush(
            self.peers.apis
        )  # before the step, whose thread competes for the interpreter
        self._admit()
        self._plan()
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
                self._complete(self.handoffs.kv_ready(message))
            case StopPush(attempt):
                self._stop_push(sender, attempt)
            case PushStopped(attempt, reason):
                self._push_stopped(attempt, reason)
            case Probe():
                self._effects.append(Verify(sender, message))
            case Members():
                self._members(message)
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
        if api is None:
            return
        known = self.requests.get(spec.id)
        if known is not None:
            if known.spec.submission >= spec.submission:
                return
            self._end(known)
        request = self._request(spec, message.route)
        if request.prompt_len >= self.info.max_len:
            text = (
                f"a prompt of {request.prompt_len} tokens does not fit the maximum context length {self.info.max_len}"
            )
            self._tell(api, Rejected(spec.id, spec.submission, 400, text))
            self._tell(self.peers.coordinator, Finished(spec.id, spec.submission, 0))
            return
        self.requests[spec.id] = request
        self.scheduler.wait(request)
        self._tell(api, Accepted(spec.id, spec.submission, self.address))

    def _request(self, spec: Generate, route: Route, job: JobTarget | None = None) -> Request:
        self._key += 1
        length = len(spec.prompt) // 4
        limit = min(length + spec.sampling.max_tokens, self.info.max_len)
        if job is not None:
            limit = length + len(spec.output) // 4 + 1
        arrival = self._now - spec.age_s
        return Request(self._key, spec, route, arrival, self.info.page_size, limit, job)

    def _cancel(self, message: Cancel) -> None:
        request = self.requests.get(message.id)
        if request is not None and request.spec.submission <= message.submission:
            self._end(request)

    def _end(self, request: Request) -> None:
        """A local request ends, whatever it was doing. What the client is told of it has been told."""
        del self.requests[request.spec.id]
        self.admission.computes_no_more(request)
        if request.state is State.RESERVED:
            self._effects += self.handoffs.abandon(request)
        request.move(Trigger.END)
        self.scheduler.drop(request)
        self.streams.forget(request)
        done = Finished(request.spec.id, request.spec.submission, len(request.tokens) - request.prompt_len)
        self._tell(self.peers.coordinator, done)

    # ----------------------------------------------------------------------------------- hand-over, prefill side

    def _prefill(self, sender: Address, message: Prefill) -> None:
        if message.attempt in self.jobs or self.peers.is_dead(sender):
            return
        spec = message.request
        for attempt, job in list(self.jobs.items()):  # at most one live job for each request of an owner
            if attempt.decode == message.attempt.decode and attempt.request == spec.id and not job.ended:
                self._end_job(job)
        pages = [Page(n) for n in unpack(message.pages)]
        target = JobTarget(message.attempt, sender, message.first_page, pages, message.first_page)
        request = self._request(spec, Route(self.address, sender), target)
        self.jobs[message.attempt] = request
        self.scheduler.wait(request)

    def _stop_push(self, sender: Address, attempt: AttemptId) -> None:
        request = self.jobs.get(attempt)
        if request is None:
            self._tell(sender, PushStopped(attempt, "stopped"))
            return
        assert request.job is not None
        request.job.stop_asked = True
        if not request.ended:
            self._end_job(request)

    def _end_job(self, request: Request) -> None:
        self.admission.computes_no_more(request)
        request.move(Trigger.END)
        self.scheduler.drop(request)
        if not request.in_flight:
            self._job_drained(request)

    def _job_drained(self, request: Request) -> None:
        """No plan and no push reads its pages any more."""
        assert request.job is not None
        del self.jobs[request.job.attempt]
        if request.job.stop_asked:
            self._tell(request.job.decode, PushStopped(request.job.attempt, "stopped"))

    def _decline(self, request: Request) -> None:
        assert request.job is not None
        self._tell(request.job.decode, PushStopped(request.job.attempt, "declined"))
        self._end_job(request)

    def _push_done(self, event: PushDone) -> None:
        request = self.scheduler.pushes.pop(event.serial)
        self.reporter.transferred(event)
        if self.scheduler.unpin(request):
            self._job_drained(request)

    # ------------------------------------------------------------------------------------ hand-over, decode side

    def _reserve(self, request: Request, hit: list[Page], prefill: Address) -> None:
        """Pages for all of its tokens, to be written by `prefill`; the hit is pinned and never written."""
        request.attempt = self.handoffs.next_attempt(request)
        missing = request.pages_for(len(request.tokens)) - len(hit)
        request.pages = hit + self.pages.reserve(missing, request.attempt)
        request.published = len(hit)
        request.move(Trigger.RESERVE)
        spec = replace(
            request.spec,
            output=request.output.tobytes(),
            hashes=b"".join(request.chain(len(request.tokens) // self.info.page_size)),
            age_s=self._now - request.arrival,
        )
        placed = self.peers.receiver_placed(prefill)
        self._effects += self.handoffs.open(request, len(hit), prefill, placed, spec)

    def _complete(self, reservation: Reservation | None) -> None:
        """All KV of a reserved request is here: it runs, with the token that the prefill worker has drawn."""
        if reservation is None or reservation.request is None or reservation.ready is None:
            return
        request, ready = reservation.request, reservation.ready
        _, effects = self.handoffs.settle(ready.attempt)
        self._effects += effects
        request.computed = request.planned = len(request.tokens)
        request.queue_s, request.prefill_s = ready.queue_s, ready.prefill_s
        request.scores = list(ready.sampled.prompt_logprobs)
        request.move(Trigger.LAND)
        self.scheduler.publish(request)
        self.admission.computes_no_more(request)
        self.scheduler.run(request)
        self._draw(request, ready.sampled)

    def _push_stopped(self, attempt: AttemptId, reason: str) -> None:
        request, effects = self.handoffs.settle(attempt)
        self._effects += effects
        if request is not None:
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
        for request in list(self.scheduler.waiting):
            if self.admission.full and self.scheduler.running:
                return
            if jobs_only and request.job is None:
                continue
            hit = self.scheduler.match(request)
            if self.admission.joins(request, len(hit)):
                continue
            if self.admission.fits(request, hit):
                self._start(request, hit)
            elif not self.admission.waits_for_peers(request, hit):
                return
            elif request.job is not None:
                self._decline(request)
            else:
                jobs_only = True

    def _start(self, request: Request, hit: list[Page]) -> None:
        """It leaves the queue: computed here from its prefix hit on, or in pages reserved for a prefill worker."""
        self.scheduler.waiting.remove(request)
        self.pages.pin(hit)
        if request.started is None:
            request.started = self._now
            request.queue_s = self._now - request.arrival
            request.cached_tokens = len(hit) * self.info.page_size
            self.reporter.queried(len(request.tokens), request.cached_tokens)
        prefill = self._remote(request, len(hit))
        if prefill is not None:
            self._reserve(request, hit, prefill)
        else:
            request.pages = hit
            request.published = len(hit)
            request.computed = request.planned = len(hit) * self.info.page_size
            request.move(Trigger.ADMIT)
            self.scheduler.run(request)
        self.admission.computes(request, len(hit))

    def _remote(self, request: Request, hit: int) -> Address | None:
        """The prefill worker to ask, or None to compute the prompt here; a change of route is counted."""
        prefill = request.route.prefill
        if request.job is not None or prefill == self.address:
            return None
        if not self.peers.paired(prefill):
            self.reporter.local_prefill("prefill-worker-lost")
            return None
        missing = len(request.tokens) - hit * self.info.page_size
        allowance = local_allowance(self.model, self.scheduler.decodes, self.config.targets.tpot_ms / 1e3)
        if (hit or request.preemptions) and missing <= min(allowance, 4 * self.info.page_size):
            self.reporter.local_prefill("cached" if hit else "preempted")
            return None
        return prefill

    # -------------------------------------------------------------------------------------------------- steps

    def _plan(self) -> None:
        if len(self.scheduler.flights) > self.plans_ahead or not self.scheduler.has_work:
            return
        plan, victims = self.scheduler.plan(self._allowance())
        for victim in victims:
            self.admission.computes_no_more(victim)
            self.reporter.preempted()
        if plan is not None:
            self._effects.append(RunStep(plan))

    def _allowance(self) -> int:
        """Prompt tokens for a step with decodes: from the tightest TPOT target and the oldest prompt's deadline."""
        running = self.scheduler.running.values()
        prompts = [r for r in running if not r.decoding and r.remaining]
        decodes = [r for r in running if r.decoding]
        if not prompts or not decodes:
            return self.config.scheduler.token_budget
        oldest = min(prompts, key=lambda request: request.order)
        deadline = oldest.arrival + oldest.spec.targets.ttft_s
        return prefill_allowance(
            self.model,
            min(request.spec.targets.tpot_s for request in decodes),
            max(0.0, deadline - self._now),
            oldest.remaining,
            self.config.scheduler.token_budget,
            self.info.page_size,
        )

    def _step_done(self, event: StepDone) -> None:
        outcomes, drained = self.scheduler.commit(event.result)
        for request in drained:
            if request.job is not None:
                self._job_drained(request)
        decode = prefill = 0
        for request, slice_, sampled in outcomes:
            is_decode = slice_.count == 1 and slice_.start >= request.prompt_len
            decode += is_decode
            prefill += 0 if is_decode else slice_.count
            if slice_.draws:
                if request.job is not None:
                    self._job_done(request, sampled)
                else:
                    self._draw(request, sampled)
        self.model.observe(event.result.seconds, decode, prefill)
        self.reporter.stepped(decode, prefill)

    def _job_done(self, request: Request, sampled: Sampled) -> None:
        """The prompt is computed and its last push given to the transport: the decode worker may go on."""
        assert request.job is not None
        sampled = replace(sampled, prompt_logprobs=tuple(request.scores))
        prefill_s = self._now - (request.started or request.arrival)
        self._tell(request.job.decode, KvReady(request.job.attempt, sampled, request.queue_s, prefill_s))
        self._end_job(request)

    def _draw(self, request: Request, sampled: Sampled) -> None:
        """Tokens drawn for a local request, here or by its prefill worker: the one place where a stream grows."""
        self.admission.computes_no_more(request)
        if request.first_token is None:
            request.first_token = self._now
            if not request.prefill_s and request.started is not None:
                request.prefill_s = self._now - request.started
        if self.streams.extend(request, sampled, self._now):
            self._end(request)

    # --------------------------------------------------------------------------------------------- membership

    def _follow(self, coordinator: Address) -> None:
        """A new coordinator: say who is here, and which peers can push to us."""
        if coordinator == self.peers.coordinator or coordinator.incarnation < self.peers.term:
            return
        self.peers.term = coordinator.incarnation
        self.peers.coordinator = coordinator
        self._tell(coordinator, Hello(self.info))
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

    def _abandon_attempts(self, prefill: Address) -> None:
        """A suspect may still write: its requests go on in other pages, the old ones stay quarantined."""
        for attempt in self.handoffs.of(prefill.incarnation):
            request = self.handoffs.reservations[attempt].request
            if request is None:
                continue
            self._effects += self.handoffs.abandon(request)
            self.admission.computes_no_more(request)
            request.move(Trigger.REQUEUE)
            self.pages.release(request.pages)
            request.reset()
            self.scheduler.wait(request)

    def _peer_down(self, address: Address) -> None:
        """Evidence that a worker is dead: it writes nothing any more, and wants nothing."""
        for attempt in self.handoffs.of(address.incarnation):
            self._push_stopped(attempt, "prefill-worker-lost")
        for attempt, request in list(self.jobs.items()):
            if attempt.decode != address.incarnation:
                continue
            if not request.ended:
                self._end_job(request)
        self._effects.append(Disconnect(address))

    def _verified(self, peer: Address, kind: str, bytes_per_s: float, note: str) -> None:
        pair = Pair(peer, self.address, kind, bytes_per_s, note)
        self.peers.pairs[peer.incarnation] = pair
        self._tell(self.peers.coordinator, Paired(pair))

    def _tell(self, to: Address | None, message: object) -> None:
        if to is not None:
            self._effects.append(Tell(to, message))  # type: ignore[arg-type]  # built by the callers above
