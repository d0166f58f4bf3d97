"""From a plan's slices to one flat batch of tokens.

Knows slots, pages and attention's plans; not the model. Order of the rows: first the slices of one token, the shorter
sequences before the longer, so that attention can take neighbours of similar length together; then the longer slices,
as the plan has them.

Between two steps caches hold the weights, and every call into numpy or torch takes 20 to 80 us until its own code is
back: so plain Python does what it can.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from cbdisagg_kernels.layers import Written
from cbdisagg_kernels.tokens import SlotTokens, Tokens
from numpy.typing import NDArray
from torch import Tensor

from cbdisagg.engine.base import PushLayer
from cbdisagg.engine.slots import Slots
from cbdisagg.messages import Slice


class Planner(Protocol):
    """A `SelfAttention`, or whoever lays a step out for one that is elsewhere."""

    def plan(self, segments: NDArray[np.int32], pages: NDArray[np.int32]) -> Any: ...


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens. `attention`: what the `Planner` has made of it.

    `outputs` int64: rows that the head is asked for, those that draw first; None if it is all rows in their order.
    `draws`: the number in the plan of the slice that draws from each of the first outputs. `scores`: (number in the
    plan, first output, count) for the others.
    """

    tokens: Tokens
    attention: Any
    outputs: Tensor | None
    draws: list[int]
    scores: list[tuple[int, int, int]]


def make_batch(slices: Sequence[Slice], slots: Slots, attention: Planner) -> Batch:
    """Raises ValueError if a slice is empty, or names tokens or pages that its slot does not have."""
    for part in slices:
        _check(part, slots)
    singles = sorted((n for n, part in enumerate(slices) if part.count == 1), key=lambda n: slices[n].start)
    rows = 0
    first_of: dict[int, int] = {}  # in the order of the rows
    numbers: list[int] = []
    for n in (*singles, *(n for n, part in enumerate(slices) if part.count > 1)):
        part = slices[n]
        first_of[n] = rows
        numbers += (rows, part.count, part.start, part.slot)
        rows += part.count
    segments = np.array(numbers, np.int32).reshape(-1, 4)
    outputs, draws, scores = _outputs(slices, slots, first_of)
    return Batch(
        tokens=SlotTokens(slots.ids, segments),
        attention=attention.plan(segments, slots.pages),
        outputs=None if outputs == list(range(rows)) else torch.tensor(outputs, dtype=torch.int64),
        draws=draws,
        scores=scores,
    )


def pusher(slices: Sequence[Slice], push: PushLayer) -> Written | None:
    """What is told of each layer that is written: every push of the plan. None: there is none."""
    pushes = [part.push for part in slices if part.push is not None]

    def written(layer: int) -> None:
        for each in pushes:
            push(layer, each)

    return written if pushes else None


def _check(part: Slice, slots: Slots) -> None:
    held, end = slots[part.slot], part.start + part.count
    if part.count < 1 or part.start < 0 or end > held.length or part.draws not in (0, 1):
        raise ValueError(f"{part} of a slot with {held.length} tokens")
    if part.draws and end != held.length:
        raise ValueError(f"{part} draws, but the slot has {held.length} tokens: another token follows already")
    if end > held.pages * slots.page_size:
        raise ValueError(f"{part} of a slot with {held.pages} pages of {slots.page_size} tokens")


def _outputs(
    slices: Sequence[Slice], slots: Slots, first_of: dict[int, int]
) -> tuple[list[int], list[int], list[tuple[int, int, int]]]:
    """Rows for the head, with what each is for; see `Batch`."""
    draws = [n for n in first_of if slices[n].draws]
    outputs = [first_of[n] + slices[n].count - 1 for n in draws]
    scores = []
    for n, part in enumerate(slices):
        if part.scores:
            # The row of a token scores the token after it.
            count = max(0, min(part.count, slots[part.slot].prompt - 1 - part.start))
            scores.append((n, len(outputs), count))
            outputs.extend(range(first_of[n], first_of[n] + count))
    return outputs, draws, scores
