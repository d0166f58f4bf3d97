"""One step's numbers as one block of int32 words, so that one copy brings all of them to the device.

Knows the order of the words and what each part means to the kernels; floats travel as their bits. The layout depends on
counts only, so in a captured graph every part has its fixed address; page tables come last and grow with the longest
sequence, so that only what is used is copied. Rows that pad a step up to its layout are at position -1 and draw into a
slot that nobody has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from cbdisagg_kernels.gpu.attention import StepPlan, StepShape
from cbdisagg_kernels.gpu.sample import Draws
from numpy.typing import NDArray
from torch import Tensor

from cbdisagg.messages import Sampling

Ints = NDArray[np.int32]
DRAW_WORDS = 9
"""Of each draw: the eight fields of `Draws`, and the slot."""
WORD = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class DeviceStep:
    """Views of a step's words on the device. `ids` of -1 - slot stand for the token that slot has drawn last.

    `outputs`: rows that the head is asked for, int64; None: all rows in their order. `slots` int64 [draws].
    """

    ids: Tensor
    plan: StepPlan
    outputs: Tensor | None
    draws: Draws
    slots: Tensor


@dataclass(frozen=True, slots=True)
class Layout:
    """Counts of a step. `outputs` 0: all rows are, in their order."""

    rows: int
    segments: int
    singles: int
    tiles: int
    outputs: int
    draws: int

    @property
    def table_at(self) -> int:
        """Words before the page tables."""
        return 3 * self.rows + 4 * self.tiles + self.outputs + DRAW_WORDS * self.draws

    def words(self, width: int) -> int:
        """In all, with tables of `width` pages."""
        return self.table_at + width * self.segments

    def fill(self, words: Ints, ids: Ints, shape: StepShape, outputs: list[int] | None, draws: Ints) -> int:
        """Write a step of at most these counts; how many words have to be copied. `draws` [DRAW_WORDS, count].

        A step with fewer rows than the layout has no tiles, and one row for each segment and draw.
        """
        ids_at, positions, owners, tiles, chosen, drawn, tables = self._parts(words)
        given = len(ids)
        ids_at[:given], positions[:given], owners[:given] = ids, shape.positions, shape.owners
        ids_at[given:], positions[given:], owners[given:] = 0, -1, 0
        tiles[:] = shape.tiles.reshape(-1)
        chosen[:] = outputs or ()
        drawn = drawn.reshape(DRAW_WORDS, self.draws)
        drawn[:, : draws.shape[1]] = draws
        drawn[:, draws.shape[1] :] = 0  # temperature 0: the best, of a slot that is set below
        drawn[-1, draws.shape[1] :] = -1
        width, segments = shape.tables.shape
        tables[: width * self.segments].reshape(width, self.segments)[:, :segments] = shape.tables
        return self.words(width)

    def views(self, words: Tensor) -> DeviceStep:
        """Of words on the device; tables as wide as there are words for."""
        ids, positions, owners, tiles, chosen, drawn, tables = self._parts(words)
        fields = drawn.view(DRAW_WORDS, self.draws)
        floats = fields.view(torch.float32)
        draws = Draws(floats[0], floats[1], floats[2], *fields[3:8])
        plan = StepPlan(positions, owners, tiles.view(-1, 4), tables.view(-1, self.segments), self.singles)
        return DeviceStep(ids, plan, chosen.long() if self.outputs else None, draws, fields[8].long())

    def _parts(self, words: Any) -> list[Any]:
        """ids, positions, owners, tiles, outputs, draws, tables: slices of an array or a tensor."""
        sizes = (self.rows, self.rows, self.rows, 4 * self.tiles, self.outputs, DRAW_WORDS * self.draws)
        parts, begin = [], 0
        for size in sizes:
            parts.append(words[begin : begin + size])
            begin += size
        return [*parts, words[begin:]]


class DrawTable:
    """How each slot draws, as the words that its draws need; a step's are cut from it at once."""

    def __init__(self, slots: int) -> None:
        self.words = np.zeros((DRAW_WORDS, slots), np.int32)
        self.words[8] = np.arange(slots)

    def admit(self, slot: int, sampling: Sampling) -> None:
        most_depth = -math.log(sampling.min_p) if sampling.min_p > 0.0 else math.inf
        floats = np.array((sampling.temperature, sampling.top_p, most_depth), np.float32)
        self.words[:3, slot] = floats.view(np.int32)
        self.words[3, slot] = min(sampling.top_k, (1 << 31) - 1)
        words = (sampling.seed & WORD, sampling.seed >> 32 & WORD, sampling.choice & WORD)
        self.words[4:7, slot] = np.array(words, np.uint32).view(np.int32)

    def of(self, slots: list[int], positions: list[int]) -> Ints:
        """[DRAW_WORDS, draws], contiguous; `positions` of the tokens that are drawn."""
        words = np.ascontiguousarray(self.words[:, slots])
        words[7] = positions
        return words
