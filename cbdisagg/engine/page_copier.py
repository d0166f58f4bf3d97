"""Copying pages between pools by the kernel: one launch for all pages of a push in a layer. The engine's `Copier`.

Knows addresses and page numbers; whose memory it is and when a copy may start is the transport's business.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import torch
from cbdisagg_kernels.gpu.pages import copy_pages
from torch import Tensor

Lists = tuple[Tensor, Tensor]
"""Source and target pages of a push, int32, on the device."""


class KernelCopier:
    """`at(address, nbytes)`: memory of the device, or of a peer's that is open here, as bytes, which it does not own.

    `on(stream)`: within it, work is queued there.
    """

    def __init__(
        self,
        device: torch.device,
        page_bytes: int,
        at: Callable[[int, int], Tensor],
        on: Callable[[int], AbstractContextManager[object]],
    ) -> None:
        self._device, self._page_bytes, self._at, self._on = device, page_bytes, at, on
        self._layers: dict[int, Tensor] = {}

    def prepare(self, source: tuple[int, ...], target: tuple[int, ...], stream: int) -> Lists:
        """Waits for nothing: what is queued on the stream already may wait for a step that is still computed."""
        lists = torch.from_numpy(np.array((source, target), np.int32))  # torch itself takes three times as long
        with self._on(stream):  # which makes the stream's device this thread's, for what is page-locked too
            if self._device.type == "cuda":
                lists = lists.pin_memory()
            pages = lists.to(self._device, non_blocking=True)
        return pages[0], pages[1]

    def copy(self, source: int, target: int, prepared: Lists, stream: int) -> None:
        """Reaches as far into either layer as the highest page that is named."""
        with self._on(stream):
            copy_pages(self._layer(source), self._layer(target), *prepared)

    def warm_up(self, layer: int, stream: int) -> None:
        """The kernel is there when the first push wants it: copy a layer's first page to itself."""
        self.copy(layer, layer, self.prepare((0,), (0,), stream), stream)

    def _layer(self, address: int) -> Tensor:
        """Its first page, from which the kernel goes on by page numbers."""
        if (layer := self._layers.get(address)) is None:
            layer = self._layers[address] = self._at(address, self._page_bytes).view(1, self._page_bytes)
        return layer
