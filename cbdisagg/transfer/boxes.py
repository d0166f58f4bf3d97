"""What travels on a data socket: boxes of KV and trial messages, and how a push is gathered into boxes.

Knows the layout of a message; no sockets, no threads. Each message has two frames: a header (`Box` or `Trial`,
msgpack) and raw bytes. A box is self-contained: [layers][pages][page_bytes], with the receiver's page numbers, so
boxes can be checked and placed one by one, in any order. Boxes of 1 to 4 MiB are where sockets are fastest: small
layers are gathered until they fill one, large ones are split by pages.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import TypeAlias

import msgspec
import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from cbdisagg.messages import AttemptId, Push, pack
from cbdisagg.transfer.runs import Run, copy_runs, merge_runs

BOX_BYTES = 1 << 20
"""Layers are gathered until a box holds this much."""
BOX_MAX_BYTES = 4 << 20
"""A layer of more than this is split."""


class Box(Struct, frozen=True, array_like=True, tag=True):
    """KV of `layers` layers from `layer` on, for the receiver's `pages` (int32 bytes) in each of them."""

    sender: int
    addressee: int
    attempt: AttemptId
    layer: int
    layers: int
    pages: bytes


class Trial(Struct, frozen=True, array_like=True, tag=True):
    """Message `number` of `count` in round `round` of `rounds` of a sender's self-test."""

    sender: int
    addressee: int
    round: int
    rounds: int
    number: int
    count: int


Header: TypeAlias = Box | Trial
Message: TypeAlias = tuple[Header, NDArray[np.uint8]]

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Header)


def encode_header(header: Header) -> bytes:
    return _encoder.encode(header)


def decode_header(data: bytes | memoryview) -> Header:
    """Raises msgspec.DecodeError on anything that is not a header."""
    try:
        return _decoder.decode(data)
    except RecursionError as error:  # unknown fields are skipped, and may be nested without end
        raise msgspec.DecodeError("nested too deep") from error


class Buffers:
    """Memory for boxes, used again once nobody holds the box: page faults of fresh memory cost more than the copy."""

    def __init__(self, page_bytes: int) -> None:
        self._capacity = max(BOX_MAX_BYTES, page_bytes)
        self._free: list[NDArray[np.uint8]] = []

    def take(self, layers: int, pages: int, page_bytes: int) -> NDArray[np.uint8]:
        """Private memory of this shape, at most BOX_MAX_BYTES or one page."""
        whole = self._free.pop() if self._free else np.empty(self._capacity, np.uint8)
        return whole[: layers * pages * page_bytes].reshape(layers, pages, page_bytes)

    def seal(self, box: NDArray[np.uint8], layers: int) -> NDArray[np.uint8]:
        """The first layers of what `take` gave, filled: when the last reference to the result goes, so does the box."""
        whole, sealed = box.base, box[:layers]
        assert whole is not None
        weakref.finalize(sealed, self._free.append, whole).atexit = False
        return sealed


class Gatherer:
    """Copies one push out of the pool, layer by layer, into boxes. What it yields is private: the pages are free
    again.
    """

    def __init__(self, sender: int, push: Push, pool: NDArray[np.uint8], buffers: Buffers) -> None:
        """`pool` has shape [layers, pages, page_bytes]."""
        self._sender, self._push, self._pool, self._buffers = sender, push, pool, buffers
        page_bytes = pool.shape[2]
        pages_per_box = max(1, BOX_MAX_BYTES // page_bytes)
        self._parts = [
            _Part(push.source[n : n + pages_per_box], push.target[n : n + pages_per_box])
            for n in range(0, len(push.source), pages_per_box)
        ]
        self._layers_per_box = max(1, -(-BOX_BYTES // max(1, len(push.source) * page_bytes)))
        self._box: NDArray[np.uint8] | None = None
        self._first, self._filled = 0, 0

    def add(self, layer: int) -> Iterator[Message]:
        """Gather one layer; yields the boxes that it completes."""
        if len(self._parts) > 1:
            for part in self._parts:
                yield self._gather_alone(layer, part)
            return
        if self._filled and layer != self._first + self._filled:  # a box holds neighbouring layers
            yield from self.rest()
        for part in self._parts:
            if self._box is None:
                layers = min(self._layers_per_box, self._pool.shape[0] - layer)
                self._box = self._buffers.take(layers, len(self._push.source), self._pool.shape[2])
                self._first = layer
            copy_runs(part.runs, self._pool[layer], self._box[self._filled])
            self._filled += 1
            if self._filled == len(self._box):
                yield from self.rest()

    def rest(self) -> Iterator[Message]:
        """The box that is not full."""
        if self._box is not None:
            box, layers = self._buffers.seal(self._box, self._filled), self._filled
            self._box, self._filled = None, 0
            yield self._header(self._first, layers, self._parts[0].target), box

    def _gather_alone(self, layer: int, part: _Part) -> Message:
        box = self._buffers.take(1, part.count, self._pool.shape[2])
        copy_runs(part.runs, self._pool[layer], box[0])
        return self._header(layer, 1, part.target), self._buffers.seal(box, 1)

    def _header(self, layer: int, layers: int, target: bytes) -> Box:
        return Box(self._sender, self._push.to.incarnation, self._push.attempt, layer, layers, target)


class _Part:
    """Some of a push's pages: where they lie, as runs, and where the receiver wants them."""

    def __init__(self, source: tuple[int, ...], target: tuple[int, ...]) -> None:
        self.count = len(source)
        self.runs: list[Run] = merge_runs(source, range(len(source)))
        self.target = pack(target)
