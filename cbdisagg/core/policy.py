"""Where a request is prefilled and where it decodes: the decision, as a function of what workers predict of themselves.

All times in seconds, all lengths in tokens. No state: the same views and knobs give the same decision. Two predictions
lead to it: the TTFT on each worker that may prefill (queue + what is not cached, at the rate that worker has now + the
transfer), and the step of each worker that may decode, with this request in it, against the tightest TPOT there.

A request stays where it is prefilled if that step takes at most rho x TPOT, mixing pays (eta), and no worker that is
pinned to decode has room for it; else it is packed on the most loaded worker of which the first is true, pinned ones
first, so that others stay free for prompts. If it is true of none, it stays, or goes to the worker whose step is the
shortest if its own is pinned to prefill. With rho = 0 it always stays, unless its worker is pinned to prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, NamedTuple

from cbdisagg.core.forecast import prompts_before, prompts_s
from cbdisagg.core.pace import late_for_good
from cbdisagg.messages import Address, Forecast, Knobs, Role

HANDOVER_S = 0.002  # messages and scheduling of one hand-over; the bytes are counted apart
HOP_S = 0.0005  # until a request that is sent to a worker is seen there
GRID_S = 0.005
"""Predictions closer than this are equal: the load then decides."""
DOUBT = 0.2
"""By this part longer than predicted a prompt may wait for others. What it takes itself is known better."""
SHOWN = 3
"""So many of the routes that were not taken are told, if there are as many."""
GAIN = 0.8
"""A running request moves only to a worker whose step with it takes at most this part of the step that it leaves."""


def admissible(needed: int, available: int, running: int) -> bool:
    """May a request take `needed` pages now? One page of growth stays free for each running one."""
    return needed <= available - running if running else needed <= available


class Wanted(NamedTuple):
    """What a request asks for; `ttft_s` is what is left of its target."""

    tokens: int
    max_tokens: int
    ttft_s: float
    tpot_s: float


class Seat(NamedTuple):
    """What a request finds where it decodes: a step with it, the tightest TPOT there, a place, and so many others."""

    step_s: float
    limit_s: float
    fits: bool
    load: int


@dataclass(slots=True)  # never changed; but frozen, it takes four times as long to make, and each decision makes some
class View:
    """One worker as the coordinator sees it: its last Load, plus what was routed to it since.

    `pin`: the only phase that it does; "any": both. `sequences`: that it has taken, running or waiting; `streams`: that
    decode now. `place_s`: until a sequence has ended whose place a new one takes. `free_at`: from when on the
    `queued_tokens` of prompts are computed, in `queued_s`; `busy_to`: when the first step with some of them ends.
    `step_s`: a step with all sequences and one more, but for its context. `room`: tokens of KV. `packing`: a sort key,
    who decodes what others prefill rather than this one.
    """

    address: Address
    role: Role
    pin: Role
    sequences: int
    streams: int
    max_batch: int
    queued_tokens: int
    queued_s: float
    forecast: Forecast
    place_s: float
    free_at: float
    busy_to: float
    step_s: float
    room: int
    packing: tuple[bool, bool, float]

    def ttft_s(self, tokens: int, cached: int, now: float) -> float:
        """Until the first token of a prompt of which so many are cached here: from the next step on that has a place.

        Steps go on, whether it is heard of them or not.
        """
        queued, wait_s = prompts_before(
            self.forecast, self.queued_tokens, self.queued_s, self.free_at, self.streams, now + HOP_S
        )
        return self.place_s + HOP_S + wait_s + self._computed_s(queued, tokens, cached)

    def alone_s(self, tokens: int, cached: int) -> float:
        """The part of it that does not depend on other prompts, nor on when it comes."""
        return HOP_S + self._computed_s(0, tokens, cached)

    def _computed_s(self, queued: int, tokens: int, cached: int) -> float:
        """From the start of a step, behind so many queued tokens, until the client has its first one."""
        known = self.forecast
        squares = tokens * tokens - cached * cached
        return prompts_s(known, queued + tokens - cached) + known.square_s * squares + known.first_s

    @property
    def wait_s(self) -> float:
        """Until a prompt was begun that came when it was last heard."""
        return self.place_s + self.forecast.free_s + self.queued_s

    @property
    def idle(self) -> bool:
        return not (self.sequences or self.queued_tokens)

    def seat(self, wanted: Wanted) -> Seat:
        tokens, known, sequences = wanted.tokens, self.forecast, self.sequences
        tightest_s = known.tpot_s
        return Seat(
            self.step_s + known.context_s * tokens,
            tightest_s if 0 < tightest_s < wanted.tpot_s else wanted.tpot_s,
            sequences < self.max_batch and tokens <= self.room,
            sequences,
        )

    def keeps(self, wanted: Wanted, rho: float) -> bool:
        """It has a place, and its steps take at most `rho` of the tightest TPOT, with this request in them (`seat`)."""
        tokens, known = wanted.tokens, self.forecast
        step_s, tightest_s = self.step_s + known.context_s * tokens, known.tpot_s
        if step_s > rho * wanted.tpot_s or (tightest_s > 0 and step_s > rho * tightest_s):
            return False
        return self.sequences < self.max_batch and tokens <= self.room


def look(
    address: Address,
    role: Role,
    pin: Role,
    forecast: Forecast,
    free_at: float = 0.0,
    *,
    sequences: int,
    unseen: int,
    streams: int,
    max_batch: int,
    queued_tokens: int,
    room: int,
    between_ends_s: float,
) -> View:
    """A worker's view from its Load. `unseen`: sequences that its forecast does not know; `streams`: those that decode
    now; `between_ends_s`: seconds from one end of a sequence there to the next, lately.
    """
    lacking = max(0, sequences + 1 - max_batch)
    known = sequences - unseen
    joining = unseen + (1 if known else 0)  # a forecast for nobody is one for a first sequence
    queued_s = prompts_s(forecast, queued_tokens)
    step_s = forecast.step_s + joining * forecast.row_s
    return View(
        address=address,
        role=role,
        pin=pin,
        sequences=sequences,
        streams=streams,
        max_batch=max_batch,
        queued_tokens=queued_tokens,
        queued_s=queued_s,
        forecast=forecast,
        place_s=lacking * between_ends_s,
        free_at=free_at,
        busy_to=free_at + min(queued_s, forecast.full_s),
        step_s=step_s,
        room=room,
        packing=(pin != "decode", role == "prefill", -step_s),
    )


@dataclass(frozen=True, slots=True)
class Link:
    """A tested way from a prefill to a decode worker. `token_bytes`: KV bytes of one token, in all `layers`."""

    prefill: Address
    decode: Address
    bytes_per_s: float
    token_bytes: int
    layers: int = 1

    def seconds(self, tokens: int, computed_s: float) -> float:
        """What a hand-over adds. Pages go layer by layer while the prompt is computed, in `computed_s`: what is left of
        them then is the last layer, or by what the way is slower.
        """
        if not self.bytes_per_s:
            return HANDOVER_S
        pushed_s = tokens * self.token_bytes / self.bytes_per_s
        return HANDOVER_S + max(pushed_s / self.layers, pushed_s - computed_s)


@dataclass(frozen=True, slots=True)
class Sight:
    """Those on whom a decision may fall, in order of address; tokens of the prompt that some have; the ways between
    them; the instant.

    `links`: by decode, then by prefill worker, of more than these perhaps.
    """

    views: Sequence[View]
    cached: Mapping[Address, int]
    links: Mapping[Address, Mapping[Address, Link]]
    now: float = 0.0

    def ttft_s(self, view: View, tokens: int) -> float:
        return view.ttft_s(tokens, self.cached.get(view.address, 0) if self.cached else 0, self.now)


class Decision(NamedTuple):
    """A route, why it was taken, and what is predicted for it. `others`: of those not taken, the best.

    `step_s`: a step of the decode worker with the request in it, `limit_s`: the tightest TPOT there. `load`: the
    sequences that it has. `idle`: nobody else is there, so nothing will ever be better.
    """

    prefill: Address
    decode: Address
    reason: str
    ttft_s: float
    step_s: float = 0.0
    limit_s: float = float("inf")
    fits: bool = True
    load: int = 0
    idle: bool = False
    others: tuple[Decision, ...] = ()

    @property
    def kind(self) -> Literal["local", "remote"]:
        return "local" if self.prefill == self.decode else "remote"

    @property
    def breaks(self) -> bool:
        """Somebody there, or this request, would miss its TPOT, or there is no place."""
        return self.step_s > self.limit_s or not self.fits


class Way(NamedTuple):
    """A route that is possible. `first_s`: until the prefill worker has the first token; `link`: to another worker."""

    first_s: float
    prefill: View
    decode: View
    link: Link | None
    reason: str


_by_first_token, _by_packing = attrgetter("first_s"), attrgetter("packing")


def route(sight: Sight, knobs: Knobs, wanted: Wanted) -> Decision:
    """The workers for one request. `sight` holds at least one; ties go to the smaller load, then to the name.

    Routes are looked at in the order in which their prefills would be done, until no further one can be better.
    """
    views = sight.views
    prefillers = [view for view in views if view.pin != "decode"] or views
    decoders = [view for view in views if view.pin != "prefill"] or views
    if wanted.max_tokens == 1:
        ways = [Way(sight.ttft_s(view, wanted.tokens), view, view, None, "one-token") for view in prefillers]
    else:
        ways = _ways(prefillers, decoders, sight, knobs, wanted)
    ways.sort(key=_by_first_token)
    best, rank = None, (True, 0)
    others: list[Decision] = []
    for way in ways:
        if best is not None and len(others) >= SHOWN and not rank[0] and round(way.first_s / GRID_S) > rank[1]:
            break
        option = _decide(way, sight, wanted, knobs.gamma)
        its_rank = _rank(option)
        if best is None:
            best, rank = option, its_rank
        elif its_rank < rank or (its_rank == rank and _tie(option) < _tie(best)):
            others.append(best)
            best, rank = option, its_rank
        else:
            others.append(option)
    assert best is not None
    reason = best.reason
    if reason == "faster" and all(way.link is None for way in ways):
        reason = "colocated"
    return best._replace(reason=reason, others=tuple(others))


def move_target(sight: Sight, source: Address) -> Address | None:
    """Who takes over a request of `source`, which leaves: one that decodes, has a place, and can be pushed to."""
    others = [view for view in sight.views if view.address != source]
    decoders = [view for view in others if view.pin != "prefill" and view.role != "prefill"] or others
    best = min(
        decoders,
        key=lambda v: (
            v.sequences >= v.max_batch,
            source not in sight.links.get(v.address, {}),
            v.sequences,
            v.address.name,
        ),
        default=None,
    )
    return best.address if best is not None else None


def relief(sight: Sight, source: Address, knobs: Knobs, wanted: Wanted) -> Decision | None:
    """Who takes a running request off `source`, which is late: the most loaded that stays within rho x TPOT with it,
    whose steps are clearly shorter. None: it is better off where it is, which is the decision's only other.
    """
    here = next((view for view in sight.views if view.address == source), None)
    if here is None:
        return None
    stays = Decision(source, source, "stays", 0.0, here.forecast.step_s, here.seat(wanted).limit_s)
    others = [view for view in sight.views if view.pin != "prefill" and view.address != source]
    for view in _packed(others, wanted, knobs.rho):
        seat = view.seat(wanted)
        if seat.step_s <= GAIN * stays.step_s and source in sight.links.get(view.address, {}):
            return Decision(source, view.address, "relief", 0.0, *seat, others=(stays,))
    return None


def refusal(
    decision: Decision, alone_s: float, wanted: Wanted, between_ends_s: Callable[[Address], float]
) -> tuple[str, float] | None:
    """Why this request should not be let in, and after how many seconds it could be; None: it can be served in time.

    `alone_s`: what it would wait for its first token without other prompts. 0 seconds: never, for it would be late with
    the workers to itself.
    """
    late_s = decision.ttft_s - alone_s - (wanted.ttft_s - alone_s) / (1 + DOUBT)
    if late_s > 0:
        text, after_s = f"the first token would take {decision.ttft_s:.2g} s", late_s
    elif decision.breaks:
        text = f"tokens would take {decision.step_s * 1e3:.3g} ms each" if decision.fits else "no worker has room"
        after_s = max(GRID_S, between_ends_s(decision.decode))
    else:
        return None
    return (f"{text} even if nobody else were served", 0.0) if decision.idle else (text, after_s)


def explain(decision: Decision, wanted: Wanted) -> str:
    """One line for a reader: the route, the predictions for it, and the best of what was not taken."""
    others = sorted(decision.others, key=lambda other: other.ttft_s)[:SHOWN]
    taken = f"{_way(decision)} ({decision.reason}) for {wanted.tokens} + {wanted.max_tokens} tokens"
    targets = f"targets {wanted.ttft_s:.3g} s, {wanted.tpot_s * 1e3:.3g} ms"
    rest = "; ".join(f"{_way(other)} {_chances(other)}" for other in others)
    return f"{taken}: {_chances(decision)}; {targets}" + (f"; instead of {rest}" if rest else "")


def _way(decision: Decision) -> str:
    return decision.decode.name if decision.kind == "local" else f"{decision.prefill.name} > {decision.decode.name}"


def _chances(decision: Decision) -> str:
    """A running request has its first token, and what goes with its siblings is not predicted."""
    first = f"first token {decision.ttft_s:.3g} s, " if decision.ttft_s else ""
    full = "" if decision.fits else ", no room"
    return f"{first}steps {decision.step_s * 1e3:.3g} ms{full}"


def _why_not_local(view: View, is_fine: bool, others_decode: bool, good: Sequence[View], knobs: Knobs) -> str:
    """Empty: what is prefilled here may decode here. `is_fine`: it is one of the `good` ones; `others_decode`: so may
    somebody, as well as this one can, whose role it is rather.
    """
    if view.pin == "prefill":
        return "pinned"
    if not knobs.rho:
        return ""
    if view.role == "prefill" and others_decode:
        return "role"
    if not is_fine:
        return "packed"
    if good and good[0].pin == "decode" and view.pin != "decode":
        return "drawn"
    return "unpaid" if view.forecast.tpot_s and view.forecast.gain < knobs.eta else ""


def _packed(decoders: Sequence[View], wanted: Wanted, rho: float) -> list[View]:
    """Those that can decode it well: those pinned to it, then the most loaded. One of role prefill if no other can."""
    good = [view for view in decoders if view.keeps(wanted, rho)] if rho else []
    good.sort(key=_by_packing)
    return good


def _least_loaded(decoders: Sequence[View], wanted: Wanted) -> list[View]:
    able = [view for view in decoders if view.role != "prefill"] or list(decoders)

    def full(view: View) -> tuple[bool, float, Address]:
        seat = view.seat(wanted)
        return not seat.fits, seat.step_s, view.address

    return sorted(able, key=full)


def _way_to(prefill: View, decoders: Sequence[View], sight: Sight) -> tuple[View, Link] | None:
    """The first of these that it can push to, and the way there."""
    for view in decoders:
        links = sight.links.get(view.address)
        link = links.get(prefill.address) if links is not None else None
        if link is not None:
            return view, link
    return None


def _ways(
    prefillers: Sequence[View], decoders: Sequence[View], sight: Sight, knobs: Knobs, wanted: Wanted
) -> list[Way]:
    """For each that may prefill it, where it would decode then."""
    tokens = wanted.tokens
    good = _packed(decoders, wanted, knobs.rho)
    fine = {id(view) for view in good}  # views are equal if all that is in them is, which takes long to see
    roles = any(view.role != "prefill" for view in good), any(view.role != "prefill" for view in decoders)
    least: list[View] = []
    ways: list[Way] = []
    for view in prefillers:
        is_fine = id(view) in fine
        others_decode = roles[0] if is_fine else roles[1]
        why_not = _why_not_local(view, is_fine, others_decode, good, knobs)
        if not why_not:
            reason = "cached" if sight.cached.get(view.address) else "faster"
            ways.append(Way(sight.ttft_s(view, tokens), view, view, None, reason))
            continue
        if view.role == "decode" and view.pin == "any" and len(prefillers) > 1:
            continue  # it prefills what it decodes, and nothing else
        to = _way_to(view, good, sight)
        if to is None and why_not == "packed":
            ways.append(Way(sight.ttft_s(view, tokens), view, view, None, "overload"))
            continue
        if to is None:
            least = least or _least_loaded(decoders, wanted)
            to = _way_to(view, least, sight)
        if to is not None:
            ways.append(Way(sight.ttft_s(view, tokens), view, *to, why_not))
        elif view.pin != "prefill":
            ways.append(Way(sight.ttft_s(view, tokens), view, view, None, "no-way"))
    if not ways:  # nobody who prefills reaches anybody who decodes
        ways = [Way(sight.ttft_s(view, tokens), view, view, None, "no-way") for view in decoders]
    return ways


def _decide(way: Way, sight: Sight, wanted: Wanted, gamma: float) -> Decision:
    """What is predicted of it. What the decode worker lacks goes over the link; its place there is reserved before the
    prefill starts.
    """
    ttft_s, prefill, decode, link, reason = way
    seat = decode.seat(wanted)
    if link is None:
        return Decision(prefill.address, prefill.address, reason, ttft_s, *seat, prefill.idle)
    missing = max(1, wanted.tokens - sight.cached.get(decode.address, 0))
    ttft_s = decode.place_s + ttft_s + link.seconds(missing, missing * prefill.forecast.token_s)
    busy_s = decode.busy_to + decode.forecast.first_s - sight.now
    if ttft_s < busy_s:
        ttft_s = _held_s(ttft_s, busy_s, decode, seat.step_s, wanted, gamma)
    return Decision(prefill.address, decode.address, reason, ttft_s, *seat, prefill.idle and decode.idle)


def _held_s(ttft_s: float, busy_s: float, decode: View, step_s: float, wanted: Wanted, gamma: float) -> float:
    """When a first token is told that comes while a step runs there: at its end, where pace.py holds it back so long.

    `busy_s`: the end of the first step with prompts that wait; there may be one before it that runs now. What is held
    back for `targets.gap_ms` alone is not foretold.
    """
    runs_s = busy_s - (decode.busy_to - decode.free_at)
    ends_s = runs_s if ttft_s < runs_s else busy_s
    due_s = gamma * wanted.tpot_s
    held = late_for_good(ends_s + step_s - ttft_s, due_s, step_s, wanted.max_tokens - 2)
    return ends_s if held and ends_s <= wanted.ttft_s else ttft_s


def _rank(option: Decision) -> tuple[bool, int]:
    return option.breaks, round(option.ttft_s / GRID_S)


def _tie(option: Decision) -> tuple[int, Address, Address]:
    return option.load, option.decode, option.prefill
