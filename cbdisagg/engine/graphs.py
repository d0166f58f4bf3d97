"""Decode steps as captured graphs, one for each of some batch sizes: a replay takes microseconds of the host's time.

Knows layouts and the device's `capture`; not what a step computes. Life of a graph: warmed up once on rows that pad
(so that kernels are compiled and libraries have their workspaces), captured, replayed whenever a step of at most its
rows has come to its words.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from cbdisagg.engine.device import Device
from cbdisagg.engine.device_step import DRAW_WORDS, DeviceStep, Layout

Compute = Callable[[DeviceStep], Tensor]
"""Everything from ids to drawn tokens, int32 [draws]."""


@dataclass(frozen=True, slots=True)
class Graph:
    """`words`: where a step's words must be before `replay`; `tokens`: where its tokens are after it."""

    layout: Layout
    words: Tensor
    tokens: Tensor
    replay: Callable[[], None]


def sizes_up_to(most: int) -> list[int]:
    """Batch sizes that get a graph: powers of two up to 16, then steps that waste less than a third of the rows."""
    sizes = [size for size in (1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16)) if size < most]
    return [*sizes, *range(256, most, 32), most]


class Graphs:
    """`width`: pages of the longest sequence. Captured from the largest on, whose memory the others then use."""

    def __init__(
        self,
        device: Device,
        compute: Compute,
        sizes: Sequence[int],
        width: int,
        progress: Callable[[float], None] = lambda fraction: None,
    ) -> None:
        self.sizes = sorted(sizes)
        self.graphs: dict[int, Graph] = {}
        for done, rows in enumerate(reversed(self.sizes)):
            progress(done / len(self.sizes))
            self.graphs[rows] = _capture(device, compute, rows, width)
        progress(1.0)

    def fitting(self, rows: int) -> Graph | None:
        """The smallest that has room, if there is one."""
        place = bisect_left(self.sizes, rows)
        return self.graphs[self.sizes[place]] if place < len(self.sizes) else None


def _capture(device: Device, compute: Compute, rows: int, width: int) -> Graph:
    layout = Layout(rows, segments=rows, singles=rows, tiles=0, outputs=0, draws=rows)
    words = torch.zeros(layout.words(width), dtype=torch.int32, device=device.torch_device)
    words[rows : 2 * rows] = -1  # positions: nothing is read or written
    words[layout.table_at - rows : layout.table_at] = -1  # slots: nobody's
    assert layout.table_at == 3 * rows + DRAW_WORDS * rows

    def work() -> Tensor:
        return compute(layout.views(words))

    work()
    device.mark().wait()
    tokens, replay = device.capture(work)
    return Graph(layout, words, tokens, replay)
