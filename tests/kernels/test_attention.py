"""Paged attention against attention written out, one sequence and one head at a time."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from cbdisagg_kernels import attention as module
from cbdisagg_kernels.attention import TorchAttention
from cbdisagg_kernels.kv_write import kv_rows, write_kv
from torch import Tensor

PAGE = 4
SHAPES = [(1, 1, 8), (2, 3, 16), (4, 1, 8)]  # kv_heads, query heads of each, head_dim


def naive(query: Tensor, keys: Tensor, values: Tensor, start: int) -> Tensor:
    """query [rows, heads, dim] of tokens start.., keys and values [tokens, kv_heads, dim] -> [rows, heads, dim]."""
    group = query.shape[1] // keys.shape[1]
    out = torch.zeros_like(query)
    for row, head in itertools.product(range(query.shape[0]), range(query.shape[1])):
        seen = start + row + 1
        scores = keys[:seen, head // group] @ query[row, head]
        weights = (scores - scores.max()).exp()
        out[row, head] = (weights / weights.sum()) @ values[:seen, head // group]
    return out


class Paged:
    """Random keys and values, written to pages in random order of a layer that is full of large numbers."""

    def __init__(self, lengths: list[int], kv_heads: int, dim: int, seed: int) -> None:
        torch.manual_seed(seed)
        counts = [-(-length // PAGE) for length in lengths]
        order = torch.randperm(sum(counts) + 3).int()
        self.layer = torch.full((len(order), 2, kv_heads, PAGE, dim), 1e4)
        self.keys = [torch.randn(length, kv_heads, dim) for length in lengths]
        self.values = [torch.randn(length, kv_heads, dim) for length in lengths]
        self.pages = list(order[: sum(counts)].split(counts))
        for pages, keys, values in zip(self.pages, self.keys, self.values, strict=True):
            at = torch.arange(len(keys))
            where = pages[at // PAGE].long() * PAGE + at % PAGE
            write_kv(self.layer, kv_rows(where, kv_heads, PAGE), torch.cat((keys, values), 1))

    def table(self) -> Tensor:
        """Page tables, each padded with its own last page."""
        widest = max(map(len, self.pages))
        return torch.stack([torch.cat((pages, pages[-1:].expand(widest - len(pages)))) for pages in self.pages])


@pytest.mark.parametrize(("kv_heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize("lengths", [[1], [PAGE - 1, PAGE, PAGE + 1], [1, 2, 30, 31, 95]])
@pytest.mark.parametrize("budget", [1, 8 << 20])
def test_decode(
    monkeypatch: pytest.MonkeyPatch, kv_heads: int, group: int, dim: int, lengths: list[int], budget: int
) -> None:
    monkeypatch.setattr(module, "GATHER_BYTES", budget)
    monkeypatch.setattr(module, "WASTED_PAGES", 9)
    paged = Paged(lengths, kv_heads, dim, seed=len(lengths))
    attention = TorchAttention(kv_heads, PAGE, dim, torch.float32)
    query = torch.randn(len(lengths), kv_heads * group, dim)
    out = torch.full_like(query, math.nan)
    groups = attention.plan_decode(0, paged.table(), lengths)
    assert len(groups) == (len(lengths) if budget == 1 else 1 + (max(lengths) == 95))
    for each in groups:
        attention.decode(query, paged.layer, each, out)
    expected = [naive(query[n : n + 1], paged.keys[n], paged.values[n], length - 1) for n, length in enumerate(lengths)]
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("kv_heads", "group", "dim"), SHAPES)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, PAGE), (3, 2), (PAGE, PAGE + 1), (17, 23), (0, 40)])
@pytest.mark.parametrize(("rows", "score_bytes"), [(7, 8 << 20), (128, 8 << 20), (128, 600)])
def test_chunk(
    monkeypatch: pytest.MonkeyPatch,
    kv_heads: int,
    group: int,
    dim: int,
    start: int,
    count: int,
    rows: int,
    score_bytes: int,
) -> None:
    monkeypatch.setattr(module, "BLOCK_ROWS", rows)
    monkeypatch.setattr(module, "SCORE_BYTES", score_bytes)
    paged = Paged([start + count], kv_heads, dim, seed=start + count)
    attention = TorchAttention(kv_heads, PAGE, dim, torch.float32)
    query = torch.randn(2 + count, kv_heads * group, dim)  # two rows before it belong to others
    out = torch.full_like(query, math.nan)
    attention.chunk(query, paged.layer, attention.plan_chunk(2, count, start, paged.pages[0]), out)
    assert out[:2].isnan().all()
    expected = naive(query[2:], paged.keys[0], paged.values[0], start)
    torch.testing.assert_close(out[2:], expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_stays_near_float32() -> None:
    lengths = [5, 60]
    paged = Paged(lengths, 3, 64, seed=1)
    query = torch.randn(2, 9, 64) / 8
    exact, rounded = torch.empty_like(query), torch.empty_like(query).bfloat16()
    for dtype, out in ((torch.float32, exact), (torch.bfloat16, rounded)):
        attention = TorchAttention(3, PAGE, 64, dtype)
        for group in attention.plan_decode(0, paged.table(), lengths):
            attention.decode(query.to(dtype), paged.layer.to(dtype), group, out)
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.02)


def test_rows_do_not_depend_on_their_group() -> None:
    """One sequence alone, or beside a longer one: the same up to rounding, whatever padding holds."""
    paged = Paged([9, 50], 2, 16, seed=3)
    attention = TorchAttention(2, PAGE, 16, torch.float32)
    query = torch.randn(2, 4, 16)
    together, alone = torch.empty(2, 4, 16), torch.empty(1, 4, 16)
    for group in attention.plan_decode(0, paged.table(), [9, 50]):
        attention.decode(query, paged.layer, group, together)
    for group in attention.plan_decode(0, paged.pages[0][None], [9]):
        attention.decode(query[:1], paged.layer, group, alone)
    torch.testing.assert_close(together[:1], alone, rtol=1e-6, atol=1e-6)
