"""`SelfAttention` by the Triton kernels: how a step is laid out for them, and in which order they run.

A plan has a host half, made from page tables in numpy (`StepShape`), and a device half (`StepPlan`): views of memory
that somebody else has brought to the device, by one copy a step or into the fixed addresses of a captured graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from cbdisagg_kernels.gpu.decode_attention import decode_attention
from cbdisagg_kernels.gpu.prefill_attention import TILE_ROWS, prefill_attention
from cbdisagg_kernels.gpu.rope_write import rope_write
from cbdisagg_kernels.gpu.shapes import Heads
from cbdisagg_kernels.rope import rope_tables
from cbdisagg_kernels.self_attention import Shape, positions_of
from numpy.typing import NDArray
from torch import Tensor

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepShape:
    """On the host. All int32: `positions`, `owners` [rows], an owner being a column of `tables` [pages, segments].

    `tiles` [tiles, 4]: first row, rows, first position, column. `singles`: segments of one row, which come first.
    """

    positions: Ints
    owners: Ints
    tiles: Ints
    tables: Ints
    singles: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """On the device; see `StepShape`. A position of -1 is a row that pads a graph: it reads and writes nothing."""

    positions: Tensor
    owners: Tensor
    tiles: Tensor
    tables: Tensor
    singles: int


class StepPlanner:
    """The host half of `SelfAttention.plan`."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size

    def plan(self, segments: Ints, pages: Ints) -> StepShape:
        """See `SelfAttention.plan`."""
        ends = segments[:, 2] + segments[:, 1]
        width = -(-int(ends.max()) // self.page_size)
        numbers = np.arange(len(segments), dtype=np.int32)
        singles = int((segments[:, 1] == 1).sum())
        return StepShape(
            positions=positions_of(segments),
            owners=np.repeat(numbers, segments[:, 1]),
            tiles=_tiles(segments[singles:], numbers[singles:]),
            tables=np.ascontiguousarray(pages[segments[:, 3], :width].T),
            singles=singles,
        )


class TritonSelfAttention:
    """On `device`, "cpu" meaning Triton's interpreter. `window`: keys that a token sees; 0: all."""

    def __init__(self, shape: Shape, device: torch.device, window: int = 0) -> None:
        self.device = device
        self.heads = Heads(shape.heads, shape.kv_heads, shape.head_dim, shape.page_size, window)
        self.planner = StepPlanner(shape.page_size)
        self.turn = None
        if (turns := shape.rotation) is not None:
            half = shape.head_dim // 2
            cosines, sines = rope_tables(turns.frequencies, turns.positions, turns.scaling, torch.float32)
            self.turn = (cosines[:, 0, :half].contiguous().to(device), sines[:, 0, half:].contiguous().to(device))

    def plan(self, segments: Ints, pages: Ints) -> StepPlan:
        made = self.planner.plan(segments, pages)
        arrays = (made.positions, made.owners, made.tiles, made.tables)
        return StepPlan(*(torch.from_numpy(each).to(self.device) for each in arrays), made.singles)

    def write(self, qkv: Tensor, layer: Tensor, plan: StepPlan) -> None:
        rope_write(qkv, layer, plan.positions, plan.owners, plan.tables, self.turn, self.heads)

    def attend(self, qkv: Tensor, layer: Tensor, plan: StepPlan) -> Tensor:
        out = torch.empty(len(qkv), self.heads.heads * self.heads.head_dim, dtype=qkv.dtype, device=qkv.device)
        if plan.singles:
            decode_attention(qkv, layer, plan.positions, plan.tables, out[: plan.singles], self.heads)
        if len(plan.tiles):
            prefill_attention(qkv, layer, plan.tiles, plan.tables, out, self.heads)
        return out


def _tiles(segments: Ints, owners: Ints) -> Ints:
    """Segments cut into tiles of TILE_ROWS at most."""
    counts = -(-segments[:, 1] // TILE_ROWS)
    skipped = TILE_ROWS * (np.arange(counts.sum(), dtype=np.int32) - np.repeat(np.cumsum(counts) - counts, counts))
    first, rows, start, _ = np.repeat(segments, counts, axis=0).T
    tiles = (first + skipped, np.minimum(TILE_ROWS, rows - skipped), start + skipped, np.repeat(owners, counts))
    return np.stack(tiles, 1).astype(np.int32)
