"""The KV pool as tensors: how one page is laid out, and the view of a worker's memory in that layout.

Knows the layout `[layer, page, K|V, kv_head, slot, head_dim]`, contiguous, not who owns the memory: the transfer
room's pool does. Which page belongs to whom is the core's affair.

The KV head before the slot makes each head's keys of a page one plane, and a shard of heads contiguous.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

LAYOUT = "layer.page.kv.head.slot.dim"
"""Part of a worker's fingerprint: pools of another layout are never paired."""


@dataclass(frozen=True, slots=True)
class KvShape:
    """What a page holds for one layer: `page_size` tokens' keys and values of all KV heads."""

    layers: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page in one layer."""
        return 2 * self.kv_heads * self.page_size * self.head_dim * self.dtype.itemsize


def pool_tensor(memory: NDArray[np.uint8], shape: KvShape) -> Tensor:
    """`memory` [layers, pages, page_bytes], writable, as [layers, pages, 2, kv_heads, page_size, head_dim]; no copy.

    Raises ValueError if the memory was laid out for another model.
    """
    return as_pool(torch.from_numpy(memory), shape)


def as_pool(memory: Tensor, shape: KvShape) -> Tensor:
    """The same of a tensor of bytes, wherever it is."""
    layers, pages, page_bytes = memory.shape
    if (layers, page_bytes) != (shape.layers, shape.page_bytes):
        raise ValueError(f"a pool of {layers} layers, {page_bytes} bytes a page; the model needs {shape}")
    return memory.view(shape.dtype).view(layers, pages, 2, shape.kv_heads, shape.page_size, shape.head_dim)
