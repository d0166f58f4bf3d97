"""One layer's attention over the paged pool, from the fused queries, keys and values to what each row attends to.

Knows one layer of the pool, `[page, K|V, kv_head, slot, head_dim]`, slots and their page tables; not requests. A step
has segments: neighbouring rows that are neighbouring tokens of one sequence. Life of a step: `plan` once, then in each
layer `write`, after which the step's keys and values are final, then `attend`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from cbdisagg_kernels.attention import Chunk, DecodeGroup, TorchAttention
from cbdisagg_kernels.kv_write import kv_rows, write_kv
from cbdisagg_kernels.rope import rope_, rope_tables
from numpy.typing import NDArray
from torch import Tensor

Plan = TypeVar("Plan")


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary positions: radians per position [head_dim / 2], a factor on cos and sin, and how many positions."""

    frequencies: Tensor
    scaling: float
    positions: int


@dataclass(frozen=True, slots=True)
class Shape:
    """`rotation` is None where positions are in the embeddings."""

    heads: int
    kv_heads: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    rotation: Rotation | None


class SelfAttention(Protocol[Plan]):
    """Scores are scaled by head_dim ** -0.5. One thread calls it."""

    def plan(self, segments: NDArray[np.int32], pages: NDArray[np.int32]) -> Plan:
        """What all layers share. Nothing in `pages` may change before the step's last `attend`.

        `segments` [segments, 4], contiguous: first row, rows, first token's position, slot; every row of the step in
        one, those of one row first, in order of their positions. `pages` [slots, width]: page numbers in order.
        """
        ...

    def write(self, qkv: Tensor, layer: Tensor, plan: Plan) -> None:
        """Put keys and values into `layer`. `qkv` [rows, heads + 2 * kv_heads, head_dim] is turned in place."""
        ...

    def attend(self, qkv: Tensor, layer: Tensor, plan: Plan) -> Tensor:
        """`qkv` as `write` has left it -> [rows, heads * head_dim]: each row over the keys up to its own."""
        ...


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """`turn`: cosines and sines of each row. `places`: see `kv_rows`."""

    turn: tuple[Tensor, Tensor] | None
    places: Tensor
    groups: list[DecodeGroup]
    chunks: list[Chunk]


class TorchSelfAttention:
    """`SelfAttention` in torch operators: sequences that add one token in groups, the others one by one."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.scale = shape.head_dim**-0.5
        self.attention = TorchAttention(shape.kv_heads, shape.page_size, shape.head_dim, shape.dtype)
        turns = shape.rotation
        self.tables = (
            None if turns is None else rope_tables(turns.frequencies, turns.positions, turns.scaling, shape.dtype)
        )

    def plan(self, segments: NDArray[np.int32], pages: NDArray[np.int32]) -> TorchPlan:
        positions = positions_of(segments)
        page, place = np.divmod(positions, self.shape.page_size)
        slots = np.repeat(segments[:, 3], segments[:, 1])
        where = torch.from_numpy(pages[slots, page].astype(np.int64) * self.shape.page_size + place)
        at = torch.from_numpy(positions)
        return TorchPlan(
            turn=None if self.tables is None else (self.tables[0][at], self.tables[1][at]),
            places=kv_rows(where, self.shape.kv_heads, self.shape.page_size),
            groups=self._groups(segments[segments[:, 1] == 1], pages),
            chunks=[self._chunk(each, pages) for each in segments[segments[:, 1] > 1].tolist()],
        )

    def write(self, qkv: Tensor, layer: Tensor, plan: TorchPlan) -> None:
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        if plan.turn is not None:
            rope_(qkv[:, : heads + kv_heads], *plan.turn)
        write_kv(layer, plan.places, qkv[:, heads:])

    def attend(self, qkv: Tensor, layer: Tensor, plan: TorchPlan) -> Tensor:
        query = qkv[:, : self.shape.heads] * self.scale
        out = torch.empty_like(query)
        for group in plan.groups:
            self.attention.decode(query, layer, group, out)
        for chunk in plan.chunks:
            self.attention.chunk(query, layer, chunk, out)
        return out.view(len(query), -1)

    def _groups(self, singles: NDArray[np.int32], pages: NDArray[np.int32]) -> list[DecodeGroup]:
        if not len(singles):
            return []
        lengths = singles[:, 2] + 1
        counts = -(-lengths // self.shape.page_size)
        # Behind a sequence's last page the table repeats it, so that a gather never reads a page of unknown content.
        columns = np.minimum(np.arange(counts.max())[None, :], counts[:, None] - 1)
        tables = pages[singles[:, 3][:, None], columns]
        groups: list[DecodeGroup] = self.attention.plan_decode(0, torch.from_numpy(tables), lengths.tolist())
        return groups

    def _chunk(self, segment: list[int], pages: NDArray[np.int32]) -> Chunk:
        row, rows, start, slot = segment
        count = -(-(start + rows) // self.shape.page_size)
        return self.attention.plan_chunk(row, rows, start, torch.from_numpy(pages[slot, :count]))


def positions_of(segments: NDArray[np.int32]) -> NDArray[np.int32]:
    """Of every row of the step, in order: [rows]."""
    rows, starts = segments[:, 1], segments[:, 2]
    return np.arange(rows.sum(), dtype=np.int32) + np.repeat(starts - segments[:, 0], rows)
