"""From a plan's slices to one flat batch of tokens.

Knows slots, pages and attention's plans; not the model. Order of the rows: first the slices of one token, the shorter
sequences before the longer, so that attention can take neighbours of similar length together; then the longer slices,
as the plan has them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from cbdisagg_kernels.attention import Attention, Chunk, DecodeGroup
from torch import Tensor

from cbdisagg.engine.slots import Slots
from cbdisagg.messages import Slice


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's tokens. `ids`, `positions` int32 [rows]; `kv_rows` where each row's keys and values go in a layer.

    `outputs` int64: rows that the head is asked for, those that draw first; None if it is all rows in their order.
    `draws`: the number in the plan of the slice that draws from each of the first outputs. `scores`: (number in the
    plan, first output, count) for the others.
    """

    ids: Tensor
    positions: Tensor
    kv_rows: Tensor
    groups: list[DecodeGroup]
    chunks: list[Chunk]
    outputs: Tensor | None
    draws: list[int]
    scores: list[tuple[int, int, int]]


def make_batch(
    slices: Sequence[Slice],
    slots: Slots,
    attention: Attention,
    kv_rows: Callable[[Tensor, int, int], Tensor],
    kv_heads: int,
) -> Batch:
    """Raises ValueError if a slice is empty, or names tokens or pages that its slot does not have."""
    for part in slices:
        _check(part, slots)
    singles = sorted((n for n, part in enumerate(slices) if part.count == 1), key=lambda n: slices[n].start)
    longer = [n for n, part in enumerate(slices) if part.count > 1]
    order = [*singles, *longer]

    counts = [slices[n].count for n in order]
    firsts = np.cumsum([0, *counts])[:-1].tolist()
    slot_of_row = np.repeat([slices[n].slot for n in order], counts)
    positions = np.concatenate([np.arange(slices[n].start, slices[n].start + slices[n].count) for n in order])
    page, place = np.divmod(positions, slots.page_size)
    where = slots.pages[slot_of_row, page].astype(np.int64) * slots.page_size + place

    first_of = dict(zip(order, firsts, strict=True))  # in the order of the rows
    outputs, draws, scores = _outputs(slices, slots, first_of)
    return Batch(
        ids=torch.from_numpy(slots.ids[slot_of_row, positions]),
        positions=torch.from_numpy(positions),
        kv_rows=kv_rows(torch.from_numpy(where), kv_heads, slots.page_size),
        groups=_groups([slices[n] for n in singles], slots, attention),
        chunks=[_chunk(slices[n], first_of[n], slots, attention) for n in longer],
        outputs=None if outputs == list(range(len(positions))) else torch.tensor(outputs, dtype=torch.int64),
        draws=draws,
        scores=scores,
    )


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


def _groups(singles: Sequence[Slice], slots: Slots, attention: Attention) -> list[DecodeGroup]:
    if not singles:
        return []
    lengths = np.array([part.start + 1 for part in singles])
    counts = -(-lengths // slots.page_size)
    # Behind a sequence's last page the table repeats it, so that a gather never reads a page of unknown content.
    columns = np.minimum(np.arange(counts.max())[None, :], counts[:, None] - 1)
    tables = slots.pages[np.array([part.slot for part in singles])[:, None], columns]
    return attention.plan_decode(0, torch.from_numpy(tables), lengths.tolist())


def _chunk(part: Slice, first: int, slots: Slots, attention: Attention) -> Chunk:
    pages = -(-(part.start + part.count) // slots.page_size)
    table = torch.from_numpy(slots.pages[part.slot, :pages])
    return attention.plan_chunk(first, part.count, part.start, table)
