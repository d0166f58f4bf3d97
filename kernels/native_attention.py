"""`SelfAttention` by the C kernels of cpu/attention_items.h and cpu/rope_kv.c.

Knows how a step is cut into tiles for them, and the struct that they read; the arithmetic is theirs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.rope import rope_tables
from cbdisagg_kernels.self_attention import Shape
from numpy.typing import NDArray
from torch import Tensor

TILE_ROWS = 32
"""Rows of a tile, if its query heads are few: each block of keys is packed once for them, and tiles are what threads
share."""
MOST_ROWS = 96  # query heads times rows of a tile, and
MOST_DIM = 256  # elements of a head, for which the kernel has room

SPAN, WHOLE_TILE = 256, 64
"""Keys of a span, of cpu/attention_tile.h, and the most columns of a tile there."""
ITEMS_EACH = 4
"""With fewer items for each thread some would be idle at last, so that they share the spans of items."""


class Job(ctypes.Structure):
    """`struct attention` of cpu/attention.h."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("qkv", "layer", "out", "pages", "tiles", "cosines", "sines")),
        ("spans", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("qkv_stride", "out_stride")),
        *((name, ctypes.c_int32) for name in ("tile_count", "rows", "page_width")),
        *((name, ctypes.c_int32) for name in ("kv_heads", "group", "head_dim", "page_size")),
        ("scale", ctypes.c_float),
        ("is_bf16", ctypes.c_int32),
    ]


@dataclass(frozen=True, slots=True)
class NativePlan:
    """`job` points into `tiles` and `pages`, which must outlive it."""

    job: Job
    tiles: NDArray[np.int32]
    pages: NDArray[np.int32]
    rows: int


def fits(shape: Shape) -> bool:
    """Whether the kernels can do it; torch's form can do all."""
    group = shape.heads // shape.kv_heads
    dtypes = (torch.float32, torch.bfloat16)
    return shape.dtype in dtypes and shape.head_dim % 8 == 0 and shape.head_dim <= MOST_DIM and group <= MOST_ROWS


class NativeSelfAttention:
    """`threads`: of each call. Raises ValueError for a shape that does not fit."""

    def __init__(self, native: Native, threads: int, shape: Shape) -> None:
        if not fits(shape):
            raise ValueError(f"the native attention cannot do {shape}")
        self.shape, self.threads = shape, threads
        self.group = shape.heads // shape.kv_heads
        self.width = shape.heads * shape.head_dim
        self.most = max(1, min(TILE_ROWS, MOST_ROWS // self.group))  # rows of a tile
        self.cosines, self.sines = _half_tables(shape)
        self.spans = np.empty(0, np.float32)
        self.template = Job(
            cosines=_address(self.cosines),
            sines=_address(self.sines),
            qkv_stride=self.width + 2 * shape.kv_heads * shape.head_dim,
            out_stride=self.width,
            kv_heads=shape.kv_heads,
            group=self.group,
            head_dim=shape.head_dim,
            page_size=shape.page_size,
            scale=shape.head_dim**-0.5,
            is_bf16=shape.dtype == torch.bfloat16,
        )
        self._write, self._attend = native.functions.cbd_write, native.functions.cbd_attention
        for function in (self._write, self._attend):
            function.argtypes, function.restype = [ctypes.POINTER(Job), ctypes.c_int], None

    def plan(self, segments: NDArray[np.int32], pages: NDArray[np.int32]) -> NativePlan:
        tiles = cut(segments, self.most)
        rows = segments.item(-1, 0) + segments.item(-1, 1)
        job = Job.from_buffer_copy(self.template)
        job.pages, job.page_width = address(pages), pages.shape[1]
        job.tiles, job.tile_count, job.rows = address(tiles), len(tiles), rows
        if self.threads > 1 and rows == len(segments):
            job.spans = self._room_for_spans(segments)
        return NativePlan(job, tiles, pages, rows)

    def _room_for_spans(self, singles: NDArray[np.int32]) -> int | None:
        """The address of room for what spans come to; None if items are shared."""
        if len(singles) * self.shape.kv_heads >= ITEMS_EACH * self.threads or singles.item(-1, 2) < SPAN:
            return None
        spans = sum(start // SPAN + 1 for start in singles[:, 2].tolist())
        width = -(-self.shape.head_dim // WHOLE_TILE) * WHOLE_TILE
        needed = spans * self.shape.kv_heads * self.group * (width + 2)
        if len(self.spans) < needed:
            self.spans = np.empty(2 * needed, np.float32)
        return address(self.spans)

    def write(self, qkv: Tensor, layer: Tensor, plan: NativePlan) -> None:
        plan.job.qkv, plan.job.layer = qkv.data_ptr(), layer.data_ptr()
        self._write(plan.job, self.threads)

    def attend(self, qkv: Tensor, layer: Tensor, plan: NativePlan) -> Tensor:
        out = qkv.new_empty(plan.rows, self.width)
        plan.job.qkv, plan.job.layer, plan.job.out = qkv.data_ptr(), layer.data_ptr(), out.data_ptr()
        self._attend(plan.job, self.threads)
        return out


def cut(segments: NDArray[np.int32], most: int) -> NDArray[np.int32]:
    """Segments, columns as in `SelfAttention.plan`, cut into tiles of `most` rows at most."""
    if segments.item(-1, 1) == 1:  # then all are: those come first
        return segments
    counts = -(-segments[:, 1] // most)
    if (counts == 1).all():
        return segments
    before = np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts)  # tiles of its own
    skipped = (before * most).astype(np.int32)
    whole = np.repeat(segments, counts, axis=0)
    rows = np.minimum(most, whole[:, 1] - skipped)
    return np.stack((whole[:, 0] + skipped, rows, whole[:, 2] + skipped, whole[:, 3]), 1).astype(np.int32)


def _half_tables(shape: Shape) -> tuple[Tensor | None, Tensor | None]:
    """Cosines and sines, each [positions, head_dim / 2] in float32: the kernel turns both halves of a head with one."""
    turns, half = shape.rotation, shape.head_dim // 2
    if turns is None:
        return None, None
    cosines, sines = rope_tables(turns.frequencies, turns.positions, turns.scaling, torch.float32)
    return cosines[:, 0, :half].contiguous(), sines[:, 0, half:].contiguous()


def address(array: NDArray[Any]) -> int:
    """Of the first element. `array.ctypes` is ten times slower."""
    found: int = array.__array_interface__["data"][0]
    return found


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
