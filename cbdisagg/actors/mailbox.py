"""Messages between processes: one socket that only receives, one that only sends per peer incarnation.

Knows sockets, frames and incarnations; knows no message's meaning. A message is two frames, `Envelope` and body. Sends
never wait and never fail: what is told to a dead or stopped peer is kept until `forget(incarnation)` names it dead.
Received messages come in the order sent, each pair of processes by itself; what is addressed to another incarnation,
what cannot be decoded and what a forgotten incarnation has still sent is dropped and changes nothing.

Life cycle: constructed and bound (others may tell it already) -> `start` delivers -> `close`. One thread, the loop's.

Why so: a ROUTER that sends drops messages to a slow peer, a DEALER with a high-water mark blocks, and ZeroMQ hands
what is queued for a dead peer to its successor on the same endpoint. So endpoints carry the incarnation.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import zmq
import zmq.auth
from zmq.utils import z85

from cbdisagg.config import Cluster, ConfigError
from cbdisagg.messages import Address, Envelope, Message, encode

log = logging.getLogger(__name__)

M = TypeVar("M")

MAX_MESSAGE_BYTES = 64 << 20
"""A frame longer than this is refused by the socket. The longest honest one is a prompt of a few million tokens."""
MAX_IPC_PATH = 107 - len(".data")
"""sockaddr_un of Linux holds 108 bytes, the last one zero; the socket for KV data lies beside, with this suffix."""
BURST = 256
"""Messages delivered before other work of the loop gets its turn."""
COMPLAINT_S = 1.0
"""Between two lines of the log about what strangers send."""


class Post(Protocol):
    """What an actor needs of a mailbox besides what arrives: `Mailbox` in a process, `LocalMailbox` in tests."""

    @property
    def address(self) -> Address: ...

    def tell(self, to: Address, message: Message) -> None: ...

    def forget(self, incarnation: int) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Keys:
    """The CURVE key pair that all processes of one service share (Z85 text)."""

    public: bytes
    secret: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Place:
    """Where mailboxes bind: Unix sockets in `folder` (private, 0700), or tcp at the IP address `bind` with `keys`.

    `advertise` is the address that peers use to reach `bind`; empty means the same.
    """

    folder: Path
    bind: str = ""
    advertise: str = ""
    keys: Keys | None = None

    @classmethod
    def of(cls, cluster: Cluster, folder: Path) -> Place:
        """Raises ConfigError when tcp is asked for without a readable key pair."""
        if not cluster.bind:
            return cls(folder)
        return cls(folder, cluster.bind, cluster.advertise, read_keys(cluster.curve_keys))


def read_keys(folder: str) -> Keys:
    """The pair `cbdisagg.key`, `cbdisagg.key_secret` in `folder` (as `zmq.auth.create_certificates` writes it)."""
    if not folder:
        raise ConfigError("[cluster] bind is set, so curve_keys is needed: messages cross a network only encrypted")
    path = Path(folder) / "cbdisagg.key_secret"
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError(f"[cluster] curve_keys = {folder!r}: cannot read {path.name}: {error}") from error
    if secret is None:
        raise ConfigError(f"[cluster] curve_keys = {folder!r}: {path.name} holds no secret key")
    return Keys(public, secret)


class Mailbox(Generic[M]):
    """The mailbox of one process. `decoder` is of the union of messages that may arrive here.

    Raises ConfigError when the place cannot be bound.
    """

    def __init__(self, name: str, incarnation: int, place: Place, decoder: msgspec.msgpack.Decoder[M]) -> None:
        self._incarnation = incarnation
        self._keys = place.keys if place.bind else None
        self._decoder = decoder
        self._envelopes = msgspec.msgpack.Decoder(Envelope)
        self._outgoing: dict[int, _Line] = {}
        self._expected: dict[int, int] = {}  # sender incarnation -> number of its next message
        self._forgotten: set[int] = set()
        self._receive: Callable[[Address, M], None] | None = None
        self._on_gap: Callable[[Address], None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._complaints = Complaints()
        self._gate: _Gate | None = None
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

    def start(self, receive: Callable[[Address, M], None], on_gap: Callable[[Address], None]) -> None:
        """Deliver from the running loop: `receive(sender, message)`, and `on_gap(sender)` if messages were lost."""
        self._receive, self._on_gap = receive, on_gap
        self._loop = asyncio.get_running_loop()
        if self._gate is not None:
            self._gate.start(self._loop)
        self._loop.add_reader(self._inbox.fileno(), self._drain)
        self._loop.call_soon(self._drain)  # the descriptor signals edges: what came before must be looked for

    def tell(self, to: Address, message: Message) -> None:
        """Queue a message for one incarnation; silently nothing if that is forgotten or this mailbox is closed."""
        if to.incarnation in self._forgotten or self._context.closed:
            return
        line = self._outgoing.get(to.incarnation)
        if line is None:
            line = self._outgoing[to.incarnation] = _Line(self._context, to, self._keys)
        line.send(self._address, encode(message))

    def forget(self, incarnation: int) -> None:
        """This incarnation is dead: drop what is queued for it and what it may still have sent."""
        self._forgotten.add(incarnation)
        self._expected.pop(incarnation, None)
        if (line := self._outgoing.pop(incarnation, None)) is not None:
            line.close()

    def close(self) -> None:
        """Drop what is queued and release the endpoint. Closing twice is fine."""
        if self._context.closed:
            return
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._inbox.fileno())
        if self._gate is not None:
            self._gate.close()
        self._complaints.close()
        for line in self._outgoing.values():
            line.close()
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
        self._gate = _Gate(self._context, place.keys)
        self._inbox.setsockopt(zmq.CURVE_SERVER, 1)
        self._inbox.setsockopt(zmq.CURVE_PUBLICKEY, place.keys.public)
        self._inbox.setsockopt(zmq.CURVE_SECRETKEY, place.keys.secret)
        self._inbox.setsockopt(zmq.IPV6, int(":" in place.bind))
        port = self._inbox.bind_to_random_port(f"tcp://{_bracketed(place.bind)}")
        endpoint = f"tcp://{_bracketed(place.advertise or place.bind)}:{port}"
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
        assert self._receive is not None and self._on_gap is not None
        try:
            _, head, body = frames
            envelope = self._envelopes.decode(head)
            if envelope.addressee != self._incarnation or envelope.sender.incarnation in self._forgotten:
                return
            message = self._decoder.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            self._complaints.add(f"{self._address.name} dropped a message that it cannot read: {error}")
            return
        expected = self._expected.get(envelope.sender.incarnation, 0)
        self._expected[envelope.sender.incarnation] = envelope.number + 1
        if envelope.number != expected:
            log.warning("%s lost messages of %s: %d came instead of %d", self._address.name, *_gap(envelope, expected))
            self._on_gap(envelope.sender)
        self._receive(envelope.sender, message)


class Complaints:
    """Warnings that strangers can cause: the first at once, then for each second one line with a count. Loop only."""

    def __init__(self) -> None:
        self._more = 0
        self._last = ""
        self._timer: asyncio.TimerHandle | None = None

    def add(self, line: str) -> None:
        if self._timer is None:
            log.warning(line)
            self._timer = asyncio.get_running_loop().call_later(COMPLAINT_S, self._sum_up)
        else:
            self._more, self._last = self._more + 1, line

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._tell()

    def _sum_up(self) -> None:
        quiet = not self._more
        self._tell()
        self._timer = None if quiet else asyncio.get_running_loop().call_later(COMPLAINT_S, self._sum_up)

    def _tell(self) -> None:
        if self._more:
            log.warning("%d more like this: %s", self._more, self._last)
            self._more = 0


class _Line:
    """The sending socket to one peer incarnation, and the number of its next message."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], to: Address, keys: Keys | None) -> None:
        self._to = to
        self._number = 0
        self._socket = context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 0)
        if to.endpoint.startswith("tcp:"):
            if keys is None or not to.public_key:
                raise ConfigError(f"{to.name} at {to.endpoint} has to be reached by tcp, and there is no key for it")
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, to.public_key.encode())
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret)
            self._socket.setsockopt(zmq.IPV6, int("[" in to.endpoint))
        self._socket.connect(to.endpoint)

    def send(self, sender: Address, body: bytes) -> None:
        if len(body) > MAX_MESSAGE_BYTES:
            raise ValueError(
                f"a message of {len(body)} bytes to {self._to.name}; at most {MAX_MESSAGE_BYTES} can be sent"
            )
        head = encode(Envelope(sender, self._to.incarnation, self._number))
        self._number += 1
        self._socket.send_multipart((head, body), zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close()


class _Gate:
    """Lets in only who holds the service's own key pair: the ZAP handler (ZeroMQ RFC 27) of the mailbox's context."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self._allowed = z85.decode(keys.public)
        self._socket = context.socket(zmq.REP)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind("inproc://zeromq.zap.01")
        self._complaints = Complaints()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        loop.add_reader(self._socket.fileno(), self._answer)
        loop.call_soon(self._answer)

    def close(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._socket.fileno())
        self._complaints.close()
        self._socket.close()

    def _answer(self) -> None:
        while not self._socket.closed:
            try:
                version, request, _domain, address, _identity, mechanism, *credentials = self._socket.recv_multipart(
                    zmq.NOBLOCK
                )
            except zmq.Again:
                return
            ok = mechanism == b"CURVE" and credentials == [self._allowed]
            if not ok:
                who = address.decode(errors="replace")
                self._complaints.add(f"refused a connection from {who}: it does not hold the service's key")
            status = (b"200", b"OK") if ok else (b"400", b"unknown key")
            self._socket.send_multipart((version, request, *status, b"", b""))


def _bracketed(ip: str) -> str:
    return f"[{ip}]" if ":" in ip else ip


def _gap(envelope: Envelope, expected: int) -> tuple[str, int, int]:
    return envelope.sender.name, envelope.number, expected
