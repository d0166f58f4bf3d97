"""Attention over the paged pool, for sequences that add one token and for chunks of a prompt. The torch form.

Knows one layer of the pool, `[page, K|V, kv_head, slot, head_dim]`, and page numbers; not sequences or requests. What
is the same in every layer (indices, masks) is planned once a step. The new tokens' keys and values are in the pool
already.

Three things make it fast on a CPU. Pages are gathered by one `index_select`, which reads each page in a row and lands
each head's keys as one matrix; advanced indexing copies element by element and takes 25 times as long. The query heads
that share a KV head are folded into the rows of one matrix product. The gathered copy is kept small enough for the
cache.

The slots behind a sequence's last token hold whatever was there before: their scores become -inf, so they weigh 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

GATHER_BYTES = 8 << 20
"""Gathered keys and values of one group of decoding sequences: what a last-level cache holds beside the weights."""
WASTED_PAGES = 32
"""A group is cut when padding to its longest sequence would gather more pages than this: another costs as much."""
BLOCK_ROWS = 128
"""Rows of a prompt that are attended at once: more compute scores above the diagonal for nothing, fewer cost calls."""
KEY_UNIT = 16
"""Keys are attended in multiples of this, the rest masked: then a row's bfloat16 sums do not depend on how many keys
are masked behind its own, nor on the chunk or group that it is in."""
MOST_KEYS = 1024
"""Keys whose values one bfloat16 product sums. With more, oneDNN cuts the sum where the numbers of rows and of keys
tell it to, and a row would change with the chunk that it is in: longer ones are cut here, always at the same keys."""
SCORE_BYTES = 8 << 20
"""Upper bound for one block's scores, which shortens blocks when the past is long."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Rows [first, first + count) of the step's tokens, each the newest token of one sequence."""

    first: int
    count: int
    keys: int  # slots gathered for each, padded to the longest
    pages: Tensor  # int32 [count * pages of the longest], each row's in order
    mask: Tensor  # [count, 1, keys]: 0 where there is a token, else -inf


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows [first, first + count) of the step's tokens: tokens [start, start + count) of one sequence."""

    first: int
    count: int
    start: int
    pages: Tensor  # int32 [pages], in order


