"""The mailbox of an api incarnation and the client behind it, in the HTTP server's process or in a user's own.

Knows who leads and whom that says to be dead; what streams are, the client knows. Looks after the client's clock.
Whose messages may be lost is reported (rule 6): a worker to the coordinator, the coordinator to the supervisor.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from cbdisagg.actors.blame import Blame
from cbdisagg.actors.mailbox import Mailbox, Place
from cbdisagg.api.client import TICK_S, Client
from cbdisagg.config import Config
from cbdisagg.messages import Address, Lead, Members, Suspect, ToApi
from cbdisagg.prepare import served_name


class Inbox:
    """`changed` is called after each message; `on_new_leader` when another coordinator than the first one leads: it,
    and whoever else has been started anew, may go by settings that have been read again.

    `max_len` is done once a worker has said how long a request may be.

    Raises ConfigError when the place cannot be bound.
    """

    def __init__(
        self, name: str, incarnation: int, place: Place, config: Config, changed: Callable[[], None] = lambda: None
    ) -> None:
        decoder: msgspec.msgpack.Decoder[ToApi] = msgspec.msgpack.Decoder(ToApi)
        self.mailbox = Mailbox(name, incarnation, place, decoder)
        self.client = Client(
            incarnation,
            self.mailbox.tell,
            model=served_name(config.model),
            page_size=config.kv.page_size,
            resume_s=config.limits.resume_s,
            silent_s=config.policy.silent_s,
        )
        self._loop = asyncio.get_running_loop()
        self.max_len: asyncio.Future[int] = self._loop.create_future()
        self.on_new_leader: Callable[[], None] = lambda: None
        self._changed = changed
        self._coordinator: Address | None = None
        self._supervisor: Address | None = None
        self._blame = Blame()
        self._timer = self._loop.call_later(TICK_S, self._tick)
        self.mailbox.start(self._receive, self._lost)

    def close(self) -> None:
        self._timer.cancel()
        self.mailbox.close()

    def _receive(self, sender: Address, message: ToApi) -> None:
        if isinstance(message, Members):
            for _, incarnation in message.dead:
                self.mailbox.forget(incarnation)
            for suspect in self._blame.again(message):
                self.mailbox.tell(sender, suspect)
            if message.workers and not self.max_len.done():
                self.max_len.set_result(min(info.max_len for info in message.workers))
        elif isinstance(message, Lead):
            if self._coordinator is not None and self._coordinator != message.coordinator:
                self.mailbox.forget(self._coordinator.incarnation)
                self.on_new_leader()
            self._coordinator, self._supervisor = message.coordinator, sender
            for suspect in self._blame.all():
                self.mailbox.tell(message.coordinator, suspect)
        self.client.receive(sender, message)
        self._changed()

    def _tick(self) -> None:
        self.client.tick()
        self._timer = self._loop.call_later(TICK_S, self._tick)

    def _lost(self, peer: Address, reason: str) -> None:
        blamed = Suspect(peer.name, peer.incarnation, reason)
        to = self._supervisor if peer == self._coordinator else self._coordinator
        if peer not in (self._coordinator, self._supervisor):
            self._blame.add(blamed)
        if to is not None and peer != self._supervisor:  # whose end would be ours too
            self.mailbox.tell(to, blamed)
