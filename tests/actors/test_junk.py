"""Junk on every kind of internal socket: control and data, Unix socket and encrypted tcp. Whatever a stranger says, an
honest message gets through afterwards, nothing of what was said is delivered or run, and its descriptors come back.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import queue
import sys
import zlib
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Protocol

import msgspec
import psutil
import pytest
import zmq
import zmq.auth

from cbdisagg.actors.mailbox import MAX_MESSAGE_BYTES, Keys, Mailbox, Place, read_keys
from cbdisagg.config import Transfer as Settings
from cbdisagg.messages import (
    Address,
    AttemptId,
    Envelope,
    Finished,
    Probe,
    RequestId,
    Suspect,
    ToCoordinator,
    encode,
    pack,
)
from cbdisagg.transfer.boxes import BOX_BYTES, Box, Trial, encode_header
from cbdisagg.transfer.pool import create_pool
from cbdisagg.transfer.select import make_transfer

sys.path.insert(0, str(Path(__file__).parent))
from junk import Evil, dial, raw_junk, said

IDLE = 200
MAY_GROW = 100 << 20


class Target(Protocol):
    """One of our sockets, and how an honest peer uses it."""

    endpoint: str
    peer_kind: str

    async def works(self) -> None:
        """An honest message comes through, and nothing has come before it."""
        ...


class Line:
    """A ZeroMQ socket of a peer that may hold the key."""

    def __init__(self, kind: int, endpoint: str, keys: Keys | None) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(kind)
        self.socket.linger = 0
        if keys is not None:
            self.socket.curve_serverkey, self.socket.curve_publickey = keys.public, keys.public
            self.socket.curve_secretkey = keys.secret
        self.socket.connect(endpoint)

    def close(self) -> None:
        self._context.destroy(0)


class Control:
    """A mailbox. Each call of `works` is a new peer."""

    peer_kind = "DEALER"

    def __init__(self, place: Place) -> None:
        decoder: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)
        self.keys = place.keys
        self.mailbox = Mailbox[ToCoordinator]("box", 1, place, decoder)
        self.endpoint = self.mailbox.address.endpoint
        self.received: list[ToCoordinator] = []
        self.losses: list[tuple[Address, str]] = []
        self._come = asyncio.Event()
        self._peers = itertools.count(500)
        self.mailbox.start(self._receive, lambda *loss: self.losses.append(loss))

    def _receive(self, _: Address, message: ToCoordinator) -> None:
        self.received.append(message)
        self._come.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(20):
            while len(self.received) < count:
                self._come.clear()
                await self._come.wait()

    def line(self) -> Line:
        return Line(zmq.DEALER, self.endpoint, self.keys)

    def envelope(self, sender: int, number: int = 0) -> bytes:
        return encode(Envelope(Address("peer", sender, "ipc:///nowhere"), self.mailbox.address.incarnation, number))

    async def works(self) -> None:
        sender = next(self._peers)
        line = self.line()
        line.socket.send_multipart([self.envelope(sender), encode(Finished(RequestId(1, sender), 0, 1))])
        await self.until(1)
        assert self.received == [Finished(RequestId(1, sender), 0, 1)]
        assert not self.losses
        self.received.clear()
        line.close()

    def close(self) -> None:
        self.mailbox.close()


class Data:
    """The socket for KV of a worker. Each call of `works` is a new attempt of a sender whose self-test was seen."""

    peer_kind = "PUSH"

    def __init__(self, folder: Path, keys: Keys | None) -> None:
        public, self.keys = keys.public.decode() if keys else "", keys
        me = Address("w", 7, "tcp://127.0.0.1:1" if keys else f"ipc://{folder}/w", public)
        self.me, self.pool = me, create_pool(me, 2, 8, 512)
        self.landed: queue.SimpleQueue[AttemptId] = queue.SimpleQueue()
        self.transfer = make_transfer(
            Settings(),
            self.pool,
            me,
            "here",
            lambda *_: None,
            self.landed.put,
            on_broken=lambda *_: None,
            bind="127.0.0.1",
            secret_key=keys.secret.decode() if keys else "",
        )
        self.endpoint = self.transfer.info.data_endpoint
        self._attempts = itertools.count()
        line, pattern = self.line(), bytes(BOX_BYTES)
        line.socket.send_multipart([encode_header(Trial(5, me.incarnation, 0, 1, 0, 1)), pattern])
        probe = Probe("zmq", BOX_BYTES, zlib.crc32(pattern), 1.0)
        assert self.transfer.verify(Address("p", 5, ""), probe).kind == "zmq"
        line.close()

    def line(self) -> Line:
        return Line(zmq.PUSH, self.endpoint, self.keys)

    async def works(self) -> None:
        n = next(self._attempts)
        attempt = AttemptId(self.me.incarnation, RequestId(1, n), 1)
        self.transfer.expect(attempt, Address("p", 5, ""), (3,))
        wanted = self.pool.pages.copy()
        wanted[:, 3] = n % 256
        line = self.line()
        box = encode_header(Box(5, self.me.incarnation, attempt, 0, 2, pack([3])))
        line.socket.send_multipart([box, wanted[:, 3].tobytes()])
        assert await asyncio.to_thread(self.landed.get, timeout=20) == attempt
        assert (self.pool.pages == wanted).all()
        line.close()

    def close(self) -> None:
        self.transfer.close()
        self.pool.close()


@asynccontextmanager
async def opened(name: str, folder: Path) -> AsyncIterator[Any]:
    keys = None
    if name.endswith("tcp"):
        zmq.auth.create_certificates(folder, "cbdisagg")
        keys = read_keys(str(folder))
    if name.startswith("control"):
        target: Any = Control(Place(folder, "127.0.0.1" if keys else "", keys=keys))
    else:
        target = Data(folder, keys)
    try:
        yield target
    finally:
        target.close()


ALL = ("control-ipc", "control-tcp", "data-ipc", "data-tcp")


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def until_descriptors(count: int) -> None:
    """ZeroMQ closes in a thread of its own; pytest's time limit is the only clock."""
    while descriptors() > count:  # noqa: ASYNC110  # no event tells of a closed descriptor
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("name", ALL)
async def test_raw_junk_of_every_kind(name: str, tmp_path: Path) -> None:
    """Each is said on a connection that stays open while an honest message comes; then all are closed."""
    pwned = tmp_path / "pwned"
    async with opened(name, tmp_path) as target:
        await target.works()
        before, memory = descriptors(), psutil.Process().memory_info().rss
        with ExitStack() as lines:
            for data in raw_junk(target.peer_kind, pwned).values():
                lines.enter_context(await asyncio.to_thread(said(target.endpoint, data).__enter__))
                await target.works()
        assert psutil.Process().memory_info().rss - memory < MAY_GROW
        await until_descriptors(before)
    assert not pwned.exists()


