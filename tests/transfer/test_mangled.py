"""Damaged, truncated, foreign and repeated transfers: nothing outside an expected (attempt, page) is ever written, and
an attempt has landed exactly when all of it is there. A model in plain Python says what should happen to each box.
"""

from __future__ import annotations

import contextlib
import random
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from cbdisagg.messages import Address, AttemptId, Probe, Push, RequestId, pack, unpack
from cbdisagg.transfer import zmq as zmq_module
from cbdisagg.transfer.boxes import BOX_BYTES, Box, Trial, decode_header, encode_header
from cbdisagg.transfer.landing import Dropped, Landing

if TYPE_CHECKING:
    from conftest import Worker

NewWorker = Callable[..., "Worker"]
LAYERS, PAGES, PAGE_BYTES = 3, 8, 16
ME, SENDERS = 22, (11, 12)
ATTEMPTS = [AttemptId(ME, RequestId(1, n), 1) for n in range(3)]


@dataclass
class Model:
    """What a receiver should hold: {attempt: (source, {(layer, page) still missing})}, and the pool's bytes."""

    pool: np.ndarray
    me: int = ME
    expected: dict[AttemptId, tuple[int, set[tuple[int, int]]]] = field(default_factory=dict)
    landed: list[AttemptId] = field(default_factory=list)

    def expect(self, attempt: AttemptId, source: int, pages: Sequence[int]) -> None:
        missing = {(layer, page) for layer in range(len(self.pool)) for page in pages}
        self.expected[attempt] = (source, missing)

    def place(self, box: Box, payload: bytes) -> bool | None:
        """True: this completes its attempt. None: it is not let in."""
        source, missing = self.expected.get(box.attempt, (0, set()))
        if (box.addressee, box.sender) != (self.me, source) or len(box.pages) % 4:
            return None
        pages = list(unpack(box.pages))
        layers = range(box.layer, box.layer + box.layers) if box.layers < 100 else range(0)
        cells = {(layer, page) for layer in layers for page in pages}
        fits = len(payload) == len(cells) * self.pool.shape[2] and len(set(pages)) == len(pages)
        if not cells or not fits or not cells <= missing:
            return None
        blocks = np.frombuffer(payload, np.uint8).reshape(len(layers), len(pages), -1)
        for n, layer in enumerate(layers):
            self.pool[layer, pages] = blocks[n]
        missing -= cells
        if not missing:
            del self.expected[box.attempt]
            self.landed.append(box.attempt)
        return not missing


PLACES = {ATTEMPTS[0]: (SENDERS[0], (0, 1, 2, 5)), ATTEMPTS[1]: (SENDERS[1], (6, 3)), ATTEMPTS[2]: (SENDERS[0], (4,))}
numbers = st.one_of(st.integers(-PAGES, PAGES + 1), st.sampled_from([-(2**31), 2**31 - 1]))
layer_numbers = st.one_of(st.integers(-1, LAYERS + 1), st.sampled_from([-(2**63), 2**63 - 1]))


