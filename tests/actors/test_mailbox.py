"""The mailbox over real ZeroMQ: order, gaps, incarnations, junk, peers that are dead or stopped, CURVE."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.auth

from cbdisagg.actors import mailbox
from cbdisagg.actors.mailbox import MAX_MESSAGE_BYTES, Keys, Mailbox, Place, read_keys
from cbdisagg.config import Cluster, ConfigError
from cbdisagg.messages import Address, Envelope, Finished, RequestId, Suspect, ToCoordinator, encode

DECODER: msgspec.msgpack.Decoder[ToCoordinator] = msgspec.msgpack.Decoder(ToCoordinator)


class Box:
    """A started mailbox that keeps what arrives and lets a test wait for it."""

    def __init__(self, name: str, incarnation: int, place: Place) -> None:
        self.mailbox = Mailbox[ToCoordinator](name, incarnation, place, DECODER)
        self.received: list[tuple[Address, ToCoordinator]] = []
        self.losses: list[tuple[Address, str]] = []
        self._changed = asyncio.Event()
        self.mailbox.start(self._receive, self._lost)

    def _receive(self, sender: Address, message: ToCoordinator) -> None:
        self.received.append((sender, message))
        self._changed.set()

    def _lost(self, peer: Address, reason: str) -> None:
        self.losses.append((peer, reason))
        self._changed.set()

    async def until(self, count: int) -> list[ToCoordinator]:
        await self._until(lambda: len(self.received) >= count)
        return [message for _, message in self.received]

    async def until_lost(self, count: int) -> list[tuple[Address, str]]:
        await self._until(lambda: len(self.losses) >= count)
        return self.losses

    async def _until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


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
        assert not inbox.losses


async def test_what_was_told_before_start_is_delivered(place: Place) -> None:
    late = Mailbox[ToCoordinator]("late", 9, place, DECODER)
    async with boxes(place) as (peer,):
        peer.mailbox.tell(late.address, finished(1))
        got = asyncio.get_running_loop().create_future()
        late.start(lambda sender, message: got.set_result((sender, message)), lambda peer, reason: None)
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
        assert [(peer.incarnation, why) for peer, why in inbox.losses] == [
            (500, "messages of it were lost: 4 came instead of 2")
        ]
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
        assert not inbox.losses
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

        stopped.start(receive, lambda peer, reason: None)
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
        assert not inbox.losses


async def test_the_memory_of_deaths_is_bounded_and_keeps_the_last_ones(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "FORGOTTEN_KEPT", 2)
    async with boxes(place, place) as (inbox, dead):
        for long_ago in range(100, 200):
            inbox.mailbox.forget(long_ago)
        inbox.mailbox.forget(dead.mailbox.address.incarnation)
        dead.mailbox.tell(inbox.mailbox.address, finished(1))
        inbox.mailbox.tell(dead.mailbox.address, finished(2))
        inbox.mailbox.tell(inbox.mailbox.address, finished(3))
        assert await inbox.until(1) == [finished(3)]
        assert len(inbox.mailbox._forgotten) == 2
        assert not dead.received


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


async def test_a_replayed_message_is_dropped_and_what_follows_it_is_no_gap(
    place: Place, wire: Callable[[Address], Wire], caplog: pytest.LogCaptureFixture
) -> None:
    async with boxes(place) as (inbox,):
        line = wire(inbox.mailbox.address)
        for number in (0, 1, 2, 0, 1, 3):
            line.say(inbox.mailbox.address, number, encode(finished(number)))
        assert await inbox.until(4) == [finished(n) for n in (0, 1, 2, 3)]
        assert not inbox.losses
        line.close()
    assert "box-0 dropped message 0 of wire: it came before" in caplog.text


async def test_a_connection_that_ends_is_told_once_though_no_message_follows(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "GRACE_S", 0.01)
    async with boxes(place, place) as (one, two):
        one.mailbox.tell(two.mailbox.address, finished(0))
        await two.until(1)
        two.mailbox.close()
        lost = await one.until_lost(1)
        assert lost == [(two.mailbox.address, "its connection to box-0 broke")]


async def test_a_connection_that_ends_before_the_start_is_told_after_it(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "GRACE_S", 0.01)
    late = Mailbox[ToCoordinator]("late", 9, place, DECODER)
    async with boxes(place) as (peer,):
        late.tell(peer.mailbox.address, finished(1))
        await peer.until(1)
        peer.mailbox.close()
        lost: asyncio.Future[Address] = asyncio.get_running_loop().create_future()
        late.start(lambda sender, message: None, lambda who, reason: lost.set_result(who))
        assert await asyncio.wait_for(lost, 20) == peer.mailbox.address
    late.close()


async def test_a_connection_that_breaks_and_comes_again_is_told_too(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy between the two is closed and opened again: the peer lives, and what lay in the proxy is lost."""
    monkeypatch.setattr(mailbox, "GRACE_S", 0.01)
    async with boxes(place, place) as (one, two):
        address = two.mailbox.address
        between = address._replace(endpoint=f"ipc://{place.folder}/between")
        target = address.endpoint.removeprefix("ipc://")
        async with proxy(place.folder / "between", target):
            one.mailbox.tell(between, finished(0))
            await two.until(1)
        assert await one.until_lost(1) == [(between, "its connection to box-0 broke")]
        async with proxy(place.folder / "between", target):
            one.mailbox.tell(between, finished(1))
            assert await two.until(2) == [finished(0), finished(1)]
        assert len(one.losses) == 1


@asynccontextmanager
async def proxy(path: Path, target: str) -> AsyncIterator[None]:
    """Passes bytes between the Unix socket `path` and the one at `target`; its end breaks both connections."""
    ends: list[asyncio.StreamWriter] = []

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    async def passed_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(target)
        ends.extend((writer, far_writer))
        await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

    server = await asyncio.start_unix_server(passed_on, path)
    try:
        yield
    finally:
        server.close()
        for end in ends:
            end.transport.abort()
        for end in ends:
            with contextlib.suppress(ConnectionError):
                await end.wait_closed()


async def test_a_peer_known_to_be_dead_is_not_reported(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mailbox, "GRACE_S", 0.01)
    async with boxes(place, place, place) as (one, dead, other):
        for peer in (dead, other):
            one.mailbox.tell(peer.mailbox.address, finished(0))
            await peer.until(1)
        dead.mailbox.close()
        one.mailbox.forget(dead.mailbox.address.incarnation)
        other.mailbox.close()
        assert await one.until_lost(1) == [(other.mailbox.address, "its connection to box-0 broke")]


async def test_an_end_in_order_leaves_time_for_the_last_words(place: Place) -> None:
    """Many and long: they cannot all have left when the mailbox is closed."""
    count, body = 200, "x" * 100_000
    async with boxes(place, place) as (one, two):
        for n in range(count):
            one.mailbox.tell(two.mailbox.address, Suspect(body, n, ""))
        closing = asyncio.get_running_loop().run_in_executor(None, one.mailbox.close, 20.0)
        assert len(await two.until(count)) == count
        await closing
