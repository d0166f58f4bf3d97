"""Checksums of pages, so that what was pushed can be compared with what has arrived (debug.invariants).

Knows a pool's bytes and page numbers; not which page belongs to whom. The checksum of a page is the CRC-32 (zlib's) of
its bytes in all layers, in the order of the layers, as 4 little-endian bytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

CHECKSUM_BYTES = 4


def page_checksums(pool: NDArray[np.uint8], pages: Iterable[int]) -> bytes:
    """CHECKSUM_BYTES for each of `pages`, in their order. `pool` has shape [layers, pages, page_bytes]."""
    return b"".join(_checksum(pool, page) for page in pages)


def damaged_pages(pool: NDArray[np.uint8], pages: Sequence[int], checksums: bytes) -> tuple[int, ...]:
    """Those of `pages` whose bytes differ from their checksums; all of them if the numbers of both do not agree."""
    if len(checksums) != CHECKSUM_BYTES * len(pages):
        return tuple(pages)
    return tuple(
        page
        for n, page in enumerate(pages)
        if _checksum(pool, page) != checksums[n * CHECKSUM_BYTES : (n + 1) * CHECKSUM_BYTES]
    )


def _checksum(pool: NDArray[np.uint8], page: int) -> bytes:
    crc = 0
    for layer in pool:
        crc = zlib.crc32(layer[page].data, crc)
    return crc.to_bytes(CHECKSUM_BYTES, "little")
