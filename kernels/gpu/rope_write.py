"""Turning queries and keys by their positions, and writing keys and values into the paged pool, as one kernel. Triton.

Knows the layout `[page, K|V, kv_head, slot, head_dim]` of a layer; the references are `rope_` and `write_kv`. Turned in
float32, rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from cbdisagg_kernels.gpu.shapes import Heads
from torch import Tensor

BLOCK_ELEMENTS = 4096
"""Of the heads that one program turns."""


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["positions", "owners", "tables"])
def turn_and_write(
    qkv,
    layer,
    positions,
    owners,
    tables,
    cosines,
    sines,
    qkv_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    TURNS: tl.constexpr,
    HALF: tl.constexpr,
    PLANES: tl.constexpr,
):
    """Program (row, PLANES of its heads). A row at position -1 is left alone."""
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    if position >= 0:
        planes, halves = tl.program_id(1) * PLANES + tl.arange(0, PLANES), tl.arange(0, HALF)
        inside = halves < HEAD_DIM // 2
        there = (planes < HEADS + 2 * KV_HEADS)[:, None] & inside[None, :]
        source = qkv + row * qkv_stride + planes[:, None] * HEAD_DIM + halves[None, :]
        low = tl.load(source, mask=there, other=0.0)
        high = tl.load(source + HEAD_DIM // 2, mask=there, other=0.0)
        if TURNS:
            cosine = tl.load(cosines + position.to(tl.int64) * (HEAD_DIM // 2) + halves, mask=inside, other=0.0)
            sine = tl.load(sines + position.to(tl.int64) * (HEAD_DIM // 2) + halves, mask=inside, other=0.0)
            x, y = low.to(tl.float32), high.to(tl.float32)
            turned = (planes < HEADS + KV_HEADS)[:, None]  # values are not
            low = tl.where(turned, (x * cosine[None, :] - y * sine[None, :]).to(low.dtype), low)
            high = tl.where(turned, (y * cosine[None, :] + x * sine[None, :]).to(high.dtype), high)
            queries = there & (planes < HEADS)[:, None]
            tl.store(source, low, mask=queries)
            tl.store(source + HEAD_DIM // 2, high, mask=queries)
        page = tl.load(tables + (position // PAGE).to(tl.int64) * table_stride + tl.load(owners + row))
        slot = position % PAGE
        place = page.to(tl.int64) * (2 * KV_HEADS * PAGE * HEAD_DIM) + ((planes - HEADS) * PAGE + slot) * HEAD_DIM
        target = layer + place[:, None] + halves[None, :]
        kept = there & (planes >= HEADS)[:, None]
        tl.store(target, low, mask=kept)
        tl.store(target + HEAD_DIM // 2, high, mask=kept)


def rope_write(
    qkv: Tensor,
    layer: Tensor,
    positions: Tensor,
    owners: Tensor,
    tables: Tensor,
    turn: tuple[Tensor, Tensor] | None,
    heads: Heads,
) -> None:
    """Turn queries and keys of `qkv` [rows, heads + 2 * kv_heads, head_dim]; keys and values go to `layer`.

    `positions` int32 [rows], -1: leave the row alone. `owners` int32 [rows]: the row's column of `tables`, int32
    [pages, sequences]. `turn`: cosines and sines, float32 [positions, head_dim / 2]; None: nothing turns. Queries are
    turned in place, keys on their way to `layer`.
    """
    half = triton.next_power_of_2(heads.head_dim // 2)
    planes = heads.heads + 2 * heads.kv_heads
    block = max(1, min(triton.next_power_of_2(planes), BLOCK_ELEMENTS // (2 * half)))
    cosines, sines = turn or (qkv, qkv)
    turn_and_write[(len(qkv), triton.cdiv(planes, block))](
        qkv,
        layer,
        positions,
        owners,
        tables,
        cosines,
        sines,
        qkv.stride(0),
        tables.stride(0),
        HEADS=heads.heads,
        KV_HEADS=heads.kv_heads,
        HEAD_DIM=heads.head_dim,
        PAGE=heads.page_size,
        TURNS=turn is not None,
        HALF=half,
        PLANES=block,
        num_warps=4,
    )
