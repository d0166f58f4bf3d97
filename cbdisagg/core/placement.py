"""Which worker serves which request, and who is refused: what the coordinator remembers to decide that.

Knows each request from its placing until a worker says Finished; workers by their last Load and by what has been routed
to them since. Decides by policy.py, on whoever `board.py` says is worth a look. Membership and health are the caller's:
`serves` says who may get requests now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from cbdisagg.config import Config
from cbdisagg.core.board import Board
from cbdisagg.core.effects import Effect, Note, Tell
from cbdisagg.core.knobs import configured, pinned
from cbdisagg.core.member import Member
from cbdisagg.core.policy import Decision, Link, Wanted, explain, move_target, refusal, relief, route
from cbdisagg.core.residency import Starts
from cbdisagg.messages import (
    Address,
    Cancel,
    Generate,
    Hash,
    Knobs,
    Pair,
    Rejected,
    RequestId,
    Role,
    Route,
    Submit,
    split_hashes,
)


@dataclass(slots=True)
class Placed:
    """`source` runs it until `decode` has taken it over."""

    submission: int
    decode: Address
    source: Address | None = None


class Placement:
    """`workers` is the coordinator's own table of members. `term`: its incarnation, part of every Submit.

    `decisions`: requests by (local | remote | rejected, reason).
    """

    def __init__(
        self, term: int, config: Config, workers: dict[int, Member], serves: Callable[[Address], bool]
    ) -> None:
        self.config = config
        self.term = term
        self.workers = workers
        self.board = Board()
        self.starts = Starts()
        self.placed: dict[RequestId, Placed] = {}
        self.decisions: dict[tuple[str, str], int] = {}
        self.knobs = configured(config)
        self.pins: dict[Address, Role] = {}
        self._serves = serves

    # ----------------------------------------------------------------------------------------------- requests

    def ask(self, api: Address, request: Generate, now: float) -> list[Effect]:
        """A request, new or resubmitted: to a worker, or refused."""
        placed = self.placed.get(request.id)
        if placed is not None and placed.submission >= request.submission:
            return []
        if not self.board.has(self._serves):
            return [reject(api, request, 503, "no worker is ready", 1.0)]
        wanted = _wanted(request)
        limit = self.config.policy.queue_limit
        if self.board.queued >= limit and not request.submission:  # a stream that runs goes on
            text = f"{limit} requests are waiting already (policy.queue_limit)"
            self._count("rejected", "queue-limit")
            return [reject(api, request, 429, text, self._drain_s())]
        hashes = split_hashes(request.hashes)
        cached = self._holders(request, hashes)
        decision = self.decide(request, wanted, cached, now)
        if self.config.policy.admission == "early-reject" and not request.submission and decision.reason != "sibling":
            alone_s = self.board.view(decision.prefill).alone_s(wanted.tokens, cached.get(decision.prefill, 0))
            refused = refusal(decision, alone_s, wanted, self._between_ends_s)
            if refused is not None:
                text, after_s = refused
                self._count("rejected", "unattainable")
                rejected = reject(api, request, 429, f"{text} (policy.admission)", after_s)
                return [*self._trace(request, decision, wanted, "refused: "), rejected]
        self._count(decision.kind, decision.reason)
        told = self._place(request, hashes, decision, cached.get(decision.prefill, 0), now)
        return [*self._trace(request, decision, wanted), told]

    def decide(self, request: Generate, wanted: Wanted, cached: Mapping[Address, int], now: float) -> Decision:
        """Somebody serves. Siblings go where the first of them went, and join its prefix there.

        `cached`: tokens of the prompt that a worker probably has, if any.
        """
        first = self.placed.get(request.group) if request.group is not None else None
        if first is not None and self._serves(first.decode):
            return Decision(first.decode, first.decode, "sibling", 0.0)
        sight = self.board.sight(cached, self.knobs.rho * wanted.tpot_s, self._serves, now)
        return route(sight, self.knobs, wanted)

    def cancel(self, message: Cancel) -> list[Effect]:
        placed = self.placed.get(message.id)
        if placed is None:
            return []
        ends = [placed.decode] if placed.source is None else [placed.decode, placed.source]
        return [Tell(end, message) for end in ends]

    def finished(self, sender: Address, id: RequestId, submission: int, now: float) -> None:
        placed = self.placed.get(id)
        if placed is None or placed.submission > submission:
            return
        if placed.decode == sender:
            del self.placed[id]
            if (member := self.workers.get(sender.incarnation)) is not None:
                member.end(now)
        elif placed.source == sender:
            placed.source = None  # handed over

    def give_back(self, source: Address, request: Generate, late: bool, now: float) -> list[Effect]:
        """A worker that leaves, or that is late, wants to be rid of a request. It stays there if nobody can take it."""
        placed = self.placed.get(request.id)
        if placed is not None and (placed.submission > request.submission or placed.decode != source):
            return []
        everybody = self.board.everybody(self._serves)
        if not late:
            to = move_target(everybody, source)
            return [self._move(request, source, to, now)] if to is not None else []
        wanted = _wanted(request)
        decision = relief(everybody, source, self.knobs, wanted)
        if decision is None:
            return []
        self._count(decision.kind, decision.reason)
        return [*self._trace(request, decision, wanted), self._move(request, source, decision.decode, now)]

    def _move(self, request: Generate, source: Address, to: Address, now: float) -> Effect:
        self.placed[request.id] = Placed(request.submission, to, source)
        taker = self.workers[to.incarnation]
        taker.submit(0, now)
        self.look_at(taker)
        self._sent(taker, split_hashes(request.hashes))
        return Tell(to, Submit(request, Route(source, to), self.term, moves=True))

    def _place(self, request: Generate, hashes: Sequence[Hash], decision: Decision, cached: int, now: float) -> Effect:
        self.placed[request.id] = Placed(request.submission, decision.decode)
        tokens = (len(request.prompt) + len(request.output)) // 4
        prefill, decode = self.workers[decision.prefill.incarnation], self.workers[decision.decode.incarnation]
        missing = tokens - cached
        decode.submit(missing if prefill is decode else 0, now)
        if prefill is not decode:
            prefill.expect(missing, now)
            self.look_at(prefill)
            self._sent(prefill, hashes)
        self.look_at(decode)
        self._sent(decode, hashes)
        return Tell(decision.decode, Submit(request, Route(decision.prefill, decision.decode), self.term))

    def _count(self, kind: str, reason: str) -> None:
        self.decisions[kind, reason] = self.decisions.get((kind, reason), 0) + 1

    def _trace(self, request: Generate, decision: Decision, wanted: Wanted, outcome: str = "") -> list[Effect]:
        if not self.config.debug.trace:
            return []
        return [Note("info", f"request {request.id.api}.{request.id.n}: {outcome}{explain(decision, wanted)}")]

    def _drain_s(self) -> float:
        """Until a request that waits has found a place: then another may wait."""
        ends = [member.between_ends_s for member in self.workers.values() if self._serves(member.address)]
        return max(0.1, 1 / sum(1 / max(between, 1e-3) for between in ends)) if ends else 1.0

    def _between_ends_s(self, worker: Address) -> float:
        return self.workers[worker.incarnation].between_ends_s

    # ------------------------------------------------------------------------------------ what routing sees

    def look_at(self, member: Member) -> None:
        """It, or what was routed to it, has changed."""
        view = member.view(self.pins.get(member.address, "any"))
        if view is not None:
            self.board.put(view, member.queued)

    def pin(self) -> None:
        """Members, or the knobs, have changed."""
        pins = pinned(self.knobs, [(member.address, member.info.role) for member in self.workers.values()])
        changed = [
            member for member in self.workers.values() if pins.get(member.address) != self.pins.get(member.address)
        ]
        self.pins = pins
        for member in changed:
            self.look_at(member)

    def steer(self, knobs: Knobs) -> None:
        self.knobs = knobs
        self.pin()

    def link(self, pair: Pair) -> None:
        """Pages can be pushed this way, once both ends are members."""
        prefill, decode = self.workers.get(pair.prefill.incarnation), self.workers.get(pair.decode.incarnation)
        if prefill is None or decode is None:
            return
        if pair.kind and not prefill.suspect:
            pool = decode.info.pool
            token_bytes = pool.layers * pool.page_bytes // decode.info.page_size
            self.board.link(Link(pair.prefill, pair.decode, pair.bytes_per_s, token_bytes, pool.layers))
        else:
            self.board.unlink(pair.prefill, pair.decode)

    def forget(self, incarnation: int, worker: Address | None) -> None:
        """This process is no more. What was to move to it is still where it was; what it was to give away comes again
        from its api.
        """
        if worker is not None:
            self.board.drop(worker)
            self.pin()
        for id, placed in list(self.placed.items()):
            if placed.source is not None and placed.source.incarnation == incarnation:
                placed.source = None
            if placed.decode.incarnation == incarnation and placed.source is not None:
                placed.decode, placed.source = placed.source, None
            elif placed.decode.incarnation == incarnation or id.api == incarnation:
                del self.placed[id]

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


def reject(api: Address, request: Generate, status: int, text: str, retry_after_s: float) -> Effect:
    return Tell(api, Rejected(request.id, request.submission, status, text, retry_after_s))


def _wanted(request: Generate) -> Wanted:
    return Wanted(
        (len(request.prompt) + len(request.output)) // 4,
        request.sampling.max_tokens - len(request.output) // 4,
        request.targets.ttft_s - request.age_s,
        request.targets.tpot_s,
    )
