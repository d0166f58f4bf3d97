"""Who is a member, and where each request goes.

Knows workers by their last Load and by what it has routed since; knows requests only until a worker says Finished.
It is off the token path: if it is away, running streams go on. It routes nothing until a supervisor has reported the
live and dead incarnations of its host, and refuses what it cannot place: 503 without workers, 429 with full queues.

A worker that says nothing, or has work and makes no progress, first gets no new requests (doubt), then is reported to
its supervisor, which kills it (suspicion). One that leaves gets no new requests either, and returns those it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from cbdisagg.config import Config
from cbdisagg.core.board import Board
from cbdisagg.core.effects import Effect, Note, Tell, Wake
from cbdisagg.core.events import CoordinatorEvent, FromCoordinatorInbox, Tick
from cbdisagg.core.policy import Decision, Link, View, move_target, retry_after, route
from cbdisagg.core.residency import Residency, Starts
from cbdisagg.messages import (
    STATS_HEARTBEAT_S,
    Address,
    Cancel,
    Finished,
    Generate,
    Hash,
    Hello,
    Leaving,
    Load,
    Members,
    Message,
    Pair,
    Paired,
    PeerDown,
    Rejected,
    Reported,
    RequestId,
    Return,
    Route,
    Stats,
    Steer,
    Submit,
    Suspect,
    Up,
    WorkerInfo,
    split_hashes,
)

STATS_S = 0.2
CHECK_S = 1.0
_UNSEEN_S = 0.05  # a Load that comes this long after a route is sure to include its job
_DEAD_KEPT = 256
DOUBT_S = 8.0
"""A worker with work and no progress for this long is routed around, and not ready."""
_AWAY_S = 2.5
"""Ticks come each CHECK_S: after such a pause it was this process that did not run, and nobody else was silent."""


@dataclass(slots=True)
class Member:
    """A worker that has said Hello, and what was routed to it since its last Load.

    `submitted` counts the Submits sent to it; `unseen` holds (count, prompt tokens) of those that its Load does not
    include. Jobs reach it by way of a decode worker: `jobs` holds (time, prompt tokens) of those it may not know yet.
    """

    info: WorkerInfo
    heard_at: float
    progress_at: float
    residency: Residency
    load: Load | None = None
    submitted: int = 0
    unseen: list[tuple[int, int]] = field(default_factory=list)
    jobs: list[tuple[float, int]] = field(default_factory=list)
    suspect: bool = False
    leaving: bool = False

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

    def submit(self, tokens: int) -> None:
        self.submitted += 1
        self.unseen.append((self.submitted, tokens))

    def hear(self, load: Load, now: float) -> None:
        if self.load is None or load.counters.steps != self.load.counters.steps or not load.busy:
            self.progress_at = now
        self.load, self.heard_at = load, now
        self.unseen = [(count, tokens) for count, tokens in self.unseen if count > load.received]
        self.jobs = [(at, tokens) for at, tokens in self.jobs if now - at < _UNSEEN_S]


@dataclass(slots=True)
class Placed:
    """`source` runs it until `decode` has taken it over."""

    submission: int
    decode: Address
    source: Address | None = None


class CoordinatorCore:
    def __init__(self, address: Address, config: Config) -> None:
        self.address = address
        self.config = config
        self.supervisors: dict[int, Address] = {}
        self.reported: set[str] = set()
        self.apis: dict[int, Address] = {}
        self.workers: dict[int, Member] = {}
        self.pairs: dict[tuple[int, int], Pair] = {}
        self.dead: dict[tuple[str, int], None] = {}  # in order of death
        self.restarts: dict[str, int] = {}
        self.board = Board()
        self.starts = Starts()
        self.placed: dict[RequestId, Placed] = {}
        self.decisions: dict[tuple[str, str], int] = {}
        self._now = 0.0
        self._present_since = 0.0
        self._effects: list[Effect] = []
        self._stats: Stats | None = None
        self._stats_at = float("-inf")
        self._wake_at = float("inf")

    def handle(self, event: CoordinatorEvent, now: float) -> list[Effect]:
        if now - self._now > _AWAY_S:
            self._present_since = now
        self._now, self._effects = now, []
        match event:
            case FromCoordinatorInbox(sender, message):
                self._receive(sender, message)
            case Tick():
                self._wake_at = float("inf")
                self._find_suspects()
            case _:
                assert_never(event)
        self._tell_stats()
        return self._effects

    def _receive(self, sender: Address, message: object) -> None:
        match message:
            case Generate():
                self._generate(sender, message)
            case Cancel(id):
                placed = self.placed.get(id)
                if placed is not None:
                    self._tell(placed.decode, message)
                if placed is not None and placed.source is not None:
                    self._tell(placed.source, message)
            case Finished(id, submission):
                self._finished(sender, id, submission)
            case Leaving():
                member = self.workers.get(sender.incarnation)
                if member is not None and not member.leaving:
                    member.leaving = True
                    self._effects.append(Note("info", f"{sender.name} is leaving"))
            case Return(request):
                self._return(sender, request)
            case Steer():
                pass
            case Hello(info):
                self._join(info)
            case Load():
                self._load(sender, message)
            case Paired(pair):
                self._paired(pair)
            case Up():
                self._up(sender, message)
            case PeerDown(name, incarnation, kind=kind):
                self.supervisors[sender.incarnation] = sender
                self._leave(name, incarnation, kind)
            case Reported(host):
                self.supervisors[sender.incarnation] = sender
                self.reported.add(host)
                self._broadcast()
            case Suspect(name, incarnation, reason):
                self._suspect(name, incarnation, reason)
            case _:
                raise TypeError(f"not a message to the coordinator: {message!r}")

    # ----------------------------------------------------------------------------------------------- requests

    def _generate(self, api: Address, request: Generate) -> None:
        placed = self.placed.get(request.id)
        if placed is not None and placed.submission >= request.submission:
            return
        if api.incarnation not in self.apis:
            return  # its Up has not come or it is dead: it asks again when it hears of this coordinator
        if not self.reported or not self.board.has(self._serves):
            self._reject(api, request, 503, "no worker is ready", 1.0)
            return
        limit = self.config.policy.queue_limit
        if self.board.queued >= limit and not request.submission:  # a stream that runs goes on
            text = f"{limit} requests are waiting already (policy.queue_limit)"
            self._reject(api, request, 429, text, retry_after(self.board.views(self._serves)))
            return
        hashes = split_hashes(request.hashes)
        decision = self._decide(request, hashes)
        self._count(decision)
        self._place(request, hashes, decision)

    def _decide(self, request: Generate, hashes: Sequence[Hash]) -> Decision:
        """Somebody serves. Siblings go where the first of them went, and join its prefix there."""
        first = self.placed.get(request.group) if request.group is not None else None
        if first is not None and self._serves(first.decode):
            return Decision(first.decode, first.decode, "sibling", 0.0)
        views, links = self.board.shortlist(self._holders(request, hashes), self._serves)
        return route(
            views,
            links,
            self.config.policy.mode,
            (len(request.prompt) + len(request.output)) // 4,
            request.sampling.max_tokens - len(request.output) // 4,
            request.targets.ttft_s,
            request.targets.tpot_s,
        )

    def _place(self, request: Generate, hashes: Sequence[Hash], decision: Decision) -> None:
        self.placed[request.id] = Placed(request.submission, decision.decode)
        tokens = (len(request.prompt) + len(request.output)) // 4
        prefill, decode = (self.workers[end.incarnation] for end in (decision.prefill, decision.decode))
        missing = tokens - self._cached(prefill, request, hashes)
        decode.submit(missing if prefill is decode else 0)
        if prefill is not decode:
            prefill.jobs.append((self._now, missing))
            self._look_at(prefill)
            self._sent(prefill, hashes)
        self._look_at(decode)
        self._sent(decode, hashes)
        self._tell(decision.decode, Submit(request, Route(decision.prefill, decision.decode), self.address.incarnation))

    def _finished(self, sender: Address, id: RequestId, submission: int) -> None:
        placed = self.placed.get(id)
        if placed is None or placed.submission > submission:
            return
        if placed.decode == sender:
            del self.placed[id]
        elif placed.source == sender:
            placed.source = None  # handed over

    def _return(self, source: Address, request: Generate) -> None:
        """A worker that leaves wants to be rid of a request. If nobody can take it, it is finished where it is."""
        placed = self.placed.get(request.id)
        newer = placed is not None and (placed.submission > request.submission or placed.decode != source)
        known = source.incarnation in self.workers and request.id.api in self.apis
        if not known or not self.reported or newer:
            return
        to = move_target(self.board.views(self._serves), self.board.links(), source)
        if to is None:
            return
        self.placed[request.id] = Placed(request.submission, to, source)
        taker = self.workers[to.incarnation]
        taker.submit(0)
        self._look_at(taker)
        self._sent(taker, split_hashes(request.hashes))
        self._tell(to, Submit(request, Route(source, to), self.address.incarnation, moves=True))

    def _reject(self, api: Address, request: Generate, status: int, text: str, retry_after_s: float) -> None:
        self._tell(api, Rejected(request.id, request.submission, status, text, retry_after_s))

    def _count(self, decision: Decision) -> None:
        key = (decision.kind, decision.reason)
        self.decisions[key] = self.decisions.get(key, 0) + 1

    # ------------------------------------------------------------------------------------ what routing sees

    def _look_at(self, member: Member) -> None:
        """It, or what was routed to it, has changed."""
        load = member.load
        if load is None:
            return
        view = View(
            address=member.address,
            role=member.info.role,
            running=load.running + load.reserved,
            waiting=load.waiting + len(member.unseen),
            queued_tokens=load.queued_tokens + sum(tokens for _, tokens in member.unseen + member.jobs),
            max_batch=member.info.max_batch,
            step_s=load.forecast.step_s,
            token_s=load.forecast.prefill_s,
            cached=0,
        )
        self.board.put(view, member.queued)

    def _serves(self, worker: Address) -> bool:
        """May it get new requests?"""
        member = self.workers.get(worker.incarnation)
        return member is not None and member.load is not None and self._is_well(member)

    def _is_well(self, member: Member) -> bool:
        stuck = self._now - max(member.progress_at, self._present_since)
        return not (member.suspect or member.leaving or stuck > DOUBT_S)

    def _holders(self, request: Generate, hashes: Sequence[Hash]) -> dict[Address, int]:
        """Who probably has how many tokens of this prompt, if any."""
        found = {}
        if hashes and self.config.kv.prefix_cache:
            for incarnation in self.starts.of(hashes[0]):
                member = self.workers.get(incarnation)
                if member is not None and (cached := self._cached(member, request, hashes)):
                    found[member.address] = cached
        return found

    def _sent(self, member: Member, hashes: Sequence[Hash]) -> None:
        """It will have these pages."""
        if hashes:
            member.residency.add(hashes)
            self.starts.add(hashes[0], member.address.incarnation)

    def _cached(self, member: Member, request: Generate, hashes: Sequence[Hash]) -> int:
        """Tokens of the prompt that this worker probably has; the last one is always computed."""
        if not self.config.kv.prefix_cache:
            return 0
        most = (len(request.prompt) // 4 - 1) // member.info.page_size
        return min(most, member.residency.count(hashes)) * member.info.page_size

    def _link(self, pair: Pair) -> None:
        """Pages can be pushed this way, once both ends are members."""
        prefill, decode = self.workers.get(pair.prefill.incarnation), self.workers.get(pair.decode.incarnation)
        if prefill is None or decode is None:
            return
        if pair.kind and not prefill.suspect:
            pool = decode.info.pool
            token_bytes = pool.layers * pool.page_bytes // decode.info.page_size
            self.board.link(Link(pair.prefill, pair.decode, pair.bytes_per_s, token_bytes))
        else:
            self.board.unlink(pair.prefill, pair.decode)

    def _unlink_from(self, prefill: Address) -> None:
        for pair in self.pairs.values():
            if pair.prefill == prefill:
                self.board.unlink(pair.prefill, pair.decode)

    # --------------------------------------------------------------------------------------------- membership

    def _up(self, sender: Address, up: Up) -> None:
        self.supervisors[sender.incarnation] = sender
        if (up.address.name, up.address.incarnation) in self.dead:
            return
        if up.kind == "api" and up.address.incarnation not in self.apis:
            self.apis[up.address.incarnation] = up.address
            self._broadcast()

    def _join(self, info: WorkerInfo) -> None:
        address = info.address
        if (address.name, address.incarnation) in self.dead or address.incarnation in self.workers:
            return
        for member in list(self.workers.values()):
            if member.address.name == address.name and member.address.incarnation < address.incarnation:
                self._effects.append(Note("info", f"{address.name} has been started anew"))
                self._remove(member.address.incarnation)
        self.workers[address.incarnation] = Member(info, self._now, self._now, Residency(info.pool.pages))
        for pair in self.pairs.values():
            if address in (pair.prefill, pair.decode):
                self._link(pair)
        self._broadcast()

    def _leave(self, name: str, incarnation: int, kind: str) -> None:
        """Told again to each new coordinator, so the counts go on where the last one's ended."""
        if (name, incarnation) in self.dead:
            return
        self.dead[(name, incarnation)] = None
        while len(self.dead) > _DEAD_KEPT:
            del self.dead[next(iter(self.dead))]
        if kind == "worker":
            self.restarts[name] = self.restarts.get(name, 0) + 1
        self.apis.pop(incarnation, None)
        self._remove(incarnation)
        self._broadcast()

    def _remove(self, incarnation: int) -> None:
        """What was to move to it is still where it was; what it was to give away comes again from its api."""
        member = self.workers.pop(incarnation, None)
        if member is not None:
            self.board.drop(member.address)
        self.pairs = {ends: pair for ends, pair in self.pairs.items() if incarnation not in ends}
        for id, placed in list(self.placed.items()):
            if placed.source is not None and placed.source.incarnation == incarnation:
                placed.source = None
            if placed.decode.incarnation == incarnation and placed.source is not None:
                placed.decode, placed.source = placed.source, None
            elif placed.decode.incarnation == incarnation or id.api == incarnation:
                del self.placed[id]

    def _paired(self, pair: Pair) -> None:
        """Kept even if one end has not said Hello yet: after a restart they come in any order."""
        ends = (pair.prefill.incarnation, pair.decode.incarnation)
        dead = any((end.name, end.incarnation) in self.dead for end in (pair.prefill, pair.decode))
        if not dead and self.pairs.get(ends) != pair:
            self.pairs[ends] = pair
            self._link(pair)
            self._broadcast()

    def _living_pairs(self) -> list[Pair]:
        """Pairs whose ends are both members."""
        return [pair for ends, pair in self.pairs.items() if all(end in self.workers for end in ends)]

    def _load(self, sender: Address, load: Load) -> None:
        member = self.workers.get(sender.incarnation)
        if member is not None:
            member.hear(load, self._now)
            self._look_at(member)

    def _find_suspects(self) -> None:
        policy = self.config.policy
        for member in list(self.workers.values()):
            silent = self._now - max(member.heard_at, self._present_since)
            stuck = self._now - max(member.progress_at, self._present_since)
            if not member.suspect and (silent > policy.silent_s or stuck > policy.suspect_s):
                quiet = silent > policy.silent_s
                what = f"silent for {silent:.0f} s" if quiet else f"work and no progress for {stuck:.0f} s"
                self._suspect(member.address.name, member.address.incarnation, what)

    def _suspect(self, name: str, incarnation: int, reason: str) -> None:
        """Routed around at once; its supervisor kills it, and PeerDown follows.

        Also one that is no member: what was lost of it may have been its Hello, and it will not say that again.
        """
        member = self.workers.get(incarnation)
        known = (name, incarnation) in self.dead or incarnation in self.apis or (member is not None and member.suspect)
        if known:
            return
        self._effects.append(Note("warning", f"{name} is suspected: {reason}"))
        for supervisor in self.supervisors.values():
            self._tell(supervisor, Suspect(name, incarnation, reason))
        if member is not None:
            member.suspect = True
            self._unlink_from(member.address)
            self._broadcast()

    def _broadcast(self) -> None:
        """Nothing before a supervisor has reported: half a membership would look like deaths."""
        if not self.reported:
            return
        members = Members(
            term=self.address.incarnation,
            apis=tuple(self.apis.values()),
            workers=tuple(member.info for member in self.workers.values() if not member.suspect),
            pairs=tuple(self._living_pairs()),
            dead=tuple(self.dead),
        )
        receivers = [*self.supervisors.values(), *(member.address for member in self.workers.values())]
        for address in [*receivers, *self.apis.values()]:
            self._tell(address, members)

    # -------------------------------------------------------------------------------------------------- stats

    def _readiness(self) -> tuple[bool, str]:
        """Each configured role has a worker and, where roles are split, one can hand over to another."""
        if not self.reported:
            return False, "starting: no supervisor has reported"
        serving = [member for member in self.workers.values() if self._serves(member.address)]
        roles = {member.info.role for member in serving}
        for role in sorted({group.role for group in self.config.workers}):
            if role not in roles:
                return False, f"no {role} worker is running"
        if self.config.policy.mode != "aggregate" and {"prefill", "decode"} <= roles:
            ways = (ends for ends, pair in self.pairs.items() if pair.kind)
            living = {member.address.incarnation for member in serving}
            prefillers = {member.address.incarnation for member in serving if member.info.role != "decode"}
            if not any(prefill in prefillers and decode in living for prefill, decode in ways):
                return False, "no transport from a prefill to a decode worker has been tested yet"
        return True, ""

    def _tell_stats(self) -> None:
        """What has changed, at most once each STATS_S, and now and then what has not; a Wake sees to the last of it."""
        if self._now < self._stats_at + STATS_S:
            self._wake(self._stats_at + STATS_S)
            return
        ready, reason = self._readiness()
        stats = Stats(
            loads=tuple((m.address, m.info.role, m.load) for m in self.workers.values() if m.load is not None),
            decisions=tuple((kind, why, count) for (kind, why), count in self.decisions.items()),
            restarts=dict(self.restarts),
            ready=ready,
            reason=reason,
        )
        if stats != self._stats or self._now >= self._stats_at + STATS_HEARTBEAT_S:
            self._stats, self._stats_at = stats, self._now
            for api in self.apis.values():
                self._tell(api, stats)
        self._wake(self._now + CHECK_S)

    def _wake(self, at: float) -> None:
        if self._wake_at <= at:
            return
        self._wake_at = at
        self._effects.append(Wake(at))

    def _tell(self, to: Address, message: Message) -> None:
        self._effects.append(Tell(to, message))
