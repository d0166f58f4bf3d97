"""Messages between processes: one socket that only receives, one that only sends per peer incarnation.

Knows sockets, frames and incarnations; knows no message's meaning. A message is two frames, `Envelope` and body. Sends
never wait and never fail: what is told to a dead or stopped peer is kept until `forget(incarnation)` names it dead.
Received messages come in the order sent, each pair of processes by itself; what is addressed to another incarnation,
what cannot be decoded, what came before and what a forgotten incarnation has still sent is dropped and changes nothing.

Messages between the living can be lost in one way, the end of a connection. The receiver sees it as a gap in the
numbers, if there is a later message; the sender sees that the connection has ended. Either tells its owner, once for
each incarnation (rule 6). The sender waits a little, for mostly it is the peer that has ended, and `forget` follows.

Life cycle: constructed and bound (others may tell it already) -> `start` delivers -> `close`. One thread, the loop's.

Why so: a ROUTER that sends drops messages to a slow peer, a DEALER with a high-water mark blocks, and ZeroMQ hands
what is queued for a dead peer to its successor on the same endpoint. So endpoints carry the incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import zmq

from cbdisagg.actors.mailbox_gate import Complaints, Gate
from cbdisagg.actors.mailbox_line import MAX_MESSAGE_BYTES, Line
from cbdisagg.actors.mailbox_place import Keys, Place, bracketed, read_keys
from cbdisagg.config import ConfigError
from cbdisagg.messages import Address, Envelope, Message, encode

__all__ = ["LAST_WORDS_S", "MAX_MESSAGE_BYTES", "Keys", "Mailbox", "Place", "Post", "read_keys"]

log = logging.getLogger(__name__)

M = TypeVar("M")

MAX_IPC_PATH = 107 - len(".data")
"""sockaddr_un of Linux holds 108 bytes, the last one zero; the socket for KV data lies beside, with this suffix."""
BURST = 256
"""Messages delivered before other work of the loop gets its turn."""
GRACE_S = 2.0
"""A connection has ended: for this long it may be because the peer has, of which those who know will tell."""
FORGOTTEN_KEPT = 1024
"""So many dead incarnations are refused by name. What an older one has sent came long ago: its connection has ended."""
LAST_WORDS_S = 1.0
"""What has been told before an end in order has this long to leave."""


class Post(Protocol):
    """What a shell needs of a mailbox: `Mailbox` in a process, `LocalMailbox` in tests."""

    def tell(self, to: Address, message: Message) -> None: ...


class Mailbox(Generic[M]):
    """The mailbox of one process. `decoder` is of the union of messages that may arrive here.

    Raises ConfigError when the place cannot be bound.
    """

    def __init__(self, name: str, incarnation: int, place: Place, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._incarnation = incarnation
        self._keys = place.keys if place.bind else None
        self._decoder = decoder
        self._envelopes = msgspec.msgpack.Decoder(Envelope)
        self._outgoing: dict[int, Line] = {}
        self._expected: dict[int, int] = {}  # sender incarnation -> number of its next message
        self._forgotten: dict[int, None] = {}  # in order of death
        self._receive: Callable[[Address, M], None] | None = None
        self._on_loss: Callable[[Address, str], None] | None = None
        self._grace: dict[int, asyncio.TimerHandle] = {}  # peer incarnation -> until its broken connection is told
        self._told_loss: set[int] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._complaints = Complaints()
        self._gate: Gate | None = None
        self._file: Path | None = None
        self._context = zmq.Context()
        self._inbox = self._context.socket(zmq.ROUTER)
        self._inbox.setsockopt(zmq.RCVHWM, 0)
        self._inbox.setsockopt(zmq.LINGER, 0)
        self._inbox.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        try:
            self._address = self._bind(name, place)
        except zmq.ZMQError as error:
            where = place.bind or place.folder
            self.close()
            raise ConfigError(f"the mailbox of {name} cannot listen at {where}: {error.strerror}") from error
        except ConfigError:
            self.close()
            raise

    @property
    def address(self) -> Address:
        return self._address

    def start(self, receive: Callable[[Address, M], None], on_loss: Callable[[Address, str], None]) -> None:
        """Deliver from the running loop: `receive(sender, message)`.

        `on_loss(peer, reason)`: messages from or to this incarnation, which is not known to be dead, may be lost.
        """
        self._receive, self._on_loss = receive, on_loss
        self._loop = asyncio.get_running_loop()
        if self._gate is not None:
            self._gate.start(self._loop)
        self._loop.add_reader(self._inbox.fileno(), self._drain)
        self._loop.call_soon(self._drain)  # the descriptor signals edges: what came before must be looked for
        for line in self._outgoing.values():
            line.watch(self._loop, self._broken)

    def tell(self, to: Address, message: Message) -> None:
        """Queue a message for one incarnation; silently nothing if that is forgotten or this mailbox is closed."""
        if to.incarnation in self._forgotten or self._context.closed:
            return
        line = self._outgoing.get(to.incarnation)
        if line is None:
            line = self._outgoing[to.incarnation] = Line(self._context, to, self._keys)
            if self._loop is not None:
                line.watch(self._loop, self._broken)
        line.send(self._address, encode(message))

    def forget(self, incarnation: int) -> None:
        """This incarnation is dead: drop what is queued for it and what it may still have sent."""
        self._forgotten[incarnation] = None
        if len(self._forgotten) > FORGOTTEN_KEPT:
            del self._forgotten[next(iter(self._forgotten))]
        self._told_loss.discard(incarnation)
        self._expected.pop(incarnation, None)
        if (timer := self._grace.pop(incarnation, None)) is not None:
            timer.cancel()
        if (line := self._outgoing.pop(incarnation, None)) is not None:
            line.close()

    def close(self, linger_s: float = 0.0) -> None:
        """Release the endpoint and drop what is queued, after `linger_s` at most to send it. Closing twice is fine."""
        if self._context.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._inbox.fileno())
        if self._gate is not None:
            self._gate.close()
        self._complaints.close()
        for timer in self._grace.values():
            timer.cancel()
        for line in self._outgoing.values():
            line.close(linger_s)
        self._inbox.close()
        self._context.term()
        if self._file is not None:
            self._file.unlink(missing_ok=True)  # libzmq leaves it behind

    def _bind(self, name: str, place: Place) -> Address:
        if not place.bind:
            path = place.folder / f"{name}.{self._incarnation}"
            if len(bytes(path)) > MAX_IPC_PATH:
                raise ConfigError(
                    f"{path} is too long for a socket ({MAX_IPC_PATH} bytes); set TMPDIR to a shorter folder"
                )
            self._inbox.bind(f"ipc://{path}")
            self._file = path
            return Address(name, self._incarnation, f"ipc://{path}")
        if place.keys is None:
            raise ConfigError(f"[cluster] bind = {place.bind!r} needs curve_keys: tcp is only used encrypted")
        self._gate = Gate(self._context, place.keys)
        self._inbox.setsockopt(zmq.CURVE_SERVER, 1)
        self._inbox.setsockopt(zmq.CURVE_PUBLICKEY, place.keys.public)
        self._inbox.setsockopt(zmq.CURVE_SECRETKEY, place.keys.secret)
        self._inbox.setsockopt(zmq.IPV6, int(":" in place.bind))
        port = self._inbox.bind_to_random_port(f"tcp://{bracketed(place.bind)}")
        endpoint = f"tcp://{bracketed(place.advertise or place.bind)}:{port}"
        return Address(name, self._incarnation, endpoint, place.keys.public.decode())

    def _drain(self) -> None:
        for _ in range(BURST):
            if self._inbox.closed:
                return
            try:
                frames = self._inbox.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._deliver(frames)
        assert self._loop is not None
        self._loop.call_soon(self._drain)

    def _deliver(self, frames: list[bytes]) -> None:
        assert self._receive is not None
        try:
            _, head, body = frames
            envelope = self._envelopes.decode(head)
            if envelope.addressee != self._incarnation or envelope.sender.incarnation in self._forgotten:
                return
            message = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._complaints.add(f"{self._address.name} dropped a message that it cannot read: {error}")
            return
        sender, number = envelope.sender, envelope.number
        expected = self._expected.get(sender.incarnation, 0)
        if number < expected:
            self._complaints.add(f"{self._address.name} dropped message {number} of {sender.name}: it came before")
            return
        self._expected[sender.incarnation] = number + 1
        if number > expected:
            self._lost(sender, f"messages of it were lost: {number} came instead of {expected}")
        self._receive(sender, message)

    def _broken(self, peer: Address) -> None:
        """Its end, or the connection's alone: soon known. What was on the way is lost, even if it connects again."""
        assert self._loop is not None
        if peer.incarnation not in self._grace:
            reason = f"its connection to {self._address.name} broke"
            self._grace[peer.incarnation] = self._loop.call_later(GRACE_S, self._lost, peer, reason)

    def _lost(self, peer: Address, reason: str) -> None:
        assert self._on_loss is not None
        if peer.incarnation not in self._told_loss:
            self._told_loss.add(peer.incarnation)
            self._on_loss(peer, reason)
