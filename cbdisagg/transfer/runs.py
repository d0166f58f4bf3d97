"""Copying lists of pages as few large copies. Knows page numbers and arrays; no peers, no protocol.

The page pool hands out neighbouring pages where it can, so most lists fall into a few runs in which source and
target both count up. One numpy copy per run costs half a microsecond and then runs at the speed of memory, without
the GIL.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Run(NamedTuple):
    """Pages source .. source + pages - 1 go to target .. target + pages - 1."""

    source: int
    target: int
    pages: int


def merge_runs(source: Iterable[int], target: Iterable[int]) -> list[Run]:
    """The fewest runs that copy source[i] to target[i], in order; ValueError if the lists differ in length."""
    runs: list[Run] = []
    for here, there in zip(source, target, strict=True):
        if runs and here == runs[-1].source + runs[-1].pages and there == runs[-1].target + runs[-1].pages:
            runs[-1] = runs[-1]._replace(pages=runs[-1].pages + 1)
        else:
            runs.append(Run(here, there, 1))
    return runs


def copy_runs(runs: Iterable[Run], source: NDArray[np.uint8], target: NDArray[np.uint8]) -> None:
    """Copy runs of pages between two arrays of shape [pages, page_bytes]."""
    for here, there, pages in runs:
        target[there : there + pages] = source[here : here + pages]
