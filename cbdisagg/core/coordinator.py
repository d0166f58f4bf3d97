"""Who is a member, and where each request goes.

Knows workers by their last Load and by what it has routed since; knows requests only until a worker says Finished.
It is off the token path: if it is away, running streams go on. It routes nothing until a supervisor has reported the
live and dead incarnations of its host, and refuses what it cannot place: 503 without workers, 429 with full queues.

A worker that says nothing, or has work and makes no progress, first gets no new requests (doubt), then is reported to
its supervisor, which kills it (suspicion). One that leaves gets no new requests either, and returns those it has.
"""

from __future__ import annotations

from typing import assert_never

from cbdisagg.config import Config
from cbdisagg.core.effects import Effect, Note, Tell, Wake
from cbdisagg.core.events import CoordinatorEvent, FromCoordinatorInbox, Tick
from cbdisagg.core.member import Member
from cbdisagg.core.placement import Placement, reject
from cbdisagg.core.residency import Residency
from cbdisagg.messages import (
    STATS_HEARTBEAT_S,
    Address,
    Cancel,
    Finished,
    Generate,
    Hello,
    Leaving,
    Load,
    Members,
    Message,
    Pair,
    Paired,
    PeerDown,
    Reported,
    Return,
    Stats,
    Steer,
    Suspect,
    Up,
    WorkerInfo,
)

STATS_S = 0.2
CHECK_S = 1.0
_DEAD_KEPT = 256
DOUBT_S = 8.0
"""A worker with work and no progress for this long is routed around, and not ready."""
_AWAY_S = 2.5
"""Ticks come each CHECK_S: after such a pause it was this process that did not run, and nobody else was silent."""


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
        self.placement = Placement(address.incarnation, config, self.workers, self._serves)
        self.placed, self.decisions = self.placement.placed, self.placement.decisions
        self._steered: Steer | None = None
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
            case Cancel():
                self._effects += self.placement.cancel(message)
            case Finished(id, submission):
                self.placement.finished(sender, id, submission, self._now)
            case Leaving():
                member = self.workers.get(sender.incarnation)
                if member is not None and not member.leaving:
                    member.leaving = True
                    self._effects.append(Note("info", f"{sender.name} is leaving"))
            case Return():
                self._return(sender, message)
            case Steer():
                self._steer(message)
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

    def _generate(self, api: Address, request: Generate) -> None:
        if api.incarnation not in self.apis:
            return  # its Up has not come or it is dead: it asks again when it hears of this coordinator
        if self.reported:
            self._effects += self.placement.ask(api, request, self._now)
        else:
            self._effects.append(reject(api, request, 503, "no worker is ready", 1.0))

    def _return(self, source: Address, message: Return) -> None:
        """What a suspect runs comes again from its api: whoever was to take it over, not having heard of the suspect,
        would not hear of its end.
        """
        member = self.workers.get(source.incarnation)
        if member is None or member.suspect or message.request.id.api not in self.apis:
            return
        if self.reported:
            self._effects += self.placement.give_back(source, message.request, message.late, self._now)

    def _steer(self, message: Steer) -> None:
        """Decide by these knobs from now on, here and in the workers."""
        self._steered = message
        self.placement.steer(message.knobs)
        self._effects.append(Note("info", f"knobs: {message.knobs}: {message.reason}"))
        for member in self.workers.values():
            self._tell(member.address, message)

    def _serves(self, worker: Address) -> bool:
        """May it get new requests?"""
        member = self.workers.get(worker.incarnation)
        return member is not None and member.load is not None and self._is_well(member)

    def _is_well(self, member: Member) -> bool:
        if member.suspect or member.leaving:
            return False
        recent = self._now - DOUBT_S
        return member.progress_at >= recent or self._present_since >= recent

    def _unlink_from(self, prefill: Address) -> None:
        for pair in self.pairs.values():
            if pair.prefill == prefill:
                self.placement.board.unlink(pair.prefill, pair.decode)

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
                self.placement.link(pair)
        self.placement.pin()
        self._broadcast()
        if self._steered is not None:
            self._tell(address, self._steered)

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
        member = self.workers.pop(incarnation, None)
        self.pairs = {ends: pair for ends, pair in self.pairs.items() if incarnation not in ends}
        self.placement.forget(incarnation, member.address if member is not None else None)

    def _paired(self, pair: Pair) -> None:
        """Kept even if one end has not said Hello yet: after a restart they come in any order."""
        ends = (pair.prefill.incarnation, pair.decode.incarnation)
        dead = any((end.name, end.incarnation) in self.dead for end in (pair.prefill, pair.decode))
        if not dead and self.pairs.get(ends) != pair:
            self.pairs[ends] = pair
            self.placement.link(pair)
            self._broadcast()

    def _living_pairs(self) -> list[Pair]:
        """Pairs whose ends are both members."""
        return [pair for ends, pair in self.pairs.items() if all(end in self.workers for end in ends)]

    def _load(self, sender: Address, load: Load) -> None:
        member = self.workers.get(sender.incarnation)
        if member is not None:
            member.hear(load, self._now)
            self.placement.look_at(member)

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
