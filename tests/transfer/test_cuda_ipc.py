"""Pushing between pools on GPUs, over a driver whose device is this process's memory: open, push, close, deaths."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from cbdisagg.config import ConfigError
from cbdisagg.config import Transfer as Settings
from cbdisagg.messages import Address, AttemptId, Probe, Push, RequestId, WorkerInfo
from cbdisagg.transfer import cuda_pool
from cbdisagg.transfer.base import LinkFailed
from cbdisagg.transfer.checksums import damaged_pages, page_checksums
from cbdisagg.transfer.cuda_driver import OUT_OF_MEMORY, CudaDriver, DriverError
from cbdisagg.transfer.cuda_fake import FakeDriver
from cbdisagg.transfer.cuda_ipc import RunCopier
from cbdisagg.transfer.cuda_pool import SEATS, create_device_pool, seats
from cbdisagg.transfer.select import make_transfer

LAYERS, PAGES, PAGE_BYTES = 3, 20, 512


class Worker:
    """One worker's end: its pool (random bytes), its transfer, and what the callbacks said."""

    numbers = itertools.count(5_000)

    def __init__(
        self,
        folder: Path,
        exports: dict[bytes, int],
        host: str = "here",
        reachable: bool = True,
        name: str = "",
        **settings: Any,
    ) -> None:
        number = next(self.numbers)
        self.driver = FakeDriver(exports, reachable=reachable)
        self.address = Address(name or f"g{number}", number, f"ipc://{folder}/g{number}")
        self.pool = create_device_pool(self.driver, self.address, LAYERS, PAGES, PAGE_BYTES, stream=7)
        bytes_ = np.random.default_rng(number).integers(0, 256, (LAYERS, PAGES, PAGE_BYTES), np.uint8)
        self.array()[:] = bytes_
        self.done: list[tuple[int, str, int, float]] = []
        self.landed: SimpleQueue[AttemptId] = SimpleQueue()
        self.transfer = make_transfer(
            Settings(**settings),
            self.pool,
            self.address,
            host,
            lambda *what: self.done.append(what),
            self.landed.put,
            on_broken=lambda *what: None,
        )
        self.info = WorkerInfo(self.address, "any", host, "", self.transfer.info, 16, 8, 1024)

    def array(self) -> NDArray[np.uint8]:
        """The pages, as they lie in what stands for the device."""
        whole = self.driver.arrays[self.pool.address]
        return whole[self.pool.info.offset :].reshape(LAYERS, PAGES, PAGE_BYTES)

    def probe(self, peer: WorkerInfo) -> Probe:
        opened = self.transfer.connect(peer)
        return Probe(opened.kind, opened.nbytes, opened.checksum, opened.seconds, opened.note)

    def push(self, peer: Address, source: tuple[int, ...], target: tuple[int, ...], serial: int = 0) -> Push:
        return Push(serial, AttemptId(peer.incarnation, RequestId(7, serial), 1), peer, source, target, True)

    def send(self, push: Push) -> None:
        for layer in range(LAYERS):
            self.transfer.push(layer, push)
        self.transfer.end(push)


