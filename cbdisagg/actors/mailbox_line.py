"""The sending half of a mailbox: one line to each peer incarnation.

A line numbers what it sends, keeps what cannot leave yet, and notices when its connection ends: what was on the way
then is lost, and no later message would show it, if there is none (rule 6).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

from cbdisagg.actors.mailbox_place import Keys
from cbdisagg.config import ConfigError
from cbdisagg.messages import Address, Envelope, encode

MAX_MESSAGE_BYTES = 64 << 20
"""A frame longer than this is refused by the socket. The longest honest one is a prompt of a few million tokens."""


class Line:
    """The sending socket to one peer incarnation. Loop only. Life cycle: made -> `watch` -> `close`."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], to: Address, keys: Keys | None) -> None:
        self.to = to
        self._number = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_break: Callable[[Address], None] | None = None
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        if to.endpoint.startswith("tcp:"):
            self._encrypt(keys)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(to.endpoint)

    def send(self, sender: Address, body: bytes) -> None:
        """Queue one message; never waits. Raises ValueError if it is longer than the peer's socket takes."""
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {len(body)} bytes to {self.to.name}; at most {MAX_MESSAGE_BYTES} can be sent"
            )
        head = encode(Envelope(sender, self.to.incarnation, self._number))
        self._number += 1
        self._socket.send_multipart((head, body), zmq.NOBLOCK)

    def watch(self, loop: asyncio.AbstractEventLoop, on_break: Callable[[Address], None]) -> None:
        """Call `on_break(to)` each time the connection ends; what ended it before this call is told too."""
        self._loop, self._on_break = loop, on_break
        loop.add_reader(self._monitor.fileno(), self._look)
        loop.call_soon(self._look)  # the descriptor signals edges

    def close(self, linger_s: float = 0.0) -> None:
        """What is queued has `linger_s` to leave; closing the context waits for it."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._monitor.fileno())
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=int(linger_s * 1e3))

    def _look(self) -> None:
        assert self._on_break is not None
        while not self._monitor.closed:
            try:
                self._monitor.recv_multipart(zmq.NOBLOCK)  # of one kind only: the connection has ended
            except zmq.Again:
                return
            self._on_break(self.to)

    def _encrypt(self, keys: Keys | None) -> None:
        if keys is None or not self.to.public_key:
            self._socket.close()
            raise ConfigError(
                f"{self.to.name} at {self.to.endpoint} has to be reached by tcp, and there is no key for it"
            )
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, self.to.public_key.encode())
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
        self._socket.setsockopt(zmq.IPV6, int("[" in self.to.endpoint))
