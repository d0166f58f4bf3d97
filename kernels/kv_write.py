"""Writing new keys and values into the paged pool.

Knows the layout of one layer of the pool, `[page, K|V, kv_head, slot, head_dim]`; a token's place in it is its `where`,
page * page_size + slot.
"""

from __future__ import annotations

import torch
from torch import Tensor


def kv_rows(where: Tensor, kv_heads: int, page_size: int) -> Tensor:
    """Rows of head_dim that tokens fill, for one layer seen as [rows, head_dim]; the same for every layer of a step.

    `where` [tokens] int64 -> [tokens * 2 * kv_heads] int64, in the order token, K|V, head.
    """
    page, slot = where // page_size, where % page_size
    planes = torch.arange(2 * kv_heads, device=where.device)  # K of each head, then V of each head
    return ((page[:, None] * (2 * kv_heads) + planes) * page_size + slot[:, None]).view(-1)


def write_kv(layer: Tensor, rows: Tensor, kv: Tensor) -> None:
    """Put `kv` [tokens, 2 * kv_heads, head_dim] (keys of all heads, then values) into the layer's `rows`."""
    layer.view(-1, layer.shape[-1]).index_copy_(0, rows, kv.reshape(-1, kv.shape[-1]))