@pytest.mark.parametrize("name", ALL)
async def test_hundreds_of_connections_that_say_nothing(name: str, tmp_path: Path) -> None:
    async with opened(name, tmp_path) as target:
        await target.works()
        before = descriptors()
        lines = [dial(target.endpoint) for _ in range(IDLE)]
        await target.works()
        for line in lines:
            line.close()
        await until_descriptors(before)


@pytest.mark.parametrize("name", ALL)
async def test_messages_that_are_none(name: str, tmp_path: Path) -> None:
    """From a peer that is let in: wrong numbers of frames, pickles, frames that are too long, bombs."""
    pwned = tmp_path / "pwned"
    evil = pickle.dumps(Evil(pwned))
    async with opened(name, tmp_path) as target, AsyncExitStack() as stack:
        await target.works()
        memory = psutil.Process().memory_info().rss
        lines = [target.line() for _ in range(2)]
        for line in lines:
            stack.callback(line.close)
        nested, wide = b"\x91" * 200_000 + b"\xc0", b"\xdd\xff\xff\xff\xff" + b"\x01" * 1000
        for frames in ([evil], [evil, evil], [b""] * 2, [b""] * 7, [nested, nested], [wide, wide], [b"\xc1", b"\xc1"]):
            lines[0].socket.send_multipart(frames)
        await target.works()
        lines[0].socket.send_multipart([b"\xc4", bytes(MAX_MESSAGE_BYTES + 1)])  # the socket hangs up
        lines[1].socket.send_multipart([evil] * 100)
        await target.works()
        assert psutil.Process().memory_info().rss - memory < MAY_GROW
    assert not pwned.exists()


async def test_a_good_envelope_around_a_body_made_to_hurt(tmp_path: Path) -> None:
    async with opened("control-ipc", tmp_path) as target:
        line, address = target.line(), target.mailbox.address
        good = encode(Finished(RequestId(1, 1), 0, 1))
        deep = bytes([good[0] + 1]) + good[1:] + b"\xa1x" + b"\x91" * 200_000 + b"\xc0"
        wide = bytes([good[0] + 1]) + good[1:] + b"\xa1x" + b"\xdd\xff\xff\xff\xff"
        for body in (deep, wide, good[:-1], pickle.dumps(Evil(tmp_path / "pwned")), encode(Envelope(address, 1, 0))):
            line.socket.send_multipart([target.envelope(400), body])
        foreign = encode(Envelope(Address("peer", 400, ""), address.incarnation - 1, 0))
        line.socket.send_multipart([foreign, good])
        await target.works()
        line.close()
    assert not (tmp_path / "pwned").exists()


async def test_what_an_older_incarnation_was_told_is_not_news_to_its_successor(tmp_path: Path) -> None:
    """The recorded traffic of one process, said again to the one that has taken its place, at the same endpoint."""
    async with opened("control-ipc", tmp_path) as target:
        line = target.line()
        for number in range(50):
            old = Envelope(Address("peer", 400, ""), target.mailbox.address.incarnation - 1, number)
            line.socket.send_multipart([encode(old), encode(Suspect("peer", 400, "recorded"))])
        await target.works()
        line.close()


async def test_what_a_living_peer_has_said_is_not_heard_twice(tmp_path: Path) -> None:
    """Its traffic is recorded and said again by a stranger: no message comes twice, and the peer does not suffer."""
    async with opened("control-ipc", tmp_path) as target:
        peer, stranger = target.line(), target.line()
        said = [[target.envelope(400, n), encode(Finished(RequestId(1, n), 0, 1))] for n in range(5)]
        for frames in said[:4]:
            peer.socket.send_multipart(frames)
        await target.until(4)
        for frames in said[:4] * 3:
            stranger.socket.send_multipart(frames)
        target.received.clear()
        await target.works()
        peer.socket.send_multipart(said[4])
        await target.until(1)
        assert target.received == [Finished(RequestId(1, 4), 0, 1)] and not target.losses
        peer.close()
        stranger.close()
