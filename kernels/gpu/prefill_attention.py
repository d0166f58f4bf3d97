"""Attention of chunks of prompts, each over the pages before it and over itself. Triton.

Knows one layer of the pool, `[page, K|V, kv_head, slot, head_dim]`, page tables, and tiles: neighbouring rows of one
sequence; the reference is `TorchAttention.chunk`. The chunk's own keys are in the pool already, so past and present are
one loop over pages. Blocks of keys that every row of a tile sees go first, without masks; the loop is FlashAttention's
(Dao et al. 2022) with rows and keys in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from cbdisagg_kernels.gpu.shapes import LOG2_E, Heads, precision, product
from torch import Tensor

TILE_ROWS = 128
"""Rows of a tile: the host cuts by this, whatever a kernel takes at once."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """`rows` of a block, which divide TILE_ROWS, and `keys`; `warps`, `stages`: of the compiled kernel."""

    rows: int
    keys: int
    warps: int
    stages: int


def tuning(dim: int, itemsize: int) -> Tuning:
    """What fits the shared memory and the registers of every target."""
    if itemsize == 4:
        # Products of float32 are sums of single ones: for 9.0 and 10.0 more of them at once spill kilobytes a thread.
        return Tuning(rows=32, keys=32 if dim <= 64 else 16, warps=4 if dim <= 64 else 8, stages=2)
    if dim <= 64:
        return Tuning(rows=128, keys=64, warps=4, stages=3)
    if dim <= 128:
        return Tuning(rows=128, keys=64, warps=8, stages=3)
    return Tuning(rows=64, keys=32, warps=4, stages=2)


@triton.jit
def attend_keys(
    query,
    layer,
    table,
    table_stride,
    block,
    positions,
    length,
    kv_head,
    scale,
    best,
    total,
    summed,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The running softmax (best, total, summed) with the keys [block, block + KEYS) too."""
    keys, dims = block + tl.arange(0, KEYS), tl.arange(0, DIM)
    there = keys < length
    page = tl.load(table + (keys // PAGE).to(tl.int64) * table_stride, mask=there, other=0)
    at = page.to(tl.int64) * (2 * KV_HEADS * PAGE * HEAD_DIM) + (kv_head * PAGE + keys % PAGE) * HEAD_DIM
    inside = dims < HEAD_DIM
    key = tl.load(layer + at[None, :] + dims[:, None], mask=there[None, :] & inside[:, None], other=0.0)
    scores = product(query, key, PRECISION) * scale
    if MASKED:
        seen = keys[None, :] <= positions[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > positions[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    higher = tl.maximum(best, tl.max(scores, 1))
    level = tl.where(higher > float("-inf"), higher, 0.0)  # of a row that has seen no key yet
    weights = tl.exp2(scores - level[:, None])
    shrink = tl.exp2(best - level)
    place = at[:, None] + KV_HEADS * PAGE * HEAD_DIM + dims[None, :]
    value = tl.load(layer + place, mask=there[:, None] & inside[None, :], other=0.0)
    summed = summed * shrink[:, None] + product(weights.to(value.dtype), value, PRECISION)
    return higher, total * shrink + tl.sum(weights, 1), summed


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["tiles", "tables"])
def attend_tile(
    qkv,
    layer,
    tiles,
    tables,
    out,
    scale,
    qkv_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    WINDOW: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile, block of ROWS in it, query head)."""
    tile, part, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    count = tl.load(tiles + tile * 4 + 1) - part * ROWS
    if count > 0:
        row = tl.load(tiles + tile * 4) + part * ROWS
        start = tl.load(tiles + tile * 4 + 2) + part * ROWS
        table = tables + tl.load(tiles + tile * 4 + 3)
        rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
        length = start + tl.minimum(count, ROWS)
        wanted = (rows < count)[:, None] & (dims < HEAD_DIM)[None, :]
        place = (row + rows).to(tl.int64)[:, None] * qkv_stride + head * HEAD_DIM + dims[None, :]
        query = tl.load(qkv + place, mask=wanted, other=0.0)
        positions = start + rows
        best = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        summed = tl.zeros([ROWS, DIM], tl.float32)
        first = (tl.maximum(start - WINDOW + 1, 0) // KEYS) * KEYS if WINDOW else 0
        masked = first if WINDOW else ((start + 1) // KEYS) * KEYS  # from here on some row does not see some key
        for block in range(first, masked, KEYS):
            best, total, summed = attend_keys(
                query, layer, table, table_stride, block, positions, length, head // GROUP, scale, best, total, summed,
                KV_HEADS, HEAD_DIM, PAGE, WINDOW, DIM, KEYS, PRECISION, False,
            )  # fmt: skip
        for block in range(masked, length, KEYS):
            best, total, summed = attend_keys(
                query, layer, table, table_stride, block, positions, length, head // GROUP, scale, best, total, summed,
                KV_HEADS, HEAD_DIM, PAGE, WINDOW, DIM, KEYS, PRECISION, True,
            )  # fmt: skip
        attended = summed / tl.where(total > 0, total, 1.0)[:, None]  # a row behind the tile's end may see no key
        target = out + (row + rows).to(tl.int64)[:, None] * (HEADS * HEAD_DIM) + head * HEAD_DIM + dims[None, :]
        tl.store(target, attended.to(out.dtype.element_ty), mask=wanted)


def prefill_attention(qkv: Tensor, layer: Tensor, tiles: Tensor, tables: Tensor, out: Tensor, heads: Heads) -> None:
    """Fill the tiles' rows of `out` [rows, heads * head_dim]: each row over the keys up to its own.

    `qkv` [rows, heads + 2 * kv_heads, head_dim], turned. `layer` [page, 2, kv_head, slot, head_dim]. `tiles` int32
    [tiles, 4]: first row, rows (TILE_ROWS at most), position of the first, column of `tables`. `tables` int32 [pages,
    sequences], pages in order down each column.
    """
    tuned = tuning(heads.dim, qkv.itemsize)
    attend_tile[(len(tiles), TILE_ROWS // tuned.rows, heads.heads)](
        qkv,
        layer,
        tiles,
        tables,
        out,
        heads.head_dim**-0.5 * LOG2_E,
        qkv.stride(0),
        tables.stride(0),
        HEADS=heads.heads,
        KV_HEADS=heads.kv_heads,
        GROUP=heads.group,
        HEAD_DIM=heads.head_dim,
        PAGE=heads.page_size,
        WINDOW=heads.window,
        DIM=heads.dim,
        ROWS=tuned.rows,
        KEYS=tuned.keys,
        PRECISION=precision(qkv.dtype),
        num_warps=tuned.warps,
        num_stages=tuned.stages,
    )
