"""Gathering and placing, without sockets: what leaves one pool is what arrives in the other, and nothing else does."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from contextlib import AbstractContextManager

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from cbdisagg.messages import Address, AttemptId, Push, RequestId, pack
from cbdisagg.transfer import boxes
from cbdisagg.transfer.boxes import Box, Buffers, Gatherer, Message, decode_header, encode_header
from cbdisagg.transfer.landing import Dropped, Landing
from cbdisagg.transfer.runs import Run, copy_runs, merge_runs

P, D = 11, 22
ATTEMPT = AttemptId(D, RequestId(1, 2), 3)
PAGES = 12


def random_pool(seed: int, layers: int = 4, page_bytes: int = 64) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (layers, PAGES, page_bytes), np.uint8)


def push_of(source: list[int], target: list[int]) -> Push:
    return Push(0, ATTEMPT, Address("d", D, ""), tuple(source), tuple(target), True)


def gather(push: Push, pool: NDArray[np.uint8], buffers: Buffers) -> Iterator[Message]:
    gatherer = Gatherer(P, push, pool, buffers)
    for layer in range(len(pool)):
        yield from gatherer.add(layer)
    yield from gatherer.rest()


def test_neighbours_become_one_run() -> None:
    assert merge_runs([4, 5, 6, 1, 3, 4], [0, 1, 2, 3, 8, 9]) == [Run(4, 0, 3), Run(1, 3, 1), Run(3, 8, 2)]
    assert merge_runs([4, 3], [0, 1]) == [Run(4, 0, 1), Run(3, 1, 1)]
    assert merge_runs([], []) == []
    with pytest.raises(ValueError, match="zip"):
        merge_runs([1, 2], [1])


page_lists = st.permutations(range(PAGES)).flatmap(lambda p: st.integers(1, PAGES).map(lambda n: p[:n]))


@given(source=page_lists, data=st.data())
def test_runs_copy_what_single_pages_would(source: list[int], data: st.DataObject) -> None:
    target = data.draw(st.permutations(range(PAGES)))[: len(source)]
    ours, theirs = random_pool(1)[0], random_pool(2)[0]
    wanted = theirs.copy()
    wanted[target] = ours[source]
    copy_runs(merge_runs(source, target), ours, theirs)
    assert (theirs == wanted).all()


@settings(deadline=None)
@given(
    source=page_lists,
    data=st.data(),
    layers=st.integers(1, 5),
    box_bytes=st.sampled_from([1, 64, 200, 1000, 10_000]),
    max_bytes=st.sampled_from([1, 64, 130, 640, 10_000]),
)
def test_boxes_carry_a_push_whatever_their_size(
    source: list[int], data: st.DataObject, layers: int, box_bytes: int, max_bytes: int
) -> None:
    """In any order of arrival: only the last box completes the attempt, and only the target pages are written."""
    target = data.draw(st.permutations(range(PAGES)))[: len(source)]
    ours, theirs = random_pool(1, layers), random_pool(2, layers)
    wanted = theirs.copy()
    wanted[:, target] = ours[:, source]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boxes, "BOX_BYTES", min(box_bytes, max_bytes))
        patch.setattr(boxes, "BOX_MAX_BYTES", 2 * max_bytes)
        sent = [
            (header, payload.tobytes())
            for header, payload in gather(push_of(source, target), ours, Buffers(ours.shape[2]))
        ]
    landing = Landing(D, theirs)
    landing.expect(ATTEMPT, P, tuple(target))
    order = data.draw(st.permutations(sent))
    complete = []
    for header, payload in order:
        assert len(payload) <= max(2 * max_bytes, ours.shape[2])
        received = decode_header(encode_header(header))
        assert isinstance(received, Box)
        complete.append(landing.place(received, np.frombuffer(payload, np.uint8)))
    assert complete == [False] * (len(sent) - 1) + [True]
    assert (theirs == wanted).all()


def test_layers_are_gathered_into_few_boxes() -> None:
    pool = np.zeros((30, 8, 12_288), np.uint8)
    push = push_of(list(range(8)), list(range(8)))
    sizes = [payload.nbytes for _, payload in gather(push, pool, Buffers(12_288))]
    assert len(sizes) == 3
    assert max(sizes) < boxes.BOX_MAX_BYTES


def test_a_gathered_box_is_private_and_its_memory_is_used_again_once_it_is_dropped() -> None:
    pool = random_pool(1)
    buffers = Buffers(pool.shape[2])
    kept = list(gather(push_of([1, 2], [3, 4]), pool, buffers))
    before = [payload.copy() for _, payload in kept]
    pool[:] = 0
    list(gather(push_of([5, 6], [3, 4]), pool, buffers))
    assert all((payload == old).all() for (_, payload), old in zip(kept, before, strict=True))
    memory = kept[0][1].base
    del kept
    gc.collect()
    again = [payload.base for _, payload in gather(push_of([5], [3]), pool, buffers)]
    assert any(base is memory for base in again)


def test_an_empty_push_sends_nothing() -> None:
    pool = random_pool(1)
    assert list(gather(push_of([], []), pool, Buffers(pool.shape[2]))) == []


GOOD = Box(P, D, ATTEMPT, 1, 2, pack([3, 4]))


@pytest.mark.parametrize(
    ("box", "reason"),
    [
        (msgspec.structs.replace(GOOD, addressee=D - 1), "incarnation"),
        (msgspec.structs.replace(GOOD, attempt=ATTEMPT._replace(decode=D - 1)), "incarnation"),
        (msgspec.structs.replace(GOOD, attempt=ATTEMPT._replace(n=2)), "an attempt that is not expected"),
        (msgspec.structs.replace(GOOD, sender=P + 1), "another sender"),
        (msgspec.structs.replace(GOOD, pages=pack([3, 6])), "pages that are not expected"),
        (msgspec.structs.replace(GOOD, pages=pack([3, -1])), "pages that are not expected"),
        (msgspec.structs.replace(GOOD, pages=pack([3, 3])), "malformed"),
        (msgspec.structs.replace(GOOD, pages=pack([3, 4])[:-1]), "malformed"),
        (msgspec.structs.replace(GOOD, pages=pack([3])), "malformed"),
        (msgspec.structs.replace(GOOD, pages=b""), "malformed"),
        (msgspec.structs.replace(GOOD, layer=-1), "malformed"),
        (msgspec.structs.replace(GOOD, layer=3), "malformed"),
        (msgspec.structs.replace(GOOD, layers=0), "malformed"),
        (msgspec.structs.replace(GOOD, layers=2**40), "malformed"),
    ],
)
def test_what_does_not_fit_is_dropped(box: Box, reason: str) -> None:
    pool = random_pool(2)
    before, payload = pool.copy(), np.zeros(2 * 2 * 64, np.uint8)
    landing = Landing(D, pool)
    landing.expect(ATTEMPT, P, (3, 4, 5))
    with pytest.raises(Dropped, match=reason):
        landing.place(box, payload)
    assert (pool == before).all()
    assert landing.place(GOOD, payload) is False


def test_a_duplicate_changes_nothing_before_or_after_completion() -> None:
    pool = random_pool(2, layers=2)
    landing = Landing(D, pool)
    landing.expect(ATTEMPT, P, (3, 4))
    first, second = (Box(P, D, ATTEMPT, layer, 1, pack([3, 4])) for layer in (0, 1))
    ones, twos = np.full(128, 1, np.uint8), np.full(128, 2, np.uint8)
    assert landing.place(first, ones) is False
    with pytest.raises(Dropped, match="duplicate"):
        landing.place(first, twos)
    overlap = Box(P, D, ATTEMPT, 0, 2, pack([4]))
    with pytest.raises(Dropped, match="duplicate"):
        landing.place(overlap, twos)
    assert landing.place(second, ones) is True
    with pytest.raises(Dropped, match="not expected"):
        landing.place(second, twos)
    assert (pool[:, 3:5] == 1).all()


@pytest.mark.parametrize("end", ["forget", "forget_source"])
def test_nothing_is_written_after_an_attempt_is_forgotten(end: str) -> None:
    pool = random_pool(2)
    landing = Landing(D, pool)
    landing.expect(ATTEMPT, P, (3, 4))
    other = ATTEMPT._replace(n=9)
    landing.expect(other, P + 1, (7, 8))
    landing.place(GOOD, np.zeros(256, np.uint8))
    before = pool.copy()
    if end == "forget":
        landing.forget(ATTEMPT)
    else:
        landing.forget_source(P)
    with pytest.raises(Dropped, match="not expected"):
        landing.place(msgspec.structs.replace(GOOD, layer=0, layers=1), np.ones(128, np.uint8))
    assert (pool == before).all()
    assert landing.place(Box(P + 1, D, other, 0, 1, pack([7, 8])), np.ones(128, np.uint8)) is False


def test_forgetting_takes_effect_between_two_layers_of_a_box() -> None:
    pool = random_pool(2)
    before, landing = pool.copy(), Landing(D, pool)
    landing.expect(ATTEMPT, P, (3, 4))

    class ForgetAfterOneLayer(AbstractContextManager[None]):
        """In place of the lock: as if another thread took it right after the first layer."""

        exits = 0

        def __exit__(self, *_: object) -> None:
            self.exits += 1
            if self.exits == 2:  # the first was to check the box
                landing._expected.clear()

    landing._lock = ForgetAfterOneLayer()
    with pytest.raises(Dropped, match="not expected"):
        landing.place(GOOD, np.zeros(256, np.uint8))
    assert (pool[GOOD.layer, 3:5] == 0).all()
    assert (pool[GOOD.layer + 1] == before[GOOD.layer + 1]).all()


@given(st.binary(max_size=200))
def test_any_bytes_are_a_header_or_a_decode_error(junk: bytes) -> None:
    with contextlib.suppress(msgspec.DecodeError):
        decode_header(junk)
