"""The giving half of hand-overs: what this worker computes, or has, for others that decode it.

Two kinds of attempt, which end alike. A *job* is a prompt computed here for another worker: a request of its own in
this scheduler. A *gift* is a request of this worker that moves away while it runs: it goes on here, its steps push its
pages, and after the step that has pushed the last one the other worker writes its stream. A gift called off stays.

Life of an attempt: opened by a Prefill -> its pushes ride in steps -> over: KvReady told, declined, called off, or its
decode worker is dead -> forgotten once no copy is in flight. PushStopped is told then, and not before.
"""

from __future__ import annotations

from typing import Literal

from msgspec.structs import replace

from cbdisagg.core.admission import Admission
from cbdisagg.core.effects import Effect, Tell
from cbdisagg.core.request import JobTarget, Request, Trigger
from cbdisagg.core.scheduler import Scheduler
from cbdisagg.core.turns import Turns
from cbdisagg.messages import Address, AttemptId, KvReady, Moved, PushStopped, RequestId, Sampled


class Supply:
    """`jobs` and `gifts` hold the attempts that are not over, or that a push in flight still belongs to."""

    def __init__(self, scheduler: Scheduler, admission: Admission, turns: Turns) -> None:
        self.scheduler = scheduler
        self.admission = admission
        self.turns = turns
        self.jobs: dict[AttemptId, Request] = {}
        self.gifts: dict[AttemptId, JobTarget] = {}
        self._newest: dict[int, int] = {}  # attempt of each decode worker: they count up, and come in order

    def __bool__(self) -> bool:
        return bool(self.jobs or self.gifts)

    def __contains__(self, attempt: AttemptId) -> bool:
        return attempt in self.jobs or attempt in self.gifts

    def is_new(self, attempt: AttemptId) -> bool:
        """Not asked for before. A Prefill that comes twice may find its attempt over, and its pages another's."""
        if attempt.n <= self._newest.get(attempt.decode, 0):
            return False
        self._newest[attempt.decode] = attempt.n
        return True

    # ------------------------------------------------------------------------------------------------- jobs

    def start(self, request: Request, target: JobTarget) -> list[Effect]:
        """A job waits for its turn. An owner has at most one live job for each request: an older one ends."""
        older = self._live_job(target.attempt.decode, request.spec.id)
        effects = self.end(older) if older is not None else []
        self.jobs[target.attempt] = request
        self.turns.come(request)
        self.scheduler.wait(request)
        return effects

    def decline(self, request: Request) -> list[Effect]:
        """The decode worker is to compute it: what is lacking here, only peers can free."""
        return self.end(request, "declined")

    def done(self, request: Request, sampled: Sampled, now: float) -> list[Effect]:
        """The prompt is computed and its last push given to the transport: the decode worker may go on."""
        target = _target(request)
        sampled = replace(sampled, prompt_logprobs=tuple(request.scores))
        prefill_s = now - (request.arrival if request.started is None else request.started)
        ready = KvReady(target.attempt, sampled, request.queue_s, prefill_s, target.checksums)
        return [Tell(target.decode, ready), *self.end(request)]

    def end(self, request: Request, answer: Literal["", "stopped", "declined"] = "") -> list[Effect]:
        self.admission.computes_no_more(request)
        request.move(Trigger.END)
        self.scheduler.drop(request)
        self.turns.go(request)
        return self._over(_target(request), answer)

    # ------------------------------------------------------------------------------------------------- gifts

    def give(self, request: Request, target: JobTarget) -> None:
        """From the next step on its pages are pushed, beside its decoding."""
        request.giving = target
        self.gifts[target.attempt] = target

    def keep(self, request: Request) -> list[Effect]:
        """Called off: it stays here, or ends here."""
        target, request.giving = request.giving, None
        if target is None:
            return []
        request.returned = False
        return self._over(target, "ended")

    def hand_over(self, request: Request, target: JobTarget, computed: int, now: float) -> list[Effect]:
        """It leaves with KV for `computed` tokens; its stream has all that it has drawn. Its end here is the caller's.

        What its decode worker does not know of it goes along: tokens drawn since it was returned, and its history.
        """
        request.giving = None
        moved = Moved(
            computed,
            request.hops + 1,
            request.cached_tokens,
            request.preemptions,
            -1.0 if request.first_token is None else now - request.first_token,
        )
        drawn = Sampled(tuple(request.tokens[target.known :]))
        ready = KvReady(target.attempt, drawn, request.queue_s, request.prefill_s, target.checksums, moved)
        return [Tell(target.decode, ready), *self._over(target, "")]

    # -------------------------------------------------------------------------------------------------- both

    def stop(self, sender: Address, attempt: AttemptId) -> list[Effect]:
        """A StopPush, which is always answered. A gift that its receiver does not want stays."""
        request = self.jobs.get(attempt)
        if request is not None:
            if not request.ended:
                return self.end(request, "stopped")
            return self._over(_target(request), "stopped")
        target = self.gifts.get(attempt)
        if target is None:
            return [Tell(sender, PushStopped(attempt, "stopped"))]
        self._detach(target)
        return self._over(target, "stopped")

    def pushed(self, serial: int) -> list[Effect]:
        """The pages of this push are no longer read."""
        request, target = self.scheduler.pushes.pop(serial)
        target.pushes -= 1
        self.scheduler.unpin(request)
        return self._settle(target)

    def lost(self, decode: Address) -> list[Effect]:
        """The decode worker is dead: it wants nothing any more."""
        self._newest.pop(decode.incarnation, None)
        effects: list[Effect] = []
        for attempt, request in list(self.jobs.items()):
            if attempt.decode == decode.incarnation and not request.ended:
                effects += self.end(request)
        for attempt, target in list(self.gifts.items()):
            if attempt.decode == decode.incarnation:
                self._detach(target)
                effects += self._over(target, "")
        return effects

    def _live_job(self, decode: int, id: RequestId) -> Request | None:
        for attempt, request in self.jobs.items():
            if attempt.decode == decode and attempt.request == id and not request.ended:
                return request
        return None

    def _detach(self, target: JobTarget) -> None:
        for request in self.scheduler.running.values():
            if request.giving is target:
                request.giving = None
                request.returned = False

    def _over(self, target: JobTarget, answer: Literal["", "stopped", "declined", "ended"]) -> list[Effect]:
        target.over = True
        target.answer = answer or target.answer
        return self._settle(target)

    def _settle(self, target: JobTarget) -> list[Effect]:
        if not target.over or target.pushes:
            return []
        self.jobs.pop(target.attempt, None)
        self.gifts.pop(target.attempt, None)
        if not target.answer:
            return []
        answer, target.answer = target.answer, ""
        return [Tell(target.decode, PushStopped(target.attempt, answer))]


def _target(request: Request) -> JobTarget:
    assert request.job is not None
    return request.job
