"""Who else is there, as one worker knows it: apis, workers, tested pairs, the coordinator.

Learns from Members, which always come whole. A worker that was listed and no longer is, without being named dead, is a
suspect: it may still write. Evidence is being named dead, or having a successor: one is started only after the other
has been reaped.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cbdisagg.messages import RECEIVER_PLACED, Address, Members, Pair, WorkerInfo


@dataclass(slots=True)
class Change:
    joined: list[WorkerInfo] = field(default_factory=list)
    suspected: list[WorkerInfo] = field(default_factory=list)
    died: list[Address] = field(default_factory=list)


class Peers:
    """Keyed by incarnation: a restarted process is another peer."""

    def __init__(self, me: WorkerInfo) -> None:
        self.me = me
        self.coordinator: Address | None = None
        self.term = 0
        self.apis: dict[int, Address] = {}
        self.workers: dict[int, WorkerInfo] = {}  # listed now
        self.met: dict[int, WorkerInfo] = {}  # listed once, not known to be dead
        self.pairs: dict[int, Pair] = {}  # by the incarnation of the worker that pushes to us

    def update(self, members: Members) -> Change:
        self.term = max(self.term, members.term)
        self.apis = {api.incarnation: api for api in members.apis}
        listed = {w.address.incarnation: w for w in members.workers if w.address != self.me.address}
        change = Change(
            joined=[worker for n, worker in listed.items() if n not in self.met],
            suspected=[worker for n, worker in self.workers.items() if n not in listed],
        )
        self.workers = listed
        self.met |= listed
        dead = set(members.dead)
        newest = {worker.address.name: n for n, worker in listed.items()}
        for n, worker in list(self.met.items()):
            if (worker.address.name, n) in dead or n < newest.get(worker.address.name, 0):
                del self.met[n]
                self.pairs.pop(n, None)
                change.died.append(worker.address)
        change.suspected = [worker for worker in change.suspected if worker.address.incarnation in self.met]
        return change

    def is_dead(self, peer: Address) -> bool:
        """Not met: it has died, or this worker has not heard of it, and it will be told again."""
        return peer.incarnation not in self.met

    def paired(self, prefill: Address) -> bool:
        """May an attempt be given to this worker now?"""
        pair = self.pairs.get(prefill.incarnation)
        return pair is not None and bool(pair.kind) and prefill.incarnation in self.workers

    def serves(self, peer: Address) -> bool:
        """Listed now: neither dead nor suspected."""
        return peer.incarnation in self.workers

    def receiver_placed(self, prefill: Address) -> bool:
        return self.pairs[prefill.incarnation].kind in RECEIVER_PLACED

    def pushes_to(self, worker: WorkerInfo) -> bool:
        """Should this worker open a way to push pages to that one? To all that decode: prompts, and what moves."""
        return worker.fingerprint == self.me.fingerprint and worker.role != "prefill"