@st.composite
def boxes(draw: st.DrawFn) -> tuple[Box, bytes]:
    """A part of an attempt, or such a part with one thing wrong."""
    attempt = draw(st.sampled_from(ATTEMPTS))
    sender, place = PLACES[attempt]
    pages = pack(draw(st.lists(st.sampled_from(place), min_size=1, max_size=len(place), unique=True)))
    layer, layers = draw(st.sampled_from([(0, 3), (0, 3), (0, 2), (2, 1), (1, 2), (1, 1)]))
    payload = bytes([draw(st.integers(0, 255))]) * (layers * len(pages) // 4 * PAGE_BYTES)
    box = Box(sender, ME, attempt, layer, layers, pages)
    wrong = {
        "sender": st.sampled_from([*SENDERS, 0]),
        "addressee": st.just(ME + 1),
        "attempt": st.sampled_from([*ATTEMPTS, attempt._replace(decode=ME + 1)]),
        "layer": layer_numbers,
        "layers": layer_numbers,
        "pages": st.lists(numbers, min_size=len(pages) // 4, max_size=len(pages) // 4).map(pack),
        "bytes": st.sampled_from([pages + b"x", pages[1:], b"", pages[:4] * (len(pages) // 4)]),
        "payload": st.integers(0, 200).map(bytes),
    }
    match draw(st.sampled_from([*[None] * 3, *wrong])):
        case None:
            pass
        case "payload":
            payload = draw(wrong["payload"])
        case "bytes":
            box = msgspec.structs.replace(box, pages=draw(wrong["bytes"]))
        case name:
            box = msgspec.structs.replace(box, **{name: draw(wrong[name])})
    return box, payload


actions = st.one_of(
    *(boxes() for _ in range(8)),  # distinct ones: equal ones would count once
    st.tuples(st.just("forget"), st.sampled_from(ATTEMPTS)),
    st.tuples(st.just("dies"), st.sampled_from(SENDERS)),
    st.tuples(st.just("expect"), st.sampled_from(ATTEMPTS)),
)


@settings(deadline=None, max_examples=60)
@given(st.lists(actions, min_size=20, max_size=40))
def test_any_boxes_are_let_in_or_dropped_whole_as_the_model_says(history: list) -> None:
    pool = np.random.default_rng(1).integers(0, 256, (LAYERS, PAGES, PAGE_BYTES), np.uint8)
    model, landing = Model(pool.copy()), Landing(ME, pool)
    for action in [*(("expect", attempt) for attempt in ATTEMPTS), *history]:
        match action:
            case ("forget", attempt):
                landing.forget(attempt)
                model.expected.pop(attempt, None)
            case ("dies", source):
                landing.forget_source(source)
                model.expected = {a: entry for a, entry in model.expected.items() if entry[0] != source}
            case ("expect", attempt):
                if attempt not in model.expected:
                    landing.expect(attempt, *PLACES[attempt])
                    model.expect(attempt, *PLACES[attempt])
            case (box, payload):
                received = decode_header(encode_header(box))
                assert received == box
                result: bool | None = None
                with contextlib.suppress(Dropped):
                    result = landing.place(box, np.frombuffer(payload, np.uint8))
                assert result == model.place(box, payload)
        assert (pool == model.pool).all()


# --------------------------------------------------------------------------------------------- over a real socket


@pytest.fixture
def raw(new_worker: NewWorker) -> Iterator[tuple[Worker, zmq.Socket[bytes]]]:
    """A receiver that knows the senders 5 and 6, and a bare socket that can say anything to it."""
    d = new_worker(kind="zmq")
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.connect(d.info.pool.data_endpoint)
        for sender in (5, 6):
            pattern = bytes(BOX_BYTES)
            socket.send_multipart([encode_header(Trial(sender, d.address.incarnation, 0, 1, 0, 1)), pattern])
            probe = Probe("zmq", BOX_BYTES, zlib.crc32(pattern), 1.0)
            assert d.transfer.verify(Address(f"p{sender}", sender, ""), probe).kind == "zmq"
        yield d, socket


def cut(rng: random.Random, d: Worker, attempt: AttemptId, pages: Sequence[int]) -> list[list[bytes]]:
    """An attempt's data as boxes of one or all pages and of one or two layers; the bytes are random."""
    found = []
    layers, _, page_bytes = d.pages.shape
    for group in [pages] if rng.random() < 0.5 else [[page] for page in pages]:
        layer = 0
        while layer < layers:
            count = min(rng.randint(1, 2), layers - layer)
            header = Box(5, d.address.incarnation, attempt, layer, count, pack(group))
            found.append([encode_header(header), rng.randbytes(count * len(group) * page_bytes)])
            layer += count
    return found


def mangle(rng: random.Random, frames: list[bytes]) -> list[bytes]:
    """One of the ways in which a message can be wrong."""
    header, payload = frames
    box = decode_header(header)
    assert isinstance(box, Box)
    pages = list(unpack(box.pages))
    changes = (
        {"sender": 6},
        {"sender": rng.getrandbits(62)},
        {"addressee": box.addressee - 1},
        {"attempt": box.attempt._replace(n=box.attempt.n + 99)},
        {"attempt": box.attempt._replace(decode=box.attempt.decode - 1)},
        {"layer": box.layer + 5},
        {"layer": -1 - box.layer},
        {"layers": box.layers + 1},
        {"layers": 2**62},
        {"pages": pack([page - 24 for page in pages])},
        {"pages": pack([page + 24 for page in pages])},
        {"pages": pack([0] * len(pages))},
        {"pages": pack([pages[0]] * len(pages))},
        {"pages": pack([pages[0], 0][: len(pages)] + pages[2:])},
        {"pages": box.pages[:-1]},
    )
    way = rng.randrange(len(changes) + 6)
    if way < len(changes):
        return [encode_header(msgspec.structs.replace(box, **changes[way])), rng.randbytes(len(payload))]
    flipped = bytearray(header)
    flipped[0] ^= 0x60
    return [
        [header, payload[:-1]],
        [header, payload + b"\0"],
        [header],
        [header, payload, b""],
        [bytes(flipped), payload],
        [header[: rng.randrange(len(header))], payload],
    ][way - len(changes)]


@pytest.mark.parametrize("seed", range(6))
def test_through_a_socket_only_the_valid_half_of_the_boxes_is_written(
    raw: tuple[Worker, zmq.Socket[bytes]], seed: int
) -> None:
    """Boxes of several attempts in any order, each followed now and then by a mangled twin, or by itself again."""
    d, socket = raw
    rng = random.Random(seed)
    model = Model(d.pages.copy(), d.address.incarnation)
    messages: list[list[bytes]] = []
    free = list(range(1, 20))
    rng.shuffle(free)
    for n in range(3):
        attempt = AttemptId(d.address.incarnation, RequestId(1, n), 1)
        pages = [free.pop() for _ in range(rng.randint(1, 5))]
        d.transfer.expect(attempt, Address("p5", 5, ""), tuple(pages))
        model.expect(attempt, 5, pages)
        messages += cut(rng, d, attempt, pages)
    rng.shuffle(messages)
    sent = 0
    for message in messages:
        wrong = mangle(rng, message)
        for frames in [*rng.sample([message, wrong, message, wrong], rng.randint(2, 4)), message]:
            socket.send_multipart(frames)
            sent += 1
            if len(frames) == 2:
                with contextlib.suppress(msgspec.DecodeError):
                    model.place(decode_header(frames[0]), frames[1])  # type: ignore[arg-type]  # no trial is sent
    assert len(model.landed) == 3, "the valid ones are all there"
    assert [d.landed.get(timeout=20) for _ in range(3)] == model.landed
    marker = AttemptId(d.address.incarnation, RequestId(2, 0), 1)
    d.transfer.expect(marker, Address("p5", 5, ""), (21,))
    end = Box(5, d.address.incarnation, marker, 0, 5, pack([21]))
    socket.send_multipart([encode_header(end), d.pages[:, 21].tobytes()])
    assert d.landed.get(timeout=20) == marker  # all before it has been read
    assert d.landed.empty()
    assert (d.pages == model.pool).all()
    assert sum(d.transfer.drops.values()) == sent - len(messages)


BOMBS = {
    "nested in a field that nobody knows": lambda good: bytes([good[0] + 1]) + good[1:] + b"\x91" * 200_000 + b"\xc0",
    "nested from the start": lambda good: b"\x91" * 200_000 + b"\xc0",
    "an array said to be of 2^32": lambda good: b"\xdd\xff\xff\xff\xff" + good[1:],
    "bytes said to be of 2^32": lambda good: good[:-5] + b"\xc6\xff\xff\xff\xff",
    "a map said to be of 2^32": lambda good: b"\xdf\xff\xff\xff\xff",
    "a pickle": lambda good: b"cposix\nsystem\n(S'exit 1'\ntR.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_header_made_to_hurt_is_dropped(raw: tuple[Worker, zmq.Socket[bytes]], bomb: str) -> None:
    d, socket = raw
    attempt = AttemptId(d.address.incarnation, RequestId(1, 1), 1)
    d.transfer.expect(attempt, Address("p5", 5, ""), (1,))
    header = encode_header(Box(5, d.address.incarnation, attempt, 0, 5, pack([1])))
    payload = b"\x07" * (5 * d.info.pool.page_bytes)
    socket.send_multipart([BOMBS[bomb](header), payload])
    socket.send_multipart([header, payload])
    assert d.landed.get(timeout=20) == attempt
    assert d.transfer.drops == {"malformed": 1}


def test_half_an_attempt_whose_sender_is_lost_never_lands(new_worker: NewWorker) -> None:
    """Its successor is another incarnation and cannot complete it either."""
    p, q, d = (new_worker(kind="zmq") for _ in range(3))
    for sender in (p, q):
        assert sender.pair_with(d).kind == "zmq"
    push = p.push_to(d, (1, 2), (3, 4))
    d.transfer.expect(push.attempt, p.address, push.target)
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.connect(d.info.pool.data_endpoint)
        half = Box(p.address.incarnation, d.address.incarnation, push.attempt, 0, 2, pack(push.target))
        socket.send_multipart([encode_header(half), bytes(2 * 2 * d.info.pool.page_bytes)])
        marker = q.push_to(d, (5,), (6,), n=1)
        d.transfer.expect(marker.attempt, q.address, marker.target)
        rest = Box(q.address.incarnation, d.address.incarnation, push.attempt, 2, 3, pack(push.target))
        socket.send_multipart([encode_header(rest), bytes(3 * 2 * d.info.pool.page_bytes)])
        end = Box(q.address.incarnation, d.address.incarnation, marker.attempt, 0, 5, pack(marker.target))
        socket.send_multipart([encode_header(end), q.pages[:, 5].tobytes()])
        assert d.landed.get(timeout=20) == marker.attempt
    d.transfer.disconnect(p.address)
    after = d.pages.copy()
    p.send(push)  # a last push on its way when it was declared dead
    last = q.push_to(d, (7,), (8,), n=2)
    d.transfer.expect(last.attempt, q.address, last.target)
    q.send(last)
    assert d.landed.get(timeout=20) == last.attempt
    after[:, 8] = q.pages[:, 7]
    assert (d.pages == after).all() and d.landed.empty()


# ------------------------------------------------------------------------------------------------ what is not sent


@pytest.mark.parametrize("target", [(24, 1), (-1, 1), (-24, 1), (2**31 - 1, 1), (-(2**31), 1), (1,), ()])
@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_a_push_to_pages_that_the_peer_has_not_goes_nowhere(
    new_worker: NewWorker, kind: str, target: tuple[int, ...]
) -> None:
    """Not one byte of it, and it still ends; the peer that asked for it is reported, and the next push works."""
    p, d = new_worker(kind=kind), new_worker(kind=kind)
    p.pair_with(d)
    before = d.pages.copy()
    wrong = p.push_to(d, (3, 4), target)
    d.transfer.expect(wrong.attempt, p.address, target)
    p.send(wrong)
    assert p.done == [(wrong.serial, "", 0, 0.0)]
    assert p.broken == [(d.address, f"{d.address.name} wants KV in pages that it has not")]
    good = p.push_to(d, (5,), (6,), n=1)
    d.transfer.expect(good.attempt, p.address, good.target)
    p.send(good)
    if kind == "zmq":
        assert d.landed.get(timeout=20) == good.attempt
    before[:, 6] = p.pages[:, 5]
    assert (d.pages == before).all()


def test_a_peer_that_dies_while_it_is_waited_for_is_not_waited_for_any_longer(
    new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zmq_module, "TRIAL_TIMEOUT_S", 250.0)
    d, p = new_worker(kind="zmq"), Address("p", 5, "")
    probe = Probe("zmq", BOX_BYTES, 0, 1.0)
    waits = zmq_module.threading.Condition.wait_for

    def dies_then_waits(self: object, *arguments: object) -> bool:
        monkeypatch.setattr(zmq_module.threading.Condition, "wait_for", waits)
        d.transfer.disconnect(p)
        return waits(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(zmq_module.threading.Condition, "wait_for", dies_then_waits)
    assert "before its sender died" in d.transfer.verify(p, probe).note
    assert d.transfer.verify(p, probe).note == "p is gone"


def test_what_is_kept_of_peers_does_not_grow_with_their_number(raw: tuple[Worker, zmq.Socket[bytes]]) -> None:
    """Successors of one name that die one after the other, and self-tests of senders that nobody asks for."""
    d, socket = raw
    for n in range(300):
        d.transfer.disconnect(Address("p", 1_000 + n, ""))
    assert len(d.transfer._gone) == 1
    pattern = bytes(BOX_BYTES)
    for sender in range(1_000, 1_000 + 2 * zmq_module.TRIALS_KEPT):
        socket.send_multipart([encode_header(Trial(sender, d.address.incarnation, 0, 1, 0, 1)), pattern])
    probe = Probe("zmq", BOX_BYTES, zlib.crc32(pattern), 1.0)
    assert d.transfer.verify(Address("last", sender, ""), probe).kind == "zmq"
    assert len(d.transfer._receiver._trials) < zmq_module.TRIALS_KEPT


def test_an_attempt_that_ended_leaves_nothing(new_worker: NewWorker) -> None:
    p, d = new_worker(kind="zmq"), new_worker(kind="zmq")
    p.pair_with(d)
    pushes: list[Push] = [p.push_to(d, (1,), (2,), n) for n in range(4)]
    for push in pushes:
        d.transfer.expect(push.attempt, p.address, push.target)
    p.send(pushes[0])
    assert d.landed.get(timeout=20) == pushes[0].attempt
    d.transfer.forget(pushes[1].attempt)
    assert len(d.transfer._landing._expected) == 2
    d.transfer.disconnect(p.address)
    assert not d.transfer._landing._expected and not d.transfer._inbound