class TorchAttention:
    """In plain torch operators. `plan_*` once a step, `decode` and `chunk` once a layer; queries are already scaled.

    Owns the memory that pages are gathered into, so it serves one thread.
    """

    def __init__(self, kv_heads: int, page_size: int, head_dim: int, dtype: torch.dtype) -> None:
        self.kv_heads, self.page_size, self.head_dim, self.dtype = kv_heads, page_size, head_dim, dtype
        self.unit = -(-KEY_UNIT // page_size)  # pages
        self.page_elements = 2 * kv_heads * page_size * head_dim
        self.gathered = torch.empty(0, dtype=dtype)
        self.causal = torch.full((BLOCK_ROWS, BLOCK_ROWS), -torch.inf, dtype=dtype).triu_(1)

    def plan_decode(self, first: int, pages: Tensor, lengths: Sequence[int]) -> list[DecodeGroup]:
        """Cut sequences into groups of similar length.

        `pages` int32 [sequences, most pages], every entry a page of the pool; `lengths` in tokens, ascending, with the
        new token counted.
        """
        counts = [self._whole_pages(length) for length in lengths]
        pages = _widened(pages, max(counts, default=0))
        groups, begin = [], 0
        for end in _cuts(counts, max_pages=max(1, GATHER_BYTES // (self.page_elements * self.dtype.itemsize))):
            groups.append(self._group(first + begin, pages[begin:end, : counts[end - 1]], lengths[begin:end]))
            begin = end
        return groups

    def _group(self, first: int, pages: Tensor, lengths: Sequence[int]) -> DecodeGroup:
        count, keys = pages.shape[0], pages.shape[1] * self.page_size
        behind = torch.arange(keys)[None, :] >= torch.tensor(lengths)[:, None]
        mask = torch.zeros(count, keys, dtype=self.dtype).masked_fill_(behind, -torch.inf)
        return DecodeGroup(first, count, keys, pages.reshape(-1), mask[:, None])

    def plan_chunk(self, first: int, count: int, start: int, pages: Tensor) -> Chunk:
        """`pages` int32 [pages]: those of tokens [0, start + count), in order."""
        return Chunk(first, count, start, _widened(pages[None], self._whole_pages(start + count))[0])

    def _whole_pages(self, tokens: int) -> int:
        """Pages to gather for so many tokens, in whole KEY_UNITs."""
        return -(-tokens // (self.unit * self.page_size)) * self.unit

    def _gather(self, layer: Tensor, pages: Tensor, sequences: int) -> tuple[Tensor, Tensor]:
        """Keys and values, each [kv_heads * sequences, keys, head_dim], heads outermost; the next call overwrites."""
        needed = len(pages) * self.page_elements
        if self.gathered.numel() < needed:
            self.gathered = torch.empty(needed, dtype=self.dtype)
        planes = self.gathered[:needed].view(2 * self.kv_heads, len(pages), -1)  # K of each head, then V of each
        torch.index_select(layer.view(len(layer), 2 * self.kv_heads, -1), 0, pages, out=planes.transpose(0, 1))
        keys, values = planes.view(2, self.kv_heads * sequences, -1, self.head_dim).unbind(0)
        return keys, values

    def decode(self, query: Tensor, layer: Tensor, group: DecodeGroup, out: Tensor) -> None:
        """Fill the group's rows of `out` [rows, heads, head_dim]."""
        rows = slice(group.first, group.first + group.count)
        keys, values = self._gather(layer, group.pages, group.count)
        apart = (group.count, self.kv_heads, -1, self.head_dim)
        folded = query[rows].view(apart).transpose(0, 1).reshape(self.kv_heads * group.count, -1, self.head_dim)
        scores = torch.bmm(folded, keys.transpose(1, 2))
        scores.view(self.kv_heads, group.count, -1, group.keys).add_(group.mask)
        attended = self._weigh(scores.softmax(-1), values).view(self.kv_heads, group.count, -1, self.head_dim)
        out[rows].view(apart).copy_(attended.transpose(0, 1))

    def chunk(self, query: Tensor, layer: Tensor, chunk: Chunk, out: Tensor) -> None:
        """Fill the chunk's rows of `out`: each row sees all keys up to its own."""
        keys, values = self._gather(layer, chunk.pages, 1)
        heads = query.shape[1]
        seen = chunk.start + chunk.count
        block = max(1, min(BLOCK_ROWS, SCORE_BYTES // (heads * seen * self.dtype.itemsize)))
        for begin in range(0, chunk.count, block):
            count = min(block, chunk.count - begin)
            rows = slice(chunk.first + begin, chunk.first + begin + count)
            until = chunk.start + begin + count
            whole = self._whole_pages(until) * self.page_size
            scores = torch.bmm(self._fold(query[rows]), keys[:, :whole].transpose(1, 2))
            masked = scores.view(heads, count, whole)
            masked[..., until - count : until].add_(self.causal[:count, :count])
            masked[..., until:] = -torch.inf
            attended = self._weigh(scores.softmax(-1), values[:, :whole])
            out[rows].copy_(attended.view(heads, count, self.head_dim).transpose(0, 1))

    def _weigh(self, weights: Tensor, values: Tensor) -> Tensor:
        """[batch, rows, keys] x [batch, keys, head_dim] -> [batch, rows, head_dim]."""
        if self.dtype != torch.bfloat16 or values.shape[1] <= MOST_KEYS:
            return torch.bmm(weights, values)
        first, *rest = zip(weights.split(MOST_KEYS, 2), values.split(MOST_KEYS, 1), strict=True)
        total = torch.bmm(*first)
        for part in rest:
            total = torch.baddbmm(total, *part)
        return total

    def _fold(self, query: Tensor) -> Tensor:
        """[rows, heads, head_dim] -> [kv_heads, heads per group * rows, head_dim]."""
        return query.transpose(0, 1).reshape(self.kv_heads, -1, self.head_dim)


def _widened(pages: Tensor, width: int) -> Tensor:
    """[sequences, at least `width`] pages: what is missing is filled with each one's last, to be masked."""
    missing = width - pages.shape[1]
    return torch.cat((pages, pages[:, -1:].expand(-1, missing)), 1) if missing > 0 else pages


def _cuts(counts: Sequence[int], max_pages: int) -> list[int]:
    """Where groups end, for ascending page `counts`: max_pages gathered at most, WASTED_PAGES of padding at most."""
    ends, begin, total = [], 0, 0
    for n, count in enumerate(counts):
        gathered = (n + 1 - begin) * count
        if n > begin and (gathered > max_pages or gathered - total - count > WASTED_PAGES):
            ends.append(n)
            begin, total = n, 0
        total += count
    return [*ends, len(counts)] if counts else []
