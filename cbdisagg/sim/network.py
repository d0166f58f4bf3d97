"""Messages between processes, in virtual time: late by the latency of their pair, in order, lost with their addressee.

Knows who lives and on which host; not what a message says. Nothing is encoded: a message is its own copy, for it is
immutable. The latency of a pair is constant, so the clock's order keeps that of each pair.
"""

from __future__ import annotations

from typing import Protocol

from cbdisagg.messages import Address, Message
from cbdisagg.sim.clock import Clock


class Process(Protocol):
    """What receives. `host` decides which latency its messages have."""

    @property
    def address(self) -> Address: ...

    @property
    def host(self) -> str: ...

    def receive(self, sender: Address, message: Message) -> None: ...


class Network:
    """`near_s` within a host, `far_s` between hosts: from one core's effect to the other's event."""

    def __init__(self, clock: Clock, near_s: float, far_s: float) -> None:
        self._clock = clock
        self._near_s, self._far_s = near_s, far_s
        self._processes: dict[int, Process] = {}
        self.sent = 0

    def join(self, process: Process) -> None:
        self._processes[process.address.incarnation] = process

    def leave(self, process: Process) -> None:
        """What is on its way to it is lost, what it has sent still arrives."""
        del self._processes[process.address.incarnation]

    def send(self, sender: Process, to: Address, message: Message) -> None:
        receiver = self._processes.get(to.incarnation)
        if receiver is None:
            return
        self.sent += 1
        latency = self._near_s if sender.host == receiver.host else self._far_s
        self._clock.after(latency, self._arrive, sender.address, to.incarnation, message)

    def _arrive(self, sender: Address, incarnation: int, message: Message) -> None:
        receiver = self._processes.get(incarnation)
        if receiver is not None:
            receiver.receive(sender, message)
