"""Attention of sequences that add one token, over the paged pool. Triton.

Knows one layer of the pool, `[page, K|V, kv_head, slot, head_dim]`, positions and page tables; the reference is
`TorchAttention.decode`. Bound by memory: a program streams the keys and values of one KV head of one sequence, for all
query heads of its group at once. Where sequences are too few to fill the device, a context is divided among `SPLITS`
programs, whose partial softmaxes a second kernel combines (the online softmax of Milakov and Gimelshein 2018, over
shares of the keys as in Flash-Decoding). Shares are cut by each sequence's own length, in the kernel, so a captured
graph serves all lengths.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from cbdisagg_kernels.gpu.shapes import LOG2_E, Heads, precision, product
from torch import Tensor

PROGRAMS = 1056
"""Programs that keep a device busy: 8 for each of the 132 multiprocessors of an H100 or H200."""
MOST_SPLITS = 32


@dataclass(frozen=True, slots=True)
class Tuning:
    """`keys`: attended at once. `warps`, `stages`: of the compiled kernel.

    Of five stages two hold keys and values on their way, as the compiler lays out loads whose addresses are loaded.
    """

    keys: int
    warps: int
    stages: int


def tuning(dim: int, itemsize: int, rows: int) -> Tuning:
    """What fits the shared memory of every target: two blocks of keys and values take 64 KiB at most.

    And the registers: the sums of more than 16 rows in float32, spread over four warps, spilled up to 8.4 KB a thread,
    and with 64 keys at once those of more than 32 rows still spill 144 bytes over eight.
    """
    keys = 64 if dim * itemsize <= 256 else 32 if dim * itemsize <= 512 else 16
    if itemsize == 4 and rows > 32:
        keys = min(keys, 32)
    return Tuning(keys, warps=8 if itemsize == 4 and rows > 16 else 4, stages=5)


def splits_for(sequences: int, kv_heads: int) -> int:
    """Programs that share a context: a power of two."""
    wanted = max(1, PROGRAMS // max(1, sequences * kv_heads))
    return min(MOST_SPLITS, 1 << (wanted.bit_length() - 1))


def kinds_of_batches(most: int, kv_heads: int) -> list[int]:
    """Numbers of sequences, `most` at most, that between them divide contexts in every way there is."""
    first: dict[int, int] = {}
    for sequences in range(1, most + 1):
        first.setdefault(splits_for(sequences, kv_heads), sequences)
    return list(first.values())


@triton.jit(do_not_specialize=["table_stride"], do_not_specialize_on_alignment=["positions", "tables"])
def attend_share(
    qkv,
    layer,
    positions,
    tables,
    out,
    sums,
    bests,
    totals,
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
    SPLITS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (sequence, KV head, share). With one share it fills `out`, else its part of `sums`, `bests`, `totals`."""
    sequence, kv_head, share = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(positions + sequence) + 1  # 0 for a row that pads a graph
    first = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    first_block = first // KEYS
    each = tl.cdiv(tl.cdiv(length, KEYS) - first_block, SPLITS)
    begin = (first_block + share * each) * KEYS
    end = tl.minimum(begin + each * KEYS, length)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, DIM)
    heads = kv_head * GROUP + rows
    wanted = (rows < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    places = heads[:, None] * HEAD_DIM + dims[None, :]
    query = tl.load(qkv + sequence.to(tl.int64) * qkv_stride + places, mask=wanted, other=0.0)
    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    summed = tl.zeros([ROWS, DIM], tl.float32)
    for block in range(begin, end, KEYS):
        keys = block + tl.arange(0, KEYS)
        seen = (keys < length) & (keys >= first)
        page = tl.load(tables + (keys // PAGE).to(tl.int64) * table_stride + sequence, mask=seen, other=0)
        at = page.to(tl.int64) * (2 * KV_HEADS * PAGE * HEAD_DIM) + (kv_head * PAGE + keys % PAGE) * HEAD_DIM
        key = tl.load(layer + at[None, :] + dims[:, None], mask=seen[None, :] & (dims < HEAD_DIM)[:, None], other=0.0)
        scores = product(query, key, PRECISION) * scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        higher = tl.maximum(best, tl.max(scores, 1))  # finite: every block of a share holds a key that is seen
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(best - higher)
        value = tl.load(
            layer + at[:, None] + KV_HEADS * PAGE * HEAD_DIM + dims[None, :],
            mask=seen[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        summed = summed * shrink[:, None] + product(weights.to(value.dtype), value, PRECISION)
        total = total * shrink + tl.sum(weights, 1)
        best = higher

    if SPLITS == 1:
        attended = summed / tl.where(total > 0, total, 1.0)[:, None]
        target = out + sequence.to(tl.int64) * (HEADS * HEAD_DIM) + places
        tl.store(target, attended.to(out.dtype.element_ty), mask=wanted)
    else:
        part = (sequence.to(tl.int64) * HEADS + heads) * SPLITS + share
        tl.store(sums + part[:, None] * HEAD_DIM + dims[None, :], summed, mask=wanted)
        tl.store(bests + part, best, mask=rows < GROUP)
        tl.store(totals + part, total, mask=rows < GROUP)


@triton.jit
def combine_shares(
    sums,
    bests,
    totals,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """Program (sequence, head): the shares weighted by what each has seen."""
    here = tl.program_id(0).to(tl.int64) * HEADS + tl.program_id(1)
    shares, dims = tl.arange(0, SPLITS), tl.arange(0, DIM)
    best = tl.load(bests + here * SPLITS + shares)
    highest = tl.max(best, 0)
    weight = tl.exp2(best - tl.where(highest > float("-inf"), highest, 0.0))  # 0 for an empty share
    total = tl.sum(weight * tl.load(totals + here * SPLITS + shares), 0)
    summed = tl.load(
        sums + (here * SPLITS + shares)[:, None] * HEAD_DIM + dims[None, :], mask=(dims < HEAD_DIM)[None, :], other=0.0
    )
    attended = tl.sum(weight[:, None] * summed, 0) / tl.where(total > 0, total, 1.0)
    tl.store(out + here * HEAD_DIM + dims, attended.to(out.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    qkv: Tensor, layer: Tensor, positions: Tensor, tables: Tensor, out: Tensor, heads: Heads, splits: int = 0
) -> None:
    """Fill `out` [sequences, heads * head_dim]: each sequence's newest token over its keys up to its own.

    `qkv` [sequences, heads + 2 * kv_heads, head_dim], turned. `layer` [page, 2, kv_head, slot, head_dim]. `positions`
    int32 [sequences] of the newest tokens; -1 gives zeros. `tables` int32 [pages, >= sequences], pages in order down
    each column. `splits`: programs that share a context, a power of two; 0: as many as fill the device.
    """
    sequences, rows = len(out), max(16, triton.next_power_of_2(heads.group))
    tuned = tuning(heads.dim, qkv.itemsize, rows)
    splits = splits or splits_for(sequences, heads.kv_heads)
    sums, bests, totals = out, out, out
    if splits > 1:
        sums = torch.empty(sequences, heads.heads, splits, heads.head_dim, dtype=torch.float32, device=out.device)
        bests, totals = (torch.empty(sums.shape[:3], dtype=torch.float32, device=out.device) for _ in range(2))
    attend_share[(sequences, heads.kv_heads, splits)](
        qkv,
        layer,
        positions,
        tables,
        out,
        sums,
        bests,
        totals,
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
        ROWS=rows,
        KEYS=tuned.keys,
        SPLITS=splits,
        PRECISION=precision(qkv.dtype),
        num_warps=tuned.warps,
        num_stages=tuned.stages,
    )
    if splits > 1:
        combine_shares[(sequences, heads.heads)](
            sums, bests, totals, out, HEADS=heads.heads, HEAD_DIM=heads.head_dim, DIM=heads.dim, SPLITS=splits
        )