@pytest.fixture(autouse=True)
def small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of the self-test move nothing that a test looks at."""
    monkeypatch.setattr("cbdisagg.transfer.cuda_ipc.TRIAL_BYTES", 1 << 16)


@pytest.fixture
def new_worker(tmp_path: Path) -> Iterator[Callable[..., Worker]]:
    made: list[Worker] = []
    exports: dict[bytes, int] = {}

    def make(**settings: Any) -> Worker:
        made.append(Worker(tmp_path, exports, **settings))
        return made[-1]

    yield make
    for worker in made:
        worker.transfer.close()
        worker.pool.close()
        assert not worker.driver.opened and not worker.driver.arrays


NewWorker = Callable[..., Worker]


def test_a_pair_is_tested_and_its_speed_is_known(new_worker: NewWorker) -> None:
    p, d = new_worker(), new_worker()
    seen = d.transfer.verify(p.address, p.probe(d.info))
    assert (seen.kind, seen.note) == ("cuda_ipc", "")
    assert seen.bytes_per_s > 0


def test_pages_arrive_layer_by_layer_where_the_receiver_wants_them(new_worker: NewWorker) -> None:
    p, d = new_worker(), new_worker()
    p.probe(d.info)
    push = p.push(d.address, (1, 2, 9), (4, 5, 0))
    after = d.array().copy()
    for layer in range(LAYERS):
        p.driver.calls.clear()
        p.transfer.push(layer, push)
        after[layer, [4, 5, 0]] = p.array()[layer, [1, 2, 9]]
        assert (d.array() == after).all()
        assert p.driver.calls[:3] == ["follow", "copy", "copy"]  # behind the step's kernels, one copy for each run
        assert "wait" not in p.driver.calls
    assert not p.done
    p.transfer.end(push)
    assert p.driver.calls[-1] == "wait"
    [(serial, kind, nbytes, _)] = p.done
    assert (serial, kind, nbytes) == (0, "cuda_ipc", 3 * LAYERS * PAGE_BYTES)
    assert not p.transfer._costs and not p.transfer._ways[d.address.incarnation].link._prepared  # nothing is kept of it


def test_steps_end_in_another_thread_than_the_one_that_pushes(new_worker: NewWorker) -> None:
    """The next step's push is queued before the first one's end."""
    p, d = new_worker(), new_worker()
    p.probe(d.info)
    first, second = p.push(d.address, (1,), (1,), 1), p.push(d.address, (2,), (2,), 2)
    for push in (first, second):
        for layer in range(LAYERS):
            p.transfer.push(layer, push)
    thread = threading.Thread(target=lambda: (p.transfer.end(first), p.transfer.end(second)))
    thread.start()
    thread.join()
    assert [done[0] for done in p.done] == [1, 2]
    assert (d.array()[:, [1, 2]] == p.array()[:, [1, 2]]).all()


def test_a_peer_that_has_died_is_closed_and_gets_nothing_more(new_worker: NewWorker) -> None:
    p, d = new_worker(), new_worker()
    p.probe(d.info)
    push = p.push(d.address, (1,), (1,))
    p.transfer.push(0, push)
    before = d.array().copy()
    p.driver.calls.clear()
    p.transfer.disconnect(d.address)
    assert "wait" in p.driver.calls  # for copies in flight, before the memory is closed
    assert not p.driver.opened
    p.transfer.push(1, push)
    p.transfer.push(2, push)
    p.transfer.end(push)
    assert (d.array() == before).all()
    assert len(p.done) == 1


def test_a_successor_is_opened_anew_and_what_was_for_its_predecessor_goes_nowhere(new_worker: NewWorker) -> None:
    p, old = new_worker(), new_worker(name="d")
    p.probe(old.info)
    p.transfer.disconnect(old.address)
    new = new_worker(name="d")
    assert p.probe(new.info).kind == "cuda_ipc"
    before = new.array().copy()
    p.send(p.push(old.address, (1,), (1,), 1))
    assert (new.array() == before).all()
    assert p.done == [(1, "", 0, 0.0)]
    p.send(p.push(new.address, (1,), (3,), 2))
    assert (new.array()[:, 3] == p.array()[:, 1]).all()
    assert "gone" in p.probe(old.info).note


def test_another_pool_under_a_known_handle_is_noticed(new_worker: NewWorker) -> None:
    p, d = new_worker(kind="cuda_ipc"), new_worker()
    wrong = msgspec.structs.replace(d.info, pool=msgspec.structs.replace(d.info.pool, nonce="0" * 32))
    probe = p.probe(wrong)
    assert probe.kind == "" and "nonce differs" in probe.note
    assert not p.driver.opened
    other = msgspec.structs.replace(d.info, pool=msgspec.structs.replace(d.info.pool, page_bytes=1024))
    assert "another layout" in p.probe(other).note


@pytest.mark.parametrize(
    ("how", "why"), [({"reachable": False}, "peer access is not supported"), ({"host": "there"}, "is on another host")]
)
def test_without_access_pages_go_through_the_host_and_it_is_said(
    new_worker: NewWorker, how: dict[str, Any], why: str
) -> None:
    p, d = new_worker(**how), new_worker()
    probe = p.probe(d.info)
    assert probe.kind == "zmq" and why in probe.note
    assert d.transfer.verify(p.address, probe).note == probe.note
    push = p.push(d.address, (1, 2, 9), (4, 5, 0))
    wanted = p.array()[:, [1, 2, 9]].copy()
    d.transfer.expect(push.attempt, p.address, push.target)
    p.send(push)
    p.array()[:] = 0
    assert d.landed.get(timeout=10) == push.attempt
    assert (d.array()[:, [4, 5, 0]] == wanted).all()
    assert "follow" in p.driver.calls  # the step's kernels come first
    assert new_worker(kind="cuda_ipc", **how).probe(d.info).kind == ""


def failing(call: str) -> Callable[..., int]:
    def fail(*arguments: Any) -> int:
        raise DriverError(call, 801, "operation not supported")

    return fail


@pytest.mark.parametrize(
    ("whose", "call"),
    [
        ("d", "export"),
        *(("p", call) for call in ("open", "stream", "read", "mark", "wait", "write", "copy")),
    ],
)
def test_whatever_call_fails_pages_go_through_the_host_and_it_is_said(
    new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch, whose: str, call: str
) -> None:
    with monkeypatch.context() as broken:
        if whose == "d":
            broken.setattr(FakeDriver, call, failing(call))
        p, d = new_worker(), new_worker()
        forced = new_worker(kind="cuda_ipc")
        if whose == "p":
            for worker in (p, forced):
                broken.setattr(worker.driver, call, failing(call))
        probe = p.probe(d.info)
        assert forced.probe(d.info).kind == ""
    assert probe.kind == "zmq" and f"cuda_ipc: {'' if whose == 'p' else 'the KV of '}" in probe.note
    assert probe.note.endswith(f"{call}: operation not supported (801)")
    assert not p.driver.opened and not forced.driver.opened
    assert len(p.driver.arrays) == 1  # of the test nothing is left
    assert d.transfer.verify(p.address, probe).kind == "zmq"
    push = p.push(d.address, (1, 2, 9), (4, 5, 0))
    wanted = p.array()[:, [1, 2, 9]].copy()
    d.transfer.expect(push.attempt, p.address, push.target)
    p.send(push)
    assert d.landed.get(timeout=10) == push.attempt
    assert (d.array()[:, [4, 5, 0]] == wanted).all()
    assert p.done[0][1] == "zmq"  # which the metric of moved bytes is labelled with


def test_a_pool_on_the_host_is_none_on_a_gpu(new_worker: NewWorker) -> None:
    d = new_worker()
    hosted = msgspec.structs.replace(d.info, pool=msgspec.structs.replace(d.info.pool, handle=b""))
    assert "not on a GPU" in new_worker(kind="cuda_ipc").probe(hosted).note
    assert d.transfer.verify(Address("p", 1, ""), Probe("shm", 1, 1, 1.0)).kind == ""


def test_damaged_and_slow_pairs_are_not_used(new_worker: NewWorker) -> None:
    p, d = new_worker(), new_worker(floor_gbps=1e9)
    probe = p.probe(d.info)
    assert "below transfer.floor_gbps" in d.transfer.verify(p.address, probe).note
    assert "did not reach" in d.transfer.verify(p.address, probe).note  # it has been cleared
    q = new_worker()
    damaged = msgspec.structs.replace(q.probe(d.info), checksum=0)
    assert d.transfer.verify(q.address, damaged).kind == ""


def test_what_copies_pages_is_what_is_tested(new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it would be if what the copier takes for the peer's memory were a copy of it."""
    p, d = new_worker(), new_worker()
    copies = RunCopier.copy

    def elsewhere(self: RunCopier, source: int, target: int, prepared: Any, stream: int) -> None:
        astray = np.empty(d.pool.info.offset + (1 + SEATS) * PAGE_BYTES, np.uint8)
        copies(self, source, astray.ctypes.data, prepared, stream)

    monkeypatch.setattr(RunCopier, "copy", elsewhere)
    seen = d.transfer.verify(p.address, p.probe(d.info))
    assert seen.kind == "" and "did not reach" in seen.note


