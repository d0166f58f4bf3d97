"""What a receiver lets into its pool, and when an attempt is complete. Rule 4: data are checked where they land.

Knows attempts, pages and layers; no sockets. Life of an attempt: `expect` -> `place`, box by box -> complete
(nothing more is let in) or `forget`. A box that does not fit is dropped whole. Once `forget` or `forget_source` has
returned, no byte of that attempt is written any more: placing holds the lock for one layer at a time, and looks
again before each.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbdisagg.messages import AttemptId, unpack
from cbdisagg.transfer.boxes import Box
from cbdisagg.transfer.runs import copy_runs, merge_runs


class Dropped(Exception):
    """A box was not placed; the message is the reason, from a fixed set."""


@dataclass(slots=True)
class _Expected:
    source: int  # the incarnation that may send
    rows: dict[int, int]  # page -> row of `landed`
    landed: NDArray[np.bool_]  # [pages, layers]
    missing: int


class Landing:
    def __init__(self, incarnation: int, pool: NDArray[np.uint8]) -> None:
        """`incarnation` is the receiver's own; `pool` has shape [layers, pages, page_bytes]."""
        self._incarnation, self._pool = incarnation, pool
        self._lock = threading.Lock()
        self._expected: dict[AttemptId, _Expected] = {}

    def expect(self, attempt: AttemptId, source: int, pages: tuple[int, ...]) -> None:
        layers = self._pool.shape[0]
        rows = {page: row for row, page in enumerate(pages)}
        expected = _Expected(source, rows, np.zeros((len(rows), layers), np.bool_), len(rows) * layers)
        with self._lock:
            self._expected[attempt] = expected

    def forget(self, attempt: AttemptId) -> None:
        with self._lock:
            self._expected.pop(attempt, None)

    def forget_source(self, source: int) -> None:
        """Forget every attempt of a sender that has died."""
        with self._lock:
            for attempt in [a for a, expected in self._expected.items() if expected.source == source]:
                del self._expected[attempt]

    def place(self, box: Box, payload: NDArray[np.uint8]) -> bool:
        """Write a box into the pool; True if it completed its attempt. Raises Dropped if it may not be written.

        Called from one thread only.
        """
        layers, _, page_bytes = self._pool.shape
        if box.addressee != self._incarnation or box.attempt.decode != self._incarnation:
            raise Dropped("addressed to another incarnation")
        if len(box.pages) % 4 or not box.pages or not 0 <= box.layer < box.layer + box.layers <= layers:
            raise Dropped("malformed")
        pages = unpack(box.pages)
        if payload.size != box.layers * len(pages) * page_bytes or len(set(pages)) < len(pages):
            raise Dropped("malformed")
        runs = merge_runs(range(len(pages)), pages)
        blocks = payload.reshape(box.layers, len(pages), page_bytes)
        with self._lock:
            expected = self._check(box, pages)
        rows = [expected.rows[page] for page in pages]
        for layer in range(box.layer, box.layer + box.layers):
            with self._lock:
                if self._expected.get(box.attempt) is not expected:
                    raise Dropped("of an attempt that is not expected")
                copy_runs(runs, blocks[layer - box.layer], self._pool[layer])
                expected.landed[rows, layer] = True
                expected.missing -= len(rows)
                if not expected.missing:
                    del self._expected[box.attempt]
                    return True
        return False

    def _check(self, box: Box, pages: Iterable[int]) -> _Expected:
        """What is still expected of the box's attempt; Dropped unless all of the box belongs to it."""
        expected = self._expected.get(box.attempt)
        if expected is None:
            raise Dropped("of an attempt that is not expected")
        if expected.source != box.sender:
            raise Dropped("from another sender than expected")
        if not expected.rows.keys() >= set(pages):
            raise Dropped("for pages that are not expected")
        if expected.landed[[expected.rows[page] for page in pages], box.layer : box.layer + box.layers].any():
            raise Dropped("a duplicate")
        return expected
