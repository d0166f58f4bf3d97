"""The mailbox's fake: all mailboxes in one process, delivery when the test says so.

A `Network` keeps one queue per (sender, addressee), as ZeroMQ does; messages pass through the codec, so a test sees
what a process would see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic

import msgspec

from cbdisagg.actors.mailbox import M
from cbdisagg.messages import Address, Message, encode


class Network:
    def __init__(self) -> None:
        self.inboxes: dict[int, Callable[[Address, bytes], None]] = {}
        self.queue: list[tuple[Address, int, bytes]] = []

    def deliver(self) -> None:
        """Until nothing is on its way any more; what is told to the dead is lost."""
        while self.queue:
            sender, incarnation, body = self.queue.pop(0)
            if (inbox := self.inboxes.get(incarnation)) is not None:
                inbox(sender, body)


class LocalMailbox(Generic[M]):
    def __init__(self, name: str, incarnation: int, network: Network, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self.address = Address(name, incarnation, f"local://{name}")
        self._network, self._decoder = network, decoder

    def start(self, receive: Callable[[Address, M], None], on_loss: Callable[[Address, str], None]) -> None:
        self._network.inboxes[self.address.incarnation] = lambda sender, body: receive(
            sender, self._decoder.decode(body)
        )

    def tell(self, to: Address, message: Message) -> None:
        self._network.queue.append((self.address, to.incarnation, encode(message)))

    def forget(self, incarnation: int) -> None:
        self._network.queue = [item for item in self._network.queue if item[1] != incarnation]

    def close(self) -> None:
        self._network.inboxes.pop(self.address.incarnation, None)
