"""Whole transfers over real sockets and memory: pairing, hand-overs, junk, deaths."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import pytest
import zmq

from cbdisagg.messages import Address, AttemptId, Probe, Push, RequestId, WorkerInfo, pack
from cbdisagg.transfer import zmq as zmq_module
from cbdisagg.transfer.boxes import BOX_BYTES, Box, Trial, encode_header

if TYPE_CHECKING:
    from conftest import Worker

NewWorker = Callable[..., "Worker"]
KINDS = ("shm", "zmq")


def probe_of(worker: Worker, peer: WorkerInfo) -> Probe:
    opened = worker.transfer.connect(peer)
    return Probe(opened.kind, opened.nbytes, opened.checksum, opened.seconds, opened.note)


# -------------------------------------------------------------------------------------------------------- pairing


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_is_tested_and_its_speed_is_known(new_worker: NewWorker, kind: str) -> None:
    p, d = new_worker(kind=kind), new_worker(kind=kind)
    seen = p.pair_with(d)
    assert (seen.kind, seen.note) == (kind, "")
    assert seen.bytes_per_s > 0


def test_auto_takes_shared_memory_on_one_host(new_worker: NewWorker) -> None:
    seen = new_worker().pair_with(new_worker())
    assert (seen.kind, seen.note) == ("shm", "")


def test_auto_falls_back_to_sockets_and_says_why(new_worker: NewWorker) -> None:
    seen = new_worker(host="here").pair_with(new_worker(host="there"))
    assert seen.kind == "zmq"
    assert "shm" in seen.note and "another host, there" in seen.note
    p, d = new_worker(), new_worker()
    wrong = msgspec.structs.replace(d.info, pool=msgspec.structs.replace(d.info.pool, nonce="0" * 32))
    probe = probe_of(p, wrong)
    assert probe.kind == "zmq"
    assert "nonce" in probe.note
    assert d.transfer.verify(p.address, probe).note == probe.note


def test_a_forced_kind_does_not_fall_back(new_worker: NewWorker) -> None:
    seen = new_worker(kind="shm").pair_with(new_worker(host="there"))
    assert seen.kind == ""
    assert "another host" in seen.note


def test_pools_of_another_layout_are_not_shared(new_worker: NewWorker) -> None:
    seen = new_worker(kind="shm").pair_with(new_worker(page_bytes=8192))
    assert seen.kind == "" and "layout" in seen.note


def test_no_socket_no_pair(new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq_module, "CONNECT_TIMEOUT_MS", 300)
    p, d = new_worker(kind="zmq"), new_worker()
    for endpoint in (d.info.pool.data_endpoint + ".missing", "nonsense"):
        wrong = msgspec.structs.replace(d.info, pool=msgspec.structs.replace(d.info.pool, data_endpoint=endpoint))
        opened = p.transfer.connect(wrong)
        assert opened.kind == "" and endpoint in opened.note


@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_or_missing_pattern_is_noticed(
    new_worker: NewWorker, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    p, d = new_worker(kind=kind), new_worker(kind=kind)
    probe = probe_of(p, d.info)
    damaged = msgspec.structs.replace(probe, checksum=probe.checksum ^ 1)
    assert "damaged" in d.transfer.verify(p.address, damaged).note
    monkeypatch.setattr(zmq_module, "TRIAL_TIMEOUT_S", 0.05)
    seen = d.transfer.verify(p.address, probe)  # it has been consumed
    assert seen.kind == "" and "did not" in seen.note


def test_two_senders_test_one_receiver_at_once(new_worker: NewWorker) -> None:
    """Each pattern survives until it has been verified, whoever else writes in between."""
    d, senders = new_worker(), [new_worker() for _ in range(3)]
    probes = [probe_of(p, d.info) for p in senders]
    assert [d.transfer.verify(p.address, probe).kind for p, probe in zip(senders, probes, strict=True)] == ["shm"] * 3


@pytest.mark.parametrize("kind", KINDS)
def test_a_pair_below_the_floor_is_not_used(new_worker: NewWorker, kind: str) -> None:
    seen = new_worker(kind=kind).pair_with(new_worker(kind=kind, floor_gbps=1e6))
    assert seen.kind == ""
    assert kind in seen.note and "transfer.floor_gbps = 1e+06" in seen.note


def test_what_could_not_be_opened_is_passed_on(new_worker: NewWorker) -> None:
    seen = new_worker().transfer.verify(Address("p", 1, ""), Probe("", 0, 0, 0.0, "shm: no; zmq: no"))
    assert (seen.kind, seen.bytes_per_s, seen.note) == ("", 0.0, "shm: no; zmq: no")


# ------------------------------------------------------------------------------------------------------ hand-over


@pytest.mark.parametrize("kind", KINDS)
def test_pages_arrive_where_the_receiver_wants_them(new_worker: NewWorker, kind: str) -> None:
    """Random page lists, several pushes of one attempt, two receivers at once; only the target pages change."""
    p, receivers = new_worker(kind=kind), [new_worker(kind=kind) for _ in range(2)]
    for d in receivers:
        assert p.pair_with(d).kind == kind
    random = np.random.default_rng(3)
    total = p.pages.shape[1]
    for n in range(8):
        wanted, pushes = [], []
        for d in receivers:
            count = int(random.integers(1, total))
            source, target = (tuple(map(int, random.permutation(total)[:count])) for _ in range(2))
            after = d.pages.copy()
            after[:, target] = p.pages[:, source]
            wanted.append(after)
            attempt = AttemptId(d.address.incarnation, RequestId(7, n), 1)
            d.transfer.expect(attempt, p.address, target)
            cut = count // 2
            pushes.append([p.push_to(d, source[:cut], target[:cut], n), p.push_to(d, source[cut:], target[cut:], n)])
        for step in zip(*pushes, strict=True):  # one forward pass pushes to both, a layer at a time
            for layer in range(p.pages.shape[0]):
                for push in step:
                    p.transfer.push(layer, push)
            for push in step:
                p.transfer.end(push)
        for d, after in zip(receivers, wanted, strict=True):
            if kind == "zmq":
                assert d.landed.get(timeout=10).request.n == n
            assert (d.pages == after).all()
    assert sorted(done[0] for done in p.done) == list(range(32))
    assert all(done[1] == kind and done[3] >= 0 for done in p.done)
    assert all(d.landed.empty() for d in receivers)


@pytest.mark.parametrize("kind", KINDS)
def test_a_push_is_counted_once_with_its_bytes_and_seconds(new_worker: NewWorker, kind: str) -> None:
    p, d = new_worker(kind=kind), new_worker(kind=kind)
    p.pair_with(d)
    push = p.push_to(d, (1, 2, 9), (4, 5, 6))
    p.send(push)
    [(serial, how, nbytes, seconds)] = p.done
    assert (serial, how, nbytes) == (push.serial, kind, 3 * p.pages[:, 0].size)
    assert seconds > 0
    link = p.transfer._ways[d.address.incarnation].link
    assert not p.transfer._costs and not (link._runs if kind == "shm" else link._gatherers)  # nothing is kept of it


@pytest.mark.parametrize("kind", KINDS)
def test_our_pages_are_not_read_after_the_push_is_done(new_worker: NewWorker, kind: str) -> None:
    p, d = new_worker(kind=kind), new_worker(kind=kind)
    p.pair_with(d)
    push = p.push_to(d, (0, 3), (8, 2))
    wanted = p.pages[:, [0, 3]].copy()
    d.transfer.expect(push.attempt, p.address, push.target)
    p.send(push)
    p.pages[:] = 0
    if kind == "zmq":
        d.landed.get(timeout=10)
    assert (d.pages[:, [8, 2]] == wanted).all()


def test_a_push_to_a_stranger_goes_nowhere_and_still_ends(new_worker: NewWorker) -> None:
    p, d = new_worker(), new_worker()
    before = d.pages.copy()
    push = p.push_to(d, (1,), (1,))
    p.send(push)
    assert p.done == [(push.serial, "", 0, 0.0)]
    assert (d.pages == before).all()


# -------------------------------------------------------------------------------------- what is not let in (zmq)


@pytest.fixture
def raw(new_worker: NewWorker) -> Iterator[tuple[Worker, zmq.Socket[bytes]]]:
    """A receiver, and a bare socket that can send it anything."""
    d = new_worker(kind="zmq")
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.linger = 0
        socket.connect(d.info.pool.data_endpoint)
        for sender in (5, 6):  # a receiver lets in only those whose self-test it has seen
            pattern = bytes(BOX_BYTES)
            socket.send_multipart([encode_header(Trial(sender, d.address.incarnation, 0, 1, 0, 1)), pattern])
            probe = Probe("zmq", BOX_BYTES, zlib.crc32(pattern), 1.0)
            assert d.transfer.verify(Address("p", sender, ""), probe).kind == "zmq"
        yield d, socket


def box_for(d: Worker, attempt: AttemptId, sender: int = 5, layers: int = 5) -> list[bytes]:
    header = Box(sender, d.address.incarnation, attempt, 0, layers, pack([1, 2]))
    return [encode_header(header), b"\x01" * (layers * 2 * d.info.pool.page_bytes)]


def test_junk_on_the_data_socket_changes_nothing(raw: tuple[Worker, zmq.Socket[bytes]]) -> None:
    d, socket = raw
    attempt = AttemptId(d.address.incarnation, RequestId(1, 1), 1)
    d.transfer.expect(attempt, Address("p", 5, ""), (1, 2))
    before, good = d.pages.copy(), box_for(d, attempt)
    random = np.random.default_rng(0)
    junk = [
        [b""],
        [b"", b""],
        [b"x"],
        [good[0]],
        [good[0], b""],
        [good[0], good[1][:-1]],
        [good[0], good[1], b"more"],
        [good[0][:-1], good[1]],
        [encode_header(Trial(5, d.address.incarnation + 1, 0, 1, 0, 1)), b"x"],
        [encode_header(Trial(5, d.address.incarnation, 0, 1, 0, 1)), b"x"],
        box_for(d, attempt, sender=6),
        box_for(d, attempt._replace(n=2)),
        *([random.bytes(int(n)), random.bytes(50)] for n in random.integers(1, 60, 100)),
    ]
    for frames in junk:
        socket.send_multipart(frames)
    last = attempt._replace(n=3)
    d.transfer.expect(last, Address("p", 5, ""), (11, 12))
    marker = Box(5, d.address.incarnation, last, 0, 5, pack([11, 12]))
    socket.send_multipart([encode_header(marker), d.pages[:, 11:13].tobytes()])
    assert d.landed.get(timeout=10) == last  # all before it has been read
    assert (d.pages == before).all()
    assert sum(d.transfer.drops.values()) == len(junk)
    socket.send_multipart(good)
    assert d.landed.get(timeout=10) == attempt
    assert (d.pages[:, 1:3] == 1).all()


@pytest.mark.parametrize("end", ["forget", "disconnect"])
def test_late_data_are_not_written(raw: tuple[Worker, zmq.Socket[bytes]], end: str) -> None:
    d, socket = raw
    p = Address("p", 5, "")
    attempt, marker = (AttemptId(d.address.incarnation, RequestId(1, 1), n) for n in (1, 2))
    d.transfer.expect(attempt, p, (1, 2))
    if end == "forget":
        d.transfer.forget(attempt)
    else:
        d.transfer.disconnect(p)
    before = d.pages.copy()
    socket.send_multipart(box_for(d, attempt))
    d.transfer.expect(marker, Address("q", 6, ""), (1, 2))
    socket.send_multipart(box_for(d, marker, sender=6))
    assert d.landed.get(timeout=10) == marker
    before[:, 1:3] = 1
    assert (d.pages == before).all()
    assert d.transfer.drops == {"of an attempt that is not expected": 1}


# --------------------------------------------------------------------------------------------------------- deaths


class Peer(NamedTuple):
    """A decode worker in another process (peer.py)."""

    process: subprocess.Popen[str]
    info: WorkerInfo

    def ask(self, **order: object) -> str:
        self.process.stdin.write(json.dumps(order, default=msgspec.to_builtins) + "\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.fixture
def new_peer(tmp_path: Path) -> Iterator[Callable[[str], Peer]]:
    started: list[subprocess.Popen[str]] = []

    def start(kind: str) -> Peer:
        command = [sys.executable, str(Path(__file__).with_name("peer.py")), str(tmp_path), kind]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(process)
        return Peer(process, msgspec.json.decode(process.stdout.readline(), type=WorkerInfo))

    yield start
    for process in started:
        process.kill()
        process.communicate()


def pair_with_process(p: Worker, peer: Peer) -> str:
    return peer.ask(probe=msgspec.to_builtins(probe_of(p, peer.info)), sender=p.address)


@pytest.mark.parametrize("kind", KINDS)
def test_pages_arrive_in_another_process(new_worker: NewWorker, new_peer: Callable[[str], Peer], kind: str) -> None:
    p, peer = new_worker(kind=kind), new_peer(kind)
    assert pair_with_process(p, peer) == kind
    push = p.push_to(peer.info, (1, 2, 3, 20), (9, 10, 4, 5))
    assert peer.ask(expect=push.attempt, source=p.address, pages=push.target) == "expecting"
    p.send(push)
    if kind == "zmq":
        assert peer.process.stdout.readline() == "landed\n"
    assert int(peer.ask(read=list(push.target))) == zlib.crc32(p.pages[:, list(push.source)].tobytes())


@pytest.mark.parametrize("kind", KINDS)
def test_a_peer_that_is_killed_holds_nobody_up(
    new_worker: NewWorker, new_peer: Callable[[str], Peer], kind: str
) -> None:
    """Far more than fits in flight is pushed after its death; every push ends, before and after `disconnect`."""
    p, peer = new_worker(kind=kind), new_peer(kind)
    assert pair_with_process(p, peer) == kind
    peer.process.send_signal(signal.SIGKILL)
    peer.process.wait()
    pushes = [p.push_to(peer.info, tuple(range(24)), tuple(range(24)), n) for n in range(60)]
    for push in pushes:
        p.send(push)
    p.transfer.disconnect(peer.info.address)
    last = p.push_to(peer.info, (1,), (1,))
    p.send(last)
    assert [done[0] for done in p.done] == [push.serial for push in pushes] + [last.serial]
    assert p.done[-1][1:3] == ("", 0)
    assert [address for address, _ in p.broken] == ([peer.info.address] if kind == "zmq" else [])


def stop(peer: Peer) -> None:
    peer.process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, peer.process.pid, os.WSTOPPED)


def flood(p: Worker, peer: Peer) -> tuple[threading.Thread, list[Push]]:
    """Push, in a thread, more than the stopped peer will ever take."""
    pushes = [p.push_to(peer.info, tuple(range(24)), tuple(range(24)), n) for n in range(400)]
    thread = threading.Thread(target=lambda: [p.send(push) for push in pushes])
    thread.start()
    return thread, pushes


@pytest.mark.parametrize("how", ["disconnect", "kill", "close"])
def test_a_sender_that_waits_for_a_stalled_peer_is_woken(
    new_worker: NewWorker, new_peer: Callable[[str], Peer], how: str
) -> None:
    p, peer = new_worker(kind="zmq"), new_peer("zmq")
    assert pair_with_process(p, peer) == "zmq"
    stop(peer)
    thread, pushes = flood(p, peer)
    thread.join(0.3)
    assert thread.is_alive(), "nothing bounds the bytes in flight"
    assert len(p.done) <= 3 * zmq_module.IN_FLIGHT  # a push is one box here; some lie in the kernel's buffers
    if how == "disconnect":
        p.transfer.disconnect(peer.info.address)
    elif how == "kill":
        peer.process.send_signal(signal.SIGKILL)
    else:
        p.transfer._ways[peer.info.address.incarnation].link.close()
    thread.join(20)
    assert not thread.is_alive()
    assert [done[0] for done in p.done] == [push.serial for push in pushes]
    assert bool(p.broken) == (how == "kill")


def test_a_peer_that_died_during_its_test_is_not_connected(new_worker: NewWorker) -> None:
    p, d = new_worker(), new_worker()
    p.transfer.disconnect(d.address)  # its death is told while `connect` is still to come
    opened = p.transfer.connect(d.info)
    assert opened.kind == "" and "gone" in opened.note


@pytest.mark.parametrize("kind", KINDS)
def test_descriptors_stay_flat_over_many_peers(new_worker: NewWorker, kind: str) -> None:
    """Workers come and go; what was opened for them goes with them (ZeroMQ closes in a thread of its own: some
    slack).
    """
    p, d = new_worker(kind=kind), new_worker(kind=kind)
    p.pair_with(d)
    before = len(os.listdir("/proc/self/fd"))
    for n in range(30):
        incarnation = d.address._replace(incarnation=50_000 + n)
        assert p.transfer.connect(msgspec.structs.replace(d.info, address=incarnation)).kind == kind
        p.transfer.disconnect(incarnation)
    assert len(os.listdir("/proc/self/fd")) < before + 15


# ------------------------------------------------------------------------------------------------------------ tcp


def test_tcp_asks_for_the_key_of_the_cluster(new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, others = ([key.decode() for key in zmq.curve_keypair()] for _ in range(2))
    p, d = (new_worker(host=f"host{n}", tcp_keys=ours) for n in range(2))
    assert d.info.pool.data_endpoint.startswith("tcp://127.0.0.1:")
    assert p.pair_with(d).kind == "zmq"
    push = p.push_to(d, (1, 2), (3, 4))
    d.transfer.expect(push.attempt, p.address, push.target)
    p.send(push)
    assert d.landed.get(timeout=10) == push.attempt
    assert (d.pages[:, 3:5] == p.pages[:, 1:3]).all()
    monkeypatch.setattr(zmq_module, "CONNECT_TIMEOUT_MS", 300)
    for stranger in (new_worker(kind="zmq"), new_worker(kind="zmq", tcp_keys=others)):
        assert stranger.transfer.connect(d.info).kind == ""


def test_tcp_without_keys_is_refused(tmp_path: Path, new_worker: NewWorker) -> None:
    with pytest.raises(ValueError, match="CURVE"):
        new_worker(tcp_keys=("", ""))
