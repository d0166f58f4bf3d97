"""What is pushed with its checksums has arrived, or the pages that have not are named, whatever came between."""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdisagg.actors.hands import EngineHands, Lanes
from cbdisagg.actors.lane import Lane
from cbdisagg.core.effects import Check, RunStep
from cbdisagg.core.events import Checked, StepDone, WorkerEvent
from cbdisagg.engine.fake import FakeRunner
from cbdisagg.messages import Admit, AttemptId, Push, Sampling, Slice, StepPlan, pack
from cbdisagg.transfer.base import Transfer
from cbdisagg.transfer.checksums import damaged_pages, page_checksums

if TYPE_CHECKING:
    from conftest import Worker

NewWorker = Callable[..., "Worker"]
PAGES = (3, 0, 7, 4)


def test_the_checksum_of_a_page_is_the_crc32_of_its_bytes_layer_by_layer() -> None:
    pool = np.random.default_rng(1).integers(0, 256, (3, 8, 64), np.uint8)
    sums = [zlib.crc32(pool[:, page].tobytes()).to_bytes(4, "little") for page in PAGES]
    assert page_checksums(pool, PAGES) == b"".join(sums)
    assert page_checksums(pool, ()) == b""


@given(
    layer=st.integers(0, 2),
    page=st.integers(0, 7),
    at=st.integers(0, 63),
    bit=st.integers(0, 7),
    count=st.integers(0, 8),
)
def test_one_flipped_bit_names_its_page_alone(layer: int, page: int, at: int, bit: int, count: int) -> None:
    pool = np.random.default_rng(1).integers(0, 256, (3, 8, 64), np.uint8)
    pages = [5, 2, 7, 0, 1, 6, 3, 4][:count]
    checksums = page_checksums(pool, pages)
    assert damaged_pages(pool, pages, checksums) == ()
    pool[layer, page, at] ^= 1 << bit
    assert damaged_pages(pool, pages, checksums) == ((page,) if page in pages else ())


@pytest.mark.parametrize("wrong", [b"", b"1234", b"x" * 15, b"x" * 17, b"x" * 20])
def test_with_another_number_of_checksums_no_page_is_vouched_for(wrong: bytes) -> None:
    assert damaged_pages(np.zeros((3, 8, 64), np.uint8), PAGES, wrong) == PAGES


class Tampering:
    """A transfer that flips a bit in the sender's pool while one layer is pushed, and back: as a faulty link would."""

    def __init__(self, worker: Worker, layer: int, page: int) -> None:
        self._transfer: Transfer = worker.transfer
        self._pages, self._where = worker.pages, (layer, page, 100)

    def push(self, layer: int, push: Push) -> None:
        tampers = layer == self._where[0]
        self._pages[self._where] ^= tampers
        self._transfer.push(layer, push)
        self._pages[self._where] ^= tampers

    def end(self, push: Push) -> None:
        self._transfer.end(push)


class Steps:
    """The hands of a worker with a fake model, and the events that they put."""

    def __init__(self, worker: Worker, transfer: Transfer, lanes: Lanes, checksums: bool = True) -> None:
        self._events: list[WorkerEvent] = []
        self._come = threading.Semaphore(0)
        runner = FakeRunner(layers=worker.pages.shape[0], page_size=16)
        self.hands = EngineHands(runner, transfer, worker.pool, lanes, self._put, checksums=checksums)

    def _put(self, event: WorkerEvent) -> None:
        self._events.append(event)
        self._come.release()

    def event(self) -> WorkerEvent:
        """The next one."""
        assert self._come.acquire(timeout=20)
        return self._events.pop(0)

    def push(self, push: Push) -> StepDone:
        prompt = pack(range(16 * len(push.source)))
        admit = Admit(0, prompt, b"", push.source, Sampling(max_tokens=1, temperature=0.0))
        plan = StepPlan(1, (), (admit,), (), (Slice(0, 0, len(prompt) // 4, 1, push=push),))
        self.hands.perform(RunStep(plan))
        done = self.event()
        assert isinstance(done, StepDone)
        return done

    def check(self, attempt: AttemptId, pages: tuple[int, ...], checksums: bytes) -> Checked:
        self.hands.perform(Check(attempt, pages, checksums))
        checked = self.event()
        assert isinstance(checked, Checked)
        return checked


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    errors: list[BaseException] = []
    yield Lanes(*(Lane(name, errors.append) for name in ("steps", "ways", "checks")))
    assert not errors


@pytest.mark.parametrize("tampered", [None, 7])
@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_a_page_damaged_on_its_way_is_named(
    new_worker: NewWorker, lanes: Lanes, kind: str, tampered: int | None
) -> None:
    p, d = new_worker(kind=kind), new_worker(kind=kind)
    assert p.pair_with(d).kind == kind
    target = (9, 11, 10, 2)
    push = p.push_to(d, PAGES, target)
    d.transfer.expect(push.attempt, p.address, target)
    transfer = p.transfer if tampered is None else Tampering(p, layer=2, page=tampered)
    done = Steps(p, transfer, lanes).push(push)
    assert done.checksums == ((push.serial, page_checksums(p.pages, PAGES)),)
    if kind == "zmq":
        assert d.landed.get(timeout=20) == push.attempt
    checked = Steps(d, d.transfer, lanes).check(push.attempt, target, done.checksums[0][1])
    assert checked == Checked(push.attempt, () if tampered is None else (target[PAGES.index(tampered)],))


def test_the_checksums_are_of_what_was_pushed_even_if_the_pages_are_reused_at_once(
    new_worker: NewWorker, lanes: Lanes
) -> None:
    """PushDone frees the pages; by the time that StepDone is put they may hold somebody else's data."""
    p, d = new_worker(kind="shm"), new_worker(kind="shm")
    p.pair_with(d)
    push = p.push_to(d, PAGES, PAGES)
    wanted = page_checksums(p.pages, PAGES)

    class Reused(Tampering):
        def push(self, layer: int, push: Push) -> None:
            self._transfer.push(layer, push)

        def end(self, push: Push) -> None:
            self._transfer.end(push)
            p.pages[:] = 0

    assert Steps(p, Reused(p, 0, 0), lanes).push(push).checksums == ((push.serial, wanted),)


def test_without_the_flag_no_checksum_is_computed(new_worker: NewWorker, lanes: Lanes) -> None:
    p, d = new_worker(kind="shm"), new_worker(kind="shm")
    p.pair_with(d)
    assert Steps(p, p.transfer, lanes, checksums=False).push(p.push_to(d, PAGES, PAGES)).checksums == ()
