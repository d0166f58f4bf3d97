"""All clients and the api process, as little of them as latency depends on: streams that resume, and when tokens came.

Knows requests by number. Life of one: asked (after the api's own work) -> tokens -> ended, by its finish or a refusal;
asked again, as a new submission with the tokens so far, when its worker is gone. Times are the clients': arrivals are
those intended. Texts, stop strings and cancelling are the real api's (api/client.py) and have no part here.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from msgspec.structs import replace

from cbdisagg.config import Targets as Settings
from cbdisagg.core.profile import Profile
from cbdisagg.messages import (
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
    Targets,
    TokenRun,
    Tokens,
    page_hashes,
    page_root,
)
from cbdisagg.sim.bus import Bus
from cbdisagg.sim.clock import Clock
from cbdisagg.sim.network import Network
from cbdisagg.sim.workload import Ask

Status: TypeAlias = Literal["open", "done", "rejected", "failed"]
RESUME_S = 0.1
"""A stream that nobody could take is asked for again after so long."""


@dataclass(slots=True)
class Record:
    """One request, as its client saw it; seconds of the simulation, -1 for what has not come.

    `longest_gap_s`: between two of its tokens. `worker`: the name of the last one that wrote its stream. `route`: what
    the coordinator decided on it at last, as "remote: faster".
    """

    ask: Ask
    targets: Targets
    arrival: float
    first: float = -1.0
    last: float = -1.0
    tokens: int = 0
    longest_gap_s: float = 0.0
    worker: str = ""
    route: str = ""
    submissions: int = 1
    status: Status = "open"
    message: str = ""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    cached_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft_s(self) -> float:
        return self.first - self.arrival

    @property
    def tpot_s(self) -> float:
        """Mean time of each token after the first; 0 for an answer of one token."""
        return (self.last - self.first) / (self.tokens - 1) if self.tokens > 1 else 0.0

    @property
    def good(self) -> bool:
        """It has ended well and within both targets."""
        return self.status == "done" and self.ttft_s <= self.targets.ttft_s and self.tpot_s <= self.targets.tpot_s


@dataclass(slots=True)
class _Stream:
    record: Record
    request: Generate
    worker: Address | None = None
    early: dict[int, TokenRun] = field(default_factory=dict)


class Clients:
    """A process of the network. `ended` is called with each request that has ended.

    `gaps` pools the seconds between tokens of all requests. `hash_pages`: of prompts, for a prefix cache.
    """

    def __init__(
        self,
        address: Address,
        host: str,
        clock: Clock,
        network: Network,
        targets: Settings,
        page_size: int,
        *,
        hash_pages: bool,
        profile: Profile,
        bus: Bus | None,
        ended: Callable[[Record], None],
    ) -> None:
        self.address, self.host = address, host
        self.records: list[Record] = []
        self.gaps = array("f")
        self._clock, self._network = clock, network
        self._targets = Targets(targets.ttft_ms / 1e3, targets.tpot_ms / 1e3)
        self._page_size, self._hash_pages = page_size, hash_pages
        self._profile, self._bus = profile, bus
        self._ended = ended
        self._root = page_root("simulated")
        self._streams: dict[int, _Stream] = {}
        self._leader: Address | None = None
        self._workers: set[int] = set()

    def ask(self, ask: Ask, prompt: bytes) -> None:
        """A client sends a request now."""
        number = len(self.records)
        targets = Targets(
            ask.ttft_ms / 1e3 or self._targets.ttft_s,
            ask.tpot_ms / 1e3 or self._targets.tpot_s,
        )
        request = Generate(
            id=RequestId(self.address.incarnation, number),
            submission=0,
            prompt=prompt,
            output=b"",
            root=self._root,
            hashes=page_hashes(self._root, prompt, self._page_size) if self._hash_pages else b"",
            sampling=Sampling(max_tokens=ask.output_tokens),
            targets=targets,
            age_s=self._profile.host.request_s,
            tenant=ask.tenant,
            priority=ask.priority,
        )
        record = Record(ask, targets, self._clock.now)
        self.records.append(record)
        self._streams[number] = _Stream(record, request)
        self._clock.after(self._profile.host.request_s, self._submit, number)
        self._compute(self._profile.host.others_request_s)

    def route(self, id: RequestId, what: str) -> None:
        """The coordinator has decided on a request."""
        self.records[id.n].route = what

    def receive(self, sender: Address, message: Message) -> None:
        match message:
            case Tokens(runs):
                self._take(sender, runs)
            case Accepted(id, submission, worker):
                stream = self._current(id, submission)
                if stream is not None:
                    stream.worker = worker
                    stream.record.worker = worker.name
                else:
                    self._refuse(worker, id, submission)
            case Rejected(id, submission, status, text):
                stream = self._current(id, submission)
                if stream is not None:
                    self._reject(stream, status, text)
            case Members(workers=workers):
                self._update({worker.address.incarnation for worker in workers})
            case Lead(coordinator):
                self._follow(coordinator)
            case Stats():
                pass
            case _:
                raise TypeError(f"not a message to an api: {message!r}")

    def _current(self, id: RequestId, submission: int) -> _Stream | None:
        stream = self._streams.get(id.n)
        return stream if stream is not None and stream.request.submission == submission else None

    # ------------------------------------------------------------------------------------------------- tokens

    def _compute(self, seconds: float) -> None:
        if self._bus is not None:
            self._bus.disturb(seconds)

    def _take(self, sender: Address, runs: Sequence[TokenRun]) -> None:
        """Tokens are seen by their clients when what `first_s` counts is over too: it delays all of a stream alike."""
        now = self._clock.now + self._profile.first_s
        host = self._profile.host
        self._compute(host.others_message_s + host.others_token_s * sum(len(run.ids) for run in runs))
        for run in runs:
            stream = self._streams.get(run.id.n)
            if stream is None or stream.request.submission != run.submission:
                if run.finish is None:
                    self._refuse(sender, run.id, run.submission)
                continue
            record = stream.record
            if run.index != record.tokens:  # of two workers, when it moves: the order between pairs is not kept
                if run.index > record.tokens:
                    stream.early[run.index] = run
                continue
            self._extend(stream, run, now)
            while stream.early and (later := stream.early.pop(record.tokens, None)) is not None:
                self._extend(stream, later, now)

    def _extend(self, stream: _Stream, run: TokenRun, now: float) -> None:
        record = stream.record
        if run.ids:
            if record.tokens:
                gap = now - record.last
                self.gaps.append(gap)
                if gap > record.longest_gap_s:
                    record.longest_gap_s = gap
            else:
                record.first = now
            record.last = now
            record.tokens += len(run.ids)
        if run.cached_tokens is not None:
            record.cached_tokens = run.cached_tokens
        if run.finish is not None:
            finish = run.finish
            record.queue_s, record.prefill_s = finish.queue_s, finish.prefill_s
            record.preemptions = finish.preemptions
            self._end(stream, "done" if finish.reason != "error" else "failed", finish.message)

    def _end(self, stream: _Stream, status: Status, message: str) -> None:
        stream.record.status, stream.record.message = status, message
        del self._streams[stream.request.id.n]
        self._ended(stream.record)

    def _refuse(self, worker: Address, id: RequestId, submission: int) -> None:
        """It works for a submission that has been replaced."""
        self._network.send(self, worker, Cancel(id, submission, "stale"))

    # -------------------------------------------------------------------------------------------- submissions

    def _submit(self, number: int) -> None:
        stream = self._streams.get(number)
        if stream is not None and self._leader is not None:
            self._network.send(self, self._leader, stream.request)

    def _reject(self, stream: _Stream, status: int, text: str) -> None:
        """The client is told; but one that had been let in before waits for a worker, as long as it takes."""
        submission = stream.request.submission
        if submission and status in (429, 503):
            self._clock.after(RESUME_S, self._resubmit, stream.request.id.n, submission)
        else:
            self._end(stream, "rejected", text)

    def _resubmit(self, number: int, submission: int) -> None:
        """Ask for the rest of a stream, with all that has come so far."""
        stream = self._streams.get(number)
        if stream is None or stream.request.submission != submission:
            return
        record, now = stream.record, self._clock.now
        stream.request = replace(
            stream.request,
            submission=submission + 1,
            output=array("i", [1] * record.tokens).tobytes(),
            age_s=now - record.arrival,
            first_age_s=max(0.0, now - record.first) if record.tokens else -1.0,
        )
        stream.worker = None
        stream.early.clear()
        record.submissions += 1
        self._submit(number)

    def _update(self, workers: set[int]) -> None:
        """Streams of workers that are no longer listed go on elsewhere, and those that may have been on their way."""
        gone, self._workers = self._workers - workers, workers
        if gone:
            for number, stream in list(self._streams.items()):
                if stream.worker is None or stream.worker.incarnation in gone:
                    self._resubmit(number, stream.request.submission)

    def _follow(self, coordinator: Address) -> None:
        """A new coordinator knows of no request that no worker has accepted."""
        self._leader = coordinator
        for number, stream in list(self._streams.items()):
            if stream.worker is None and self._clock.now > 0:
                self._resubmit(number, stream.request.submission)
