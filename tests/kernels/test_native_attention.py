"""The C attention, rope and KV write against formulas in float64, and bit for bit in other company."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_attention import NativeSelfAttention, cut, fits
from cbdisagg_kernels.rope import rope_tables
from cbdisagg_kernels.self_attention import Rotation, Shape, TorchSelfAttention, positions_of
from numpy.typing import NDArray
from torch import Tensor

HEADS = [(1, 1, 8), (2, 3, 16), (3, 3, 64), (1, 9, 24), (2, 1, 128), (1, 40, 256)]  # kv_heads, group, head_dim
MIXED = [(1, 0), (1, 15), (1, 16), (1, 63), (1, 64), (1, 200), (2, 0), (7, 62), (33, 0), (40, 31), (130, 5)]
"""Rows and first position of each segment of a step: about a page's, a block's and a tile's end."""


def shape_of(kv_heads: int, group: int, dim: int, page: int, dtype: torch.dtype, turned: bool = False) -> Shape:
    turns = Rotation(torch.rand(dim // 2) + 0.01, 1.25, 400) if turned else None
    return Shape(kv_heads * group, kv_heads, dim, page, dtype, turns)


class Step:
    """Segments with their pages in random order, in a pool where all that no sequence owns is NaN."""

    def __init__(self, shape: Shape, parts: Sequence[tuple[int, int]], seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.shape = shape
        chance = np.random.default_rng(seed)
        self.lengths = [start + rows for rows, start in parts]
        counts = [-(-length // shape.page_size) for length in self.lengths]
        order = chance.permutation(sum(counts) + 2).astype(np.int32)
        self.slots = chance.permutation(len(parts) + 1)[: len(parts)].tolist()
        self.pages = np.full((len(parts) + 1, max(counts) + 1), 1 << 30, np.int32)  # no such page
        for slot, count, end in zip(self.slots, counts, np.cumsum(counts), strict=True):
            self.pages[slot, :count] = order[end - count : end]
        size = (len(order), 2, shape.kv_heads, shape.page_size, shape.head_dim)
        self.layer = torch.full(size, torch.nan, dtype=shape.dtype)
        width = shape.heads + 2 * shape.kv_heads
        self.history = [torch.randn(n, width, shape.head_dim).to(shape.dtype) for n in self.lengths]
        firsts = np.cumsum([0, *(rows for rows, _ in parts)])
        self.segments = np.array(
            [(first, *part, slot) for first, part, slot in zip(firsts, parts, self.slots, strict=False)], np.int32
        )
        self.qkv = torch.cat([each[start:] for each, (_, start) in zip(self.history, parts, strict=True)])

    def place(self, number: int, position: int) -> tuple[int, int]:
        page, place = divmod(position, self.shape.page_size)
        return int(self.pages[self.slots[number], page]), place

    def fill_past(self) -> None:
        """Keys and values of the tokens before each segment, as they are: nothing is turned."""
        for number, (_, _, start, _) in enumerate(self.segments.tolist()):
            for position in range(start):
                page, place = self.place(number, position)
                kv = self.history[number][position, self.shape.heads :]
                self.layer[page, :, :, place] = kv.view(2, self.shape.kv_heads, -1)

    def run(self, attention: NativeSelfAttention) -> Tensor:
        qkv = self.qkv.clone()
        plan = attention.plan(self.segments, self.pages)
        attention.write(qkv, self.layer, plan)
        return attention.attend(qkv, self.layer, plan)

    def exact(self) -> Tensor:
        """Attention written out in float64, one row and one head at a time."""
        heads, kv_heads = self.shape.heads, self.shape.kv_heads
        rows = []
        for number, (_, count, start, _) in enumerate(self.segments.tolist()):
            query, keys, values = self.history[number].double().split((heads, kv_heads, kv_heads), 1)
            for position, head in itertools.product(range(start, start + count), range(heads)):
                own = head // (heads // kv_heads)
                scores = keys[: position + 1, own] @ query[position, head] * self.shape.head_dim**-0.5
                rows.append(scores.softmax(0) @ values[: position + 1, own])
        return torch.stack(rows).view(len(self.qkv), -1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page", [1, 5, 16, 100])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), HEADS)
def test_attention(library: Native, kv_heads: int, group: int, dim: int, page: int, dtype: torch.dtype) -> None:
    step = Step(shape_of(kv_heads, group, dim, page, dtype), MIXED if dim <= 64 else MIXED[::3], seed=dim + page)
    step.fill_past()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    result = step.run(NativeSelfAttention(library, 1, step.shape))
    assert result.dtype == dtype
    torch.testing.assert_close(result.double(), step.exact(), rtol=tolerance, atol=tolerance)


SPANNED = [(1, 255), (1, 256), (1, 300), (1, 1030), (3, 254), (40, 500), (70, 700)]
"""About the end of a span of 256 keys."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (2, 1, 24), (1, 9, 128)])
def test_attention_over_several_spans(library: Native, kv_heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    step = Step(shape_of(kv_heads, group, dim, 16, dtype), SPANNED, seed=dim)
    step.fill_past()
    tolerance = 2e-6 if dtype == torch.float32 else 2e-2
    result = step.run(NativeSelfAttention(library, 1, step.shape))
    torch.testing.assert_close(result.double(), step.exact(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(3, 3, 64), (2, 1, 24), (1, 9, 128)])
def test_spans_shared_by_threads_give_the_same_bits(
    library: Native, kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    """Against one thread, which shares nothing, and against the same token as the last one of a chunk."""
    shape = shape_of(kv_heads, group, dim, 16, dtype)
    for parts in ([(1, 256)], [(1, 100), (1, 1030)], [(1, 255), (1, 511), (1, 700)]):
        step = Step(shape, parts, seed=dim)
        step.fill_past()
        alone = step.run(NativeSelfAttention(library, 1, shape))
        shared = NativeSelfAttention(library, 4, shape)
        assert shared.plan(step.segments, step.pages).job.spans
        assert torch.equal(step.run(shared), alone)
        chunk = Step(shape, [(40, start - 39) for _, start in parts], seed=dim)
        chunk.history = step.history
        chunk.qkv = torch.cat([each[-40:] for each in step.history])
        chunk.fill_past()
        last = chunk.run(NativeSelfAttention(library, 3, shape))[39::40]
        assert torch.equal(last, alone)


def test_large_scores_and_falling_ones(library: Native) -> None:
    """A maximum that grows from block to block, and one that all the rest is nothing beside."""
    shape = shape_of(1, 1, 8, 16, torch.float32)
    for scale in (1.0, -1.0):
        step = Step(shape, [(1, 299)])
        ramp = scale * torch.linspace(-40.0, 40.0, 300)
        step.history[0][:, :2] = ramp[:, None, None]
        step.qkv = step.history[0][299:]
        step.fill_past()
        result = step.run(NativeSelfAttention(library, 1, shape))
        torch.testing.assert_close(result.double(), step.exact(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(1, 1, 8), (3, 3, 64), (2, 2, 24)])
def test_write_turns_heads_and_fills_places(
    library: Native, kv_heads: int, group: int, dim: int, dtype: torch.dtype
) -> None:
    shape = shape_of(kv_heads, group, dim, 16, dtype, turned=True)
    step = Step(shape, MIXED)
    attention = NativeSelfAttention(library, 2, shape)
    qkv = step.qkv.clone()
    attention.write(qkv, step.layer, attention.plan(step.segments, step.pages))

    assert shape.rotation is not None
    positions = torch.from_numpy(positions_of(step.segments))
    cos, sin = rope_tables(shape.rotation.frequencies, 400, 1.25, torch.float64)
    expected = step.qkv.double()
    turned = expected[:, : shape.heads + kv_heads]
    turned.copy_(turned * cos[positions] + turned.roll(dim // 2, -1) * sin[positions])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(qkv.double(), expected, rtol=tolerance, atol=tolerance)

    written = torch.full_like(step.layer, torch.nan)
    for number, (row, rows, start, _) in enumerate(step.segments.tolist()):
        for within in range(rows):
            page, place = step.place(number, start + within)
            written[page, :, :, place] = qkv[row + within, shape.heads :].view(2, kv_heads, -1)
    torch.testing.assert_close(step.layer, written, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kv_heads", "group", "dim", "page"), [(3, 3, 64, 16), (1, 1, 24, 5), (2, 8, 128, 64)])
def test_a_rows_bits_depend_on_nothing_beside_it(
    library: Native, kv_heads: int, group: int, dim: int, page: int, dtype: torch.dtype
) -> None:
    """One prompt as a whole, in chunks, token by token, in a crowd, with one thread and with two."""
    shape = shape_of(kv_heads, group, dim, page, dtype, turned=True)
    length = 300
    whole = Step(shape, [(length, 0)])
    one, two = NativeSelfAttention(library, 1, shape), NativeSelfAttention(library, 2, shape)
    expected = whole.run(one)
    assert torch.equal(whole.run(two), expected)

    def rows(parts: Sequence[tuple[int, int]], attention: NativeSelfAttention) -> Tensor:
        """The same sequence's rows, each part in a slot of its own."""
        count = [part[0] for part in parts]
        pages = np.repeat(whole.pages[whole.slots[0]][None], len(parts), 0)
        firsts = np.cumsum([0, *count])[:-1]
        segments = np.array([(first, *part, n) for n, (first, part) in enumerate(zip(firsts, parts, strict=True))])
        qkv = torch.cat([whole.qkv[start : start + each] for each, start in parts])
        plan = attention.plan(segments.astype(np.int32), pages)
        attention.write(qkv, whole.layer, plan)
        return attention.attend(qkv, whole.layer, plan)

    for start, count in ((0, 1), (3, 40), (63, 2), (64, 64), (100, 129), (17, 283)):
        assert torch.equal(rows([(count, start)], one), expected[start : start + count]), (start, count)
    for threads in (one, two):
        decoded = [(1, position) for position in range(0, length, 7)]
        assert torch.equal(rows(decoded, threads), expected[::7])
        crowd = rows([*decoded, (50, 10), (77, 200)], threads)
        assert torch.equal(crowd, torch.cat((expected[::7], expected[10:60], expected[200:277])))


def test_torch_form_agrees(library: Native) -> None:
    shape = shape_of(3, 3, 64, 16, torch.float32, turned=True)
    parts = [(1, 0), (1, 15), (1, 40), (90, 0), (33, 0)]
    step, other = Step(shape, parts), Step(shape, parts)
    for each in (step, other):
        each.layer.nan_to_num_(0.0)
    plain = TorchSelfAttention(shape)
    plan = plain.plan(other.segments, other.pages)
    plain.write(other.qkv, other.layer, plan)
    torch.testing.assert_close(
        step.run(NativeSelfAttention(library, 2, shape)), plain.attend(other.qkv, other.layer, plan)
    )


def test_tiles_cover_segments() -> None:
    segments = np.array([(0, 1, 9, 3), (1, 70, 5, 1), (71, 32, 0, 2), (103, 33, 64, 0)], np.int32)
    tiles = cut(segments, 32)
    assert tiles.dtype == np.int32
    assert tiles.flags.c_contiguous
    assert _rows(tiles) == _rows(segments)
    assert tiles[:, 1].max() == 32
    assert cut(segments[:1], 32).tolist() == segments[:1].tolist()


def _rows(tiles: NDArray[np.int32]) -> list[tuple[int, int, int]]:
    """(row, position, slot) of each."""
    return [(row + n, start + n, slot) for row, rows, start, slot in tiles.tolist() for n in range(rows)]


def test_what_does_not_fit_is_refused(library: Native) -> None:
    for shape in (shape_of(1, 1, 12, 16, torch.float32), shape_of(1, 97, 8, 16, torch.float32)):
        assert not fits(shape)
        with pytest.raises(ValueError, match="cannot"):
            NativeSelfAttention(library, 1, shape)
    assert not fits(shape_of(1, 1, 264, 16, torch.bfloat16))
    assert not fits(shape_of(1, 1, 8, 16, torch.float64))
