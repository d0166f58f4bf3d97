"""The api's side of the protocol: streams of tokens that go on whatever happens to the processes behind them.

Knows its streams, who leads and who lives; knows no socket (it is given `tell`), no text and no HTTP. Life of a stream:
    submitted -> accepted by a worker -> tokens -> finish
and back to submitted, with a higher submission and all tokens received so far, when its worker is gone, or when a new
coordinator leads and nothing has been heard of it. It ends once: by its finish, a rejection, a failure or `cancel`; a
failure it is, too, if nobody takes it on for `resume_s`.

A coordinator that has been heard, and then says nothing for longer than it ever should, is reported to the supervisor.

What belongs to an older submission or to no stream at all is answered with a Cancel to the worker that sent it, so
nobody computes for a stream that has no reader. Tokens wait unread as ids, at most `max_tokens` for each stream.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import assert_never

from msgspec.structs import replace

from cbdisagg.api.silence import Silence
from cbdisagg.api.stream import CancelReason, RequestRejected, Stream, StreamFailed, Update
from cbdisagg.config import Limits, Policy
from cbdisagg.messages import (
    STATS_HEARTBEAT_S,
    Accepted,
    Address,
    Cancel,
    Generate,
    Lead,
    Members,
    Message,
    Rejected,
    RequestId,
    Sampling,
    Stats,
    Suspect,
    Targets,
    ToApi,
    TokenRun,
    Tokens,
    pack,
    page_hashes,
    page_root,
)

__all__ = ["Client", "RequestRejected", "Stream", "StreamFailed", "Update"]

GONE_KEPT = 1024
"""Dead processes remembered; more than a coordinator names. What older ones have sent came long ago."""
MAX_DEATHS = 8
"""A stream fails when it loses more workers than these without a token in between: it may be what kills them.

