"""The decode worker's half of a hand-over: what it has reserved for which attempt of which prefill worker.

Knows attempts, not tokens. Life of a reservation:
    open: pages reserved with the attempt as their writer, Prefill sent
      -> complete: KvReady and, where the receiver places the data, Landed have both come: the writer settles
         (with debug.invariants once the pages have been compared with their checksums)
      -> held: complete, but its first token is told at the end of the step that runs: then the writer settles
      -> declined: the prefill worker will not do it: the writer settles, the request is computed in the same pages
      -> lost: the prefill worker is known to be dead: as declined
      -> abandoned: the request has ended or moved on; StopPush sent; its pages stay quarantined until PushStopped
         or the prefill worker's death settles them
Messages of unknown attempts are stale, and normal: they change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from cbdisagg.core.blocks import Pages
from cbdisagg.core.effects import Check, Effect, Expect, Forget, Tell
from cbdisagg.core.request import Request
from cbdisagg.messages import Address, AttemptId, Generate, KvReady, Page, Prefill, StopPush, pack


@dataclass(slots=True)
class Reservation:
    """`request` is None once it was abandoned. `pages`: what is to be written, from `first_page` of the sequence on.

    `receiver_placed`: data and KvReady travel apart. `held`: it lands at the end of the step that runs.
    """

    prefill: Address
    request: Request | None
    pages: tuple[Page, ...]
    receiver_placed: bool
    ready: KvReady | None = None
    landed: bool = False
    held: bool = False

    @property
    def complete(self) -> bool:
        if self.ready is None:
            return False
        without_data = self.ready.moved is not None and not self.ready.moved.computed
        return self.landed or not self.receiver_placed or without_data


class Handoffs:
    def __init__(self, pages: Pages, incarnation: int) -> None:
        self.pages = pages
        self.incarnation = incarnation
        self.reservations: dict[AttemptId, Reservation] = {}
        self._attempts = 0

    def next_attempt(self, request: Request) -> AttemptId:
        """Never given before, not even to an earlier submission of the same request."""
        self._attempts += 1
        return AttemptId(self.incarnation, request.spec.id, self._attempts)

    def open(self, request: Request, hit: int, prefill: Address, receiver_placed: bool, spec: Generate) -> list[Effect]:
        """Its pages from `hit` on are reserved, with `request.attempt` as their writer: ask `prefill` to fill them."""
        attempt, wanted = request.attempt, tuple(request.pages[hit:])
        assert attempt is not None
        self.reservations[attempt] = Reservation(prefill, request, wanted, receiver_placed)
        return [
            Expect(attempt, prefill, wanted),
            Tell(prefill, Prefill(attempt, spec, hit, pack(wanted), request.moves)),
        ]

    def open_without_data(self, request: Request, source: Address, spec: Generate) -> list[Effect]:
        """There is no way to push from `source`, which runs this request: it is to give up the request alone."""
        attempt = request.attempt
        assert attempt is not None
        self.reservations[attempt] = Reservation(source, request, (), False)
        return [Tell(source, Prefill(attempt, spec, 0, b"", moves=True))]

    def writes(self, peer: Address, attempt: AttemptId) -> bool:
        """Is this the worker that the attempt was given to, and is it not over?"""
        reservation = self.reservations.get(attempt)
        return reservation is not None and reservation.prefill == peer

    def kv_ready(self, message: KvReady) -> Reservation | None:
        """The reservation, if this completes it."""
        reservation = self._current(message.attempt)
        if reservation is None or reservation.ready is not None:
            return None
        reservation.ready = message
        return reservation if reservation.complete else None

    def landed(self, attempt: AttemptId) -> Reservation | None:
        """The reservation, if this completes it."""
        reservation = self._current(attempt)
        if reservation is None:
            return None
        reservation.landed = True
        return reservation if reservation.complete else None

    def checks(self, reservation: Reservation) -> list[Effect]:
        """With checksums, a complete reservation waits for Checked; without, there is nothing to do."""
        ready = reservation.ready
        if ready is None or not ready.checksums:
            return []
        return [Check(ready.attempt, reservation.pages, ready.checksums)]

    def held(self) -> list[Reservation]:
        """Those that land at the end of the step that runs, also for requests that have ended meanwhile."""
        return [reservation for reservation in self.reservations.values() if reservation.held]

    def abandon(self, request: Request) -> list[Effect]:
        """The request no longer wants it. Call before its pages are released."""
        attempt, request.attempt = request.attempt, None
        assert attempt is not None
        reservation = self.reservations[attempt]
        reservation.request = None
        return [Forget(attempt), Tell(reservation.prefill, StopPush(attempt))]

    def settle(self, attempt: AttemptId) -> tuple[Request | None, list[Effect]]:
        """Nobody will write for this attempt any more. The request that still wants its pages, if any."""
        reservation = self.reservations.pop(attempt, None)
        if reservation is None:
            return None, []
        self.pages.settle(attempt)
        if reservation.request is not None:
            reservation.request.attempt = None
        return reservation.request, [Forget(attempt)]

    def of(self, prefill_incarnation: int) -> list[AttemptId]:
        """The attempts that one incarnation of a prefill worker is, or may be, writing for."""
        return [a for a, r in self.reservations.items() if r.prefill.incarnation == prefill_incarnation]

    def waiting(self) -> int:
        """Requests that hold a reservation."""
        return sum(1 for reservation in self.reservations.values() if reservation.request is not None)

    def _current(self, attempt: AttemptId) -> Reservation | None:
        reservation = self.reservations.get(attempt)
        return reservation if reservation is not None and reservation.request is not None else None