def test_patterns_of_several_senders_do_not_hide_each_other(
    new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seats are drawn from few: as long as one of its four is left, a sender is seen."""
    monkeypatch.setattr(cuda_pool, "SEATS", 64)
    d, senders = new_worker(), [new_worker() for _ in range(6)]
    probes = [p.probe(d.info) for p in senders]
    assert {d.transfer.verify(p.address, probe).kind for p, probe in zip(senders, probes, strict=True)} == {"cuda_ipc"}


def test_seats_lie_between_what_is_sent_and_the_pages() -> None:
    places = {seat for incarnation in range(2_000) for seat in seats(incarnation)}
    assert places == set(range(1, 1 + SEATS))
    assert all(len(set(seats(incarnation))) == len(seats(incarnation)) for incarnation in range(2_000))


def test_the_host_sees_pages_as_an_array(new_worker: NewWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_pool, "BOUNCE_BYTES", 3 * PAGE_BYTES)
    worker = new_worker()
    view, array = worker.pool.pages, worker.array()
    assert view.shape == array.shape
    assert (view[1][4:12] == array[1, 4:12]).all() and (view[2][19] == array[2, 19]).all()
    view[0][2:9] = array[1, 2:9]
    assert (array[0, 2:9] == array[1, 2:9]).all()
    with pytest.raises(IndexError):
        view[LAYERS]
    checksums = page_checksums(view, (3, 17))
    assert checksums == page_checksums(array, (3, 17))
    array[1, 17] ^= 1
    assert damaged_pages(view, (3, 17), checksums) == (17,)
    memory = worker.pool.memory.__cuda_array_interface__
    assert memory["shape"] == (LAYERS, PAGES, PAGE_BYTES) and memory["data"][0] == array.ctypes.data


def test_too_little_memory_is_said_in_numbers() -> None:
    class Full(FakeDriver):
        def allocate(self, nbytes: int) -> int:
            raise DriverError("cuMemAlloc", OUT_OF_MEMORY, "out of memory")

    with pytest.raises(ConfigError, match=r"needs 1,2\d\d MiB \(32 pages\); 100 of the GPU's 100 MiB are free: lower"):
        create_device_pool(Full({}, 100 << 20), Address("d", 1, ""), 32, 32, 1 << 20, 0)


# ------------------------------------------------------------------------------------------------ the real driver


class Library:
    """Stands for libcuda: remembers what is called; whoever asks for a number gets 4096; one call may fail."""

    def __init__(self, fails: str = "") -> None:
        self.fails, self.calls = fails, list[tuple[str, tuple[Any, ...]]]()

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append((name, arguments))
            for each in arguments:
                if name in ("cuMemAlloc_v2", "cuIpcOpenMemHandle_v2", "cuStreamCreate", "cuEventCreate") and hasattr(
                    each, "_obj"
                ):
                    each._obj.value = 4096
            return 2 if name == self.fails else 0

        return call


def test_the_driver_is_called_in_its_context_with_what_it_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    library = Library()
    monkeypatch.setattr("cbdisagg.transfer.cuda_driver.ctypes.CDLL", lambda name: library)
    driver, page = CudaDriver(1), np.arange(8, dtype=np.uint8)
    assert (driver.allocate(100), driver.stream(), driver.mark(3), driver.memory()) == (4096, 4096, 4096, (0, 0))
    handle = driver.export(4096)
    assert len(handle) == 64 and driver.open(handle) == 4096
    driver.follow(1, 2)
    driver.wait(5)
    driver.copy(1, 2, 3, 4)
    driver.read(page, 7, 4)
    driver.write(7, page, 4)
    driver.close(4096)
    driver.end_stream(4)
    driver.free(4096)
    names = [name for name, _ in library.calls]
    assert all(names[n - 1] == "cuCtxSetCurrent" for n in range(4, len(names)) if names[n] != "cuCtxSetCurrent")
    by_name = dict(library.calls)
    assert [each.value for each in by_name["cuMemcpyDtoDAsync_v2"]] == [1, 2, 3, 4]
    assert [each.value for each in by_name["cuMemcpyDtoHAsync_v2"]] == [page.ctypes.data, 7, 8, 4]
    assert [each.value for each in by_name["cuMemcpyHtoDAsync_v2"]] == [7, page.ctypes.data, 8, 4]
    with pytest.raises(LinkFailed, match="3 bytes"):
        driver.open(b"abc")


def test_what_fails_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cbdisagg.transfer.cuda_driver.ctypes.CDLL", lambda name: Library("cuMemAlloc_v2"))
    with pytest.raises(DriverError, match=r"cuMemAlloc_v2: unknown error \(2\)") as failed:
        CudaDriver(0).allocate(1)
    assert failed.value.code == OUT_OF_MEMORY

    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr("cbdisagg.transfer.cuda_driver.ctypes.CDLL", missing)
    with pytest.raises(LinkFailed, match=r"no NVIDIA driver here: libcuda\.so\.1"):
        CudaDriver(0)