Not fewer: processes are killed for other reasons too, and several may follow each other before a long prompt is
computed."""
TICK_S = 0.5
"""How often `tick` is to be called."""


class Client:
    """All streams of one api incarnation. One thread, the loop's.

    `model` names what makes KV pages differ between services; it must be equal in all api processes of one. `resumed`
    counts streams that went on elsewhere, by cause ("worker", "coordinator"). `resume_s` and `silent_s` are those of
    the config; they may be changed. Whoever owns the client calls `tick` each TICK_S.
    """

    def __init__(
        self,
        incarnation: int,
        tell: Callable[[Address, Message], None],
        *,
        model: str,
        page_size: int,
        resume_s: float = Limits().resume_s,
        silent_s: float = Policy().silent_s,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.resume_s, self.silent_s = resume_s, silent_s
        self.stats: Stats | None = None
        self.members: Members | None = None
        self.resumed: Counter[str] = Counter()
        self._incarnation, self._tell, self._now = incarnation, tell, now
        self._model, self._page_size = model, page_size
        self._streams: dict[RequestId, Stream] = {}
        self._count = 0
        self._closed_because = ""
        self._leader: Address | None = None
        self._supervisor: Address | None = None
        self._silence = Silence(TICK_S, now())
        self._suspected = 0  # the term whose coordinator has been reported
        self._followed = 0  # the term in which the coordinator is known to know us
        self._stats_term = 0
        self._listed: set[int] = set()  # worker incarnations that this term's last Members have named
        self._gone: dict[int, None] = {}  # in the order in which they were missed

    # ------------------------------------------------------------------------------------------------ for readers

    @property
    def ready(self) -> bool:
        return not self.not_ready_reason

    @property
    def not_ready_reason(self) -> str:
        """Why nothing would be served now; empty when it would."""
        if self._leader is None:
            return "starting: no coordinator leads yet"
        if not self._follows() or self.stats is None or self._stats_term != self._leader.incarnation:
            return "the coordinator is taking up its work"
        if self._leader_is_silent:
            return f"the coordinator has said nothing for {self._silence.seconds:.0f} s"
        return "" if self.stats.ready else self.stats.reason or "starting"

    @property
    def streams(self) -> int:
        """How many have not ended."""
        return len(self._streams)

    def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        targets: Targets,
        *,
        salt: str = "",
        group: RequestId | None = None,
        tenant: str = "",
        priority: int = 0,
    ) -> Stream:
        """Ask for one sequence. Never raises: a refusal is raised where the stream is read.

        `salt` separates prefix caches; `group` is the id of the first of sibling sequences with the same prompt.
        `tenant`, `priority`: whose turn it is among those who wait.
        """
        packed = pack(prompt)
        root = page_root(self._model, salt)
        request = Generate(
            id=RequestId(self._incarnation, self._count),
            submission=0,
            prompt=packed,
            output=b"",
            root=root,
            hashes=page_hashes(root, packed, self._page_size),
            sampling=sampling,
            targets=targets,
            age_s=0.0,
            group=group,
            tenant=tenant,
            priority=priority,
        )
        self._count += 1
        stream = Stream(request, self._now(), self._cancel)
        if self._closed_because:
            stream.fail(StreamFailed(self._closed_because))
            return stream
        if self._followed == 0 or self.members is None or not self.members.workers:
            stream.fail(RequestRejected(503, self.not_ready_reason or "no worker is ready", 1.0))
            return stream
        self._streams[stream.id] = stream
        if self._follows():
            self._tell_leader(self._generate(stream))
        else:
            self._park(stream)  # as if it had been told to the coordinator that is gone
        return stream

    def close(self, message: str) -> None:
        """End all streams, and those to come: their readers get StreamFailed(message), their workers a Cancel."""
        self._closed_because = message
        for stream in list(self._streams.values()):
            self._end_at_worker(stream, "error")
            self._fail(stream, StreamFailed(message))

    # ------------------------------------------------------------------------------------------------- the inbox

    def receive(self, sender: Address, message: ToApi) -> None:
        if sender == self._leader:
            self._silence.heard(self._now())
        match message:
            case Tokens(runs):
                for run in runs:
                    self._tokens(sender, run)
            case Accepted():
                self._accepted(sender, message)
            case Rejected():
                self._rejected(message)
            case Members():
                self._take_members(message)
            case Lead(coordinator):
                if self._leader is None or coordinator.incarnation > self._leader.incarnation:
                    self._leader, self._supervisor = coordinator, sender
                    self._silence.heard(self._now())
                    self._follow()
                    self._submit_parked()
            case Stats():
                if sender.incarnation >= self._stats_term:
                    self.stats, self._stats_term = message, sender.incarnation
                self._submit_parked()
            case _:
                assert_never(message)

    def _tokens(self, sender: Address, run: TokenRun) -> None:
        stream = self._streams.get(run.id)
        if stream is None or stream.submission != run.submission:
            if run.finish is None:
                self._refuse(sender, run.id, run.submission)
            return
        stream.hear()
        stream.written_by(sender)
        stream.take(run)
        if stream.began is None and stream.output:
            stream.began = self._now()
        if stream.ended:
            self._streams.pop(stream.id, None)  # its reader may have ended it in between, as one by express can

    def _accepted(self, sender: Address, message: Accepted) -> None:
        stream = self._streams.get(message.id)
        if stream is None or stream.submission != message.submission:
            self._refuse(message.worker, message.id, message.submission)
            return
        stream.hear()
        stream.accept(message, spoken=sender == message.worker)
        if message.worker.incarnation in self._gone:  # told by another process, so the order says nothing
            self._lost_worker(stream)
            self._submit_parked()

    def _rejected(self, message: Rejected) -> None:
        stream = self._streams.get(message.id)
        if stream is None or stream.submission != message.submission:
            return
        if message.submission > 0 and message.status in (429, 503):
            self._park(stream)  # it had been let in before: it waits until Stats or Members tell of a change
            return
        if stream.received:
            self._fail(stream, StreamFailed(message.message))
        else:
            self._fail(stream, RequestRejected(message.status, message.message, message.retry_after_s))

    def _take_members(self, members: Members) -> None:
        """A worker is gone when it is named dead, or no longer named, or has a successor. A new term starts empty."""
        known = self.members
        if known is not None and members.term < known.term:
            return
        if known is None or members.term > known.term:
            self._listed = set()
        self.members = members
        present = {info.address.incarnation for info in members.workers}
        newest = {info.address.name: info.address.incarnation for info in members.workers}
        gone = {incarnation for _, incarnation in members.dead} | (self._listed - present)
        fresh = gone - self._gone.keys()
        self._gone = {n: None for n in [*self._gone, *sorted(fresh)][-GONE_KEPT:] if n not in present}
        self._listed = present
        for stream in list(self._streams.values()):
            worker = stream.worker
            if worker is not None and worker.incarnation < newest.get(worker.name, 0):
                self._gone[worker.incarnation] = None
            if worker is not None and worker.incarnation in self._gone:
                self._lost_worker(stream)
            elif fresh and (not stream.heard or stream.in_transit):
                self._resubmit(stream, "worker")  # it may have been on its way to that worker, or from it
        self._follow()
        self._submit_parked()

    # -------------------------------------------------------------------------------------------------- the clock

    def tick(self) -> None:
        """Look whether the coordinator is well, and whether a stream has waited too long for somebody to take it on."""
        now = self._now()
        self._silence.look(now)
        if self._leader_is_silent:
            self._report_leader()
        for stream in list(self._streams.values()):
            self._wait(stream, now)

    def _report_leader(self) -> None:
        """Once for each: the supervisor kills it, and another one leads."""
        assert self._leader is not None and self._supervisor is not None
        if self._suspected < self._leader.incarnation:
            self._suspected = self._leader.incarnation
            silent = f"silent for {self._silence.seconds:.0f} s"
            self._tell(self._supervisor, Suspect(self._leader.name, self._leader.incarnation, silent))

    def _wait(self, stream: Stream, now: float) -> None:
        if stream.lost_at is None and not stream.heard and not self._follows():
            stream.lost_at = now  # asked for from a coordinator that has gone, and there is no other yet
        if stream.lost_at is not None and now - stream.lost_at > self.resume_s:
            self._end_at_worker(stream, "error")
            what = f"no worker has gone on with this request for {self.resume_s:g} s (limits.resume_s)"
            self._fail(stream, StreamFailed(what))

    @property
    def _leader_is_silent(self) -> bool:
        """It has been heard, and should have been heard again: by then its Stats are late by `silent_s`."""
        heard = self._leader is not None and self._stats_term == self._leader.incarnation
        return heard and self._silence.seconds > self.silent_s + STATS_HEARTBEAT_S

    # --------------------------------------------------------------------------------------------- submissions

    def _follows(self) -> bool:
        """Whether the coordinator that leads is known to know us; before, it drops what we ask for."""
        return self._leader is not None and self._leader.incarnation == self._followed

    def _follow(self) -> None:
        members, leader = self.members, self._leader
        if members is None or leader is None or members.term != leader.incarnation or self._follows():
            return
        if any(api.incarnation == self._incarnation for api in members.apis):
            took_over = self._followed > 0
            self._followed = leader.incarnation
            if took_over:
                for stream in list(self._streams.values()):
                    if not stream.heard:
                        self._resubmit(stream, "coordinator")

    def _lost_worker(self, stream: Stream) -> None:
        stream.deaths += 1
        if stream.deaths > MAX_DEATHS:
            what = f"{stream.deaths} workers in a row have died while they had this request"
            self._fail(stream, StreamFailed(what))
        else:
            self._resubmit(stream, "worker")

    def _resubmit(self, stream: Stream, cause: str) -> None:
        if not stream.parked:
            self.resumed[cause] += 1
            self._park(stream)

    def _park(self, stream: Stream) -> None:
        stream.park()
        if stream.lost_at is None:
            stream.lost_at = self._now()

    def _submit_parked(self) -> None:
        """What was let in before goes on as soon as the coordinator knows us and a worker."""
        if not self._follows() or self.members is None or not self.members.workers:
            return
        for stream in self._streams.values():
            if stream.parked:
                stream.parked = False
                self._tell_leader(self._generate(stream))

    def _generate(self, stream: Stream) -> Generate:
        """The request as it is now: what has been received is not asked for again. Its age keeps its turn."""
        sampling = stream.request.sampling
        if stream.has_prompt_logprobs:
            sampling = replace(sampling, prompt_logprobs=-1)
        return replace(
            stream.request,
            submission=stream.submission,
            output=stream.output.tobytes(),
            sampling=sampling,
            age_s=self._now() - stream.born,
            first_age_s=-1.0 if stream.began is None else self._now() - stream.began,
        )

    # ---------------------------------------------------------------------------------------------------- ends

    def _cancel(self, stream: Stream, reason: CancelReason) -> None:
        if self._streams.pop(stream.id, None) is not None:
            self._end_at_worker(stream, reason)

    def _end_at_worker(self, stream: Stream, reason: CancelReason) -> None:
        cancel = Cancel(stream.id, stream.submission, reason)
        if stream.worker is not None:
            self._tell(stream.worker, cancel)
        else:
            self._tell_leader(cancel)

    def _fail(self, stream: Stream, error: RequestRejected | StreamFailed) -> None:
        del self._streams[stream.id]
        stream.fail(error)

    def _refuse(self, worker: Address, id: RequestId, submission: int) -> None:
        if worker.incarnation not in self._gone:
            self._tell(worker, Cancel(id, submission, "stale"))

    def _tell_leader(self, message: Message) -> None:
        if self._leader is not None:
            self._tell(self._leader, message)
