"""The mailbox over real ZeroMQ: order, gaps, incarnations, junk, peers that are dead or stopped, CURVE."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.auth

from cbdisagg.actors.mailbox import MAX_MESSAGE_BYTES, Keys, Mailbox, Place, read_keys
from cbdisagg.config import Cluster, ConfigError
from cbdisagg.messages import Address, Envelope, Finished, RequestId, Suspect, ToCoordinator, encode

DECODER: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)


class Box:
    """A started mailbox that keeps what arrives and lets a test wait for it."""

    def __init__(self, name: str, incarnation: int, place: Place) -> None:
        self.mailbox = Mailbox[ToCoordinator](name, incarnation, place, DECODER)
        self.received: list[tuple[Address, ToCoordinator]] = []
        self.gaps: list[Address] = []
        self._changed = asyncio.Event()
        self.mailbox.start(self._receive, self.gaps.append)

    def _receive(self, sender: Address, message: ToCoordinator) -> None:
        self.received.append((sender, message))
        self._changed.set()

    async def until(self, count: int) -> list[ToCoordinator]:
        async with asyncio.timeout(20):
            while len(self.received) < count:
                self._changed.clear()
                await self._changed.wait()
        return [message for _, message in self.received]


@asynccontextmanager
async def boxes(*places: Place) -> AsyncIterator[list[Box]]:
    opened = [Box(f"box-{n}", n + 1, place) for n, place in enumerate(places)]
    try:
        yield opened
    finally:
        for box in opened:
            box.mailbox.close()


def finished(n: int) -> Finished:
    return Finished(RequestId(7, n), 0, n)


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    zmq.auth.create_certificates(tmp_path, "cbdisagg")
    return read_keys(str(tmp_path))


async def test_messages_arrive_in_order_from_each_sender(place: Place) -> None:
    async with boxes(place, place, place) as (inbox, one, two):
        for n in range(500):
            one.mailbox.tell(inbox.mailbox.address, finished(n))
            two.mailbox.tell(inbox.mailbox.address, finished(n))
        await inbox.until(1000)
        for peer in (one, two):
            assert [m for s, m in inbox.received if s == peer.mailbox.address] == [finished(n) for n in range(500)]
        assert not inbox.gaps


async def test_what_was_told_before_start_is_delivered(place: Place) -> None:
    late = Mailbox[ToCoordinator]("late", 9, place, DECODER)
    async with boxes(place) as (peer,):
        peer.mailbox.tell(late.address, finished(1))
        got = asyncio.get_running_loop().create_future()
        late.start(lambda sender, message: got.set_result((sender, message)), lambda sender: None)
        assert await asyncio.wait_for(got, 10) == (peer.mailbox.address, finished(1))
    late.close()


async def test_another_incarnation_is_not_mistaken_for_this_one(place: Place) -> None:
    async with boxes(place, place) as (inbox, peer):
        older = inbox.mailbox.address._replace(incarnation=77)  # same endpoint, as if the process had been replaced
        peer.mailbox.tell(older, finished(1))
        peer.mailbox.tell(inbox.mailbox.address, finished(2))
        assert await inbox.until(1) == [finished(2)]


class Wire:
    """A bare DEALER that can say anything."""

    def __init__(self, to: Address) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(to.endpoint)

    def say(self, to: Address, number: int, body: bytes, sender: int = 500) -> None:
        envelope = Envelope(Address("wire", sender, "ipc:///nowhere"), to.incarnation, number)
        self.socket.send_multipart([encode(envelope), body])

    def close(self) -> None:
        self.socket.close()
        self._context.term()


@pytest.fixture
def wire() -> Callable[[Address], Wire]:
    return Wire


async def test_a_gap_in_the_numbers_is_reported_once(place: Place, wire: Callable[[Address], Wire]) -> None:
    async with boxes(place) as (inbox,):
        line = wire(inbox.mailbox.address)
        for number in (0, 1, 4, 5):
            line.say(inbox.mailbox.address, number, encode(finished(number)))
        assert await inbox.until(4) == [finished(n) for n in (0, 1, 4, 5)]
        assert [sender.incarnation for sender in inbox.gaps] == [500]
        line.close()


async def test_junk_changes_nothing(
    place: Place, wire: Callable[[Address], Wire], caplog: pytest.LogCaptureFixture
) -> None:
    """Random frames, cut and flipped honest ones, wrong unions, deep nesting, too many frames, and one too long."""
    rng = random.Random(0)
    async with boxes(place) as (inbox,):
        address = inbox.mailbox.address
        line = wire(address)
        honest = [encode(Envelope(Address("wire", 500, "x"), address.incarnation, 0)), encode(finished(0))]
        line.say(address, 0, encode(Suspect("a", 1, "b"))[:-1])
        line.say(address, 0, b"\x91" * 100_000 + b"\xc0")
        line.socket.send_multipart([honest[0]])
        line.socket.send_multipart([*honest, b"more"])
        for _ in range(2000):
            frames = [rng.randbytes(rng.randrange(60)) for _ in range(rng.randrange(1, 5))]
            line.socket.send_multipart(frames)
            cut = honest[1][: rng.randrange(len(honest[1]))]
            line.socket.send_multipart([honest[0], cut])
        line.say(address, 0, encode(finished(0)))
        assert await inbox.until(1) == [finished(0)]
        line.socket.send_multipart([honest[0], bytes(MAX_MESSAGE_BYTES + 1)])  # the socket hangs up on this sender
        other = wire(address)
        other.say(address, 0, encode(finished(1)), sender=501)
        assert await inbox.until(2) == [finished(0), finished(1)]
        assert not inbox.gaps
        line.close()
        other.close()
    told = [record.message for record in caplog.records if "cannot read" in record.message]
    assert 2 <= len(told) < 100, "one line per second, not one for each of thousands"
    counted = sum(int(text.split()[0]) for text in told if "more like this" in text)
    assert counted > 2000


async def test_neither_a_stopped_nor_a_dead_peer_holds_up_the_sender(place: Place) -> None:
    """10,000 messages to one that never reads and to one that is gone; a living peer gets its own all the while."""
    stopped = Mailbox[ToCoordinator]("stopped", 50, place, DECODER)
    gone = Address("gone", 51, f"ipc://{place.folder}/gone.51")
    async with boxes(place, place) as (sender, alive):
        for n in range(10_000):
            sender.mailbox.tell(stopped.address, finished(n))
            sender.mailbox.tell(gone, finished(n))
        sender.mailbox.tell(alive.mailbox.address, finished(0))
        assert await alive.until(1) == [finished(0)]

        received: list[ToCoordinator] = []
        whole = asyncio.Event()

        def receive(_: Address, message: ToCoordinator) -> None:
            received.append(message)
            if len(received) == 10_000:
                whole.set()

        stopped.start(receive, lambda _: None)
        await asyncio.wait_for(whole.wait(), 20)
        assert received == [finished(n) for n in range(10_000)]  # nothing was lost for having waited
    stopped.close()


async def test_a_forgotten_incarnation_gets_and_gives_nothing(place: Place) -> None:
    async with boxes(place, place, place) as (inbox, dead, alive):
        inbox.mailbox.forget(dead.mailbox.address.incarnation)
        dead.mailbox.tell(inbox.mailbox.address, finished(1))
        inbox.mailbox.tell(dead.mailbox.address, finished(2))
        alive.mailbox.tell(dead.mailbox.address, finished(3))
        assert await dead.until(1) == [finished(3)]
        alive.mailbox.tell(inbox.mailbox.address, finished(4))
        assert await inbox.until(1) == [finished(4)]
        assert not inbox.gaps


async def test_closing_leaves_no_socket_file(place: Place) -> None:
    async with boxes(place, place) as (one, two):
        one.mailbox.tell(two.mailbox.address, finished(0))
        await two.until(1)
    one.mailbox.tell(two.mailbox.address, finished(1))  # telling after the close is a no-op, not an error
    assert list(place.folder.iterdir()) == []


def test_a_path_too_long_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too long for a socket"):
        Mailbox("name", 1, Place(tmp_path / ("x" * 120)), DECODER)


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mailbox of name cannot listen at .*missing: No such file"):
        Mailbox("name", 1, Place(tmp_path / "missing"), DECODER)


def test_tcp_without_keys_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="curve_keys"):
        Mailbox("name", 1, Place(tmp_path, bind="127.0.0.1"), DECODER)
    with pytest.raises(ConfigError, match="curve_keys"):
        Place.of(Cluster(bind="127.0.0.1"), tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read cbdisagg\.key_secret"):
        Place.of(Cluster(bind="127.0.0.1", curve_keys=str(tmp_path)), tmp_path)


async def test_the_holders_of_the_key_talk_over_tcp(tmp_path: Path, keys: Keys) -> None:
    place = Place(tmp_path, "127.0.0.1", keys=keys)
    async with boxes(place, place) as (one, two):
        assert one.mailbox.address.endpoint.startswith("tcp://127.0.0.1:")
        one.mailbox.tell(two.mailbox.address, finished(1))
        two.mailbox.tell(one.mailbox.address, finished(2))
        assert (await two.until(1), await one.until(1)) == ([finished(1)], [finished(2)])


async def test_a_plain_client_and_a_stranger_with_a_key_are_refused(
    tmp_path: Path, keys: Keys, wire: Callable[[Address], Wire]
) -> None:
    place = Place(tmp_path, "127.0.0.1", keys=keys)
    public, secret = zmq.curve_keypair()
    async with boxes(place, place) as (inbox, friend):
        address = inbox.mailbox.address
        plain = wire(address)
        plain.say(address, 0, encode(finished(1)))
        stranger = wire(address._replace(endpoint="inproc://unused"))
        for option, value in (
            (zmq.CURVE_SERVERKEY, keys.public),
            (zmq.CURVE_PUBLICKEY, public),
            (zmq.CURVE_SECRETKEY, secret),
        ):
            stranger.socket.setsockopt(option, value)
        refused = stranger.socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
        stranger.socket.connect(address.endpoint)
        stranger.socket.send_multipart(
            [encode(Envelope(Address("s", 500, "x"), address.incarnation, 0)), encode(finished(2))]
        )
        await asyncio.get_running_loop().run_in_executor(None, refused.poll, 10_000)
        assert refused.poll(0), "the stranger's handshake should have been refused"
        friend.mailbox.tell(address, finished(3))
        assert await inbox.until(1) == [finished(3)]
        stranger.socket.disable_monitor()
        refused.close()
        plain.close()
        stranger.close()
