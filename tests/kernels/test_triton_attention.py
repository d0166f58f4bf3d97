"""The Triton attention kernels, in the interpreter, against attention written out, one row and one head at a time."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from cbdisagg_kernels.gpu import decode_attention as decode_module
from cbdisagg_kernels.gpu.attention import TritonSelfAttention
from cbdisagg_kernels.self_attention import Rotation, SelfAttention, Shape, TorchSelfAttention
from numpy.typing import NDArray
from torch import Tensor

CPU = torch.device("cpu")

TURNED = {
    dtype: {"rtol": tolerance, "atol": tolerance}
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float16, 4e-3), (torch.bfloat16, 3.2e-2))
}
"""A few last bits: the reference turns keys in their own dtype."""
ATTENDED = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Case:
    """`segments`: (rows, first position) of each, singles first."""

    kv_heads: int
    group: int
    head_dim: int
    page: int
    segments: tuple[tuple[int, int], ...]
    window: int = 0
    dtype: torch.dtype = torch.float32
    turns: bool = True


CASES = {
    "lengths about a page of 8": Case(2, 3, 64, 8, tuple((1, n) for n in (0, 6, 7, 8, 16))),
    "one head, one token": Case(1, 1, 64, 16, ((1, 0),), turns=False),
    "page of 64": Case(1, 4, 64, 64, ((1, 62), (1, 63), (1, 64), (70, 3))),
    "head of 80, not a power of two": Case(1, 2, 80, 16, ((1, 33), (5, 15))),
    "head of 128": Case(1, 2, 128, 16, ((1, 70), (17, 0))),
    "head of 256": Case(1, 1, 256, 8, ((1, 20), (9, 7))),
    "chunks about a page": Case(2, 1, 16, 8, ((7, 0), (8, 0), (9, 0), (7, 1), (2, 8))),
    "a chunk of more than one tile": Case(1, 1, 16, 8, ((1, 5), (150, 20))),
    "window": Case(2, 2, 16, 8, ((1, 4), (1, 60), (1, 90), (40, 0), (30, 50)), window=24),
    "window of one key": Case(1, 2, 16, 8, ((1, 40), (20, 13)), window=1),
    **{
        f"head of {dim}, page of {page}, window of {window}": Case(
            1, 2, dim, page, ((1, page - 1), (1, window - 1), (1, window), (1, 90), (9, page - 1), (7, 83)), window
        )
        for dim, page, window in (
            *((64, 8, 50), (64, 32, 17), (80, 64, 33), (96, 16, 64), (112, 32, 9), (128, 8, 31), (128, 64, 20)),
            *((160, 16, 16), (192, 64, 65), (224, 8, 7), (256, 32, 40), (256, 64, 100)),
        )
    },
    "page of 32": Case(2, 1, 64, 32, ((1, 30), (1, 31), (1, 32), (33, 31), (2, 64))),
    "a group of 40": Case(1, 40, 64, 16, ((1, 17), (5, 14))),
    "float16": Case(2, 2, 64, 16, ((1, 40), (21, 9)), dtype=torch.float16),
    "bfloat16": Case(2, 2, 64, 16, ((1, 40), (21, 9)), dtype=torch.bfloat16),
    "bfloat16, head of 80, window": Case(1, 4, 80, 8, ((1, 7), (1, 50), (19, 33)), window=30, dtype=torch.bfloat16),
}


class Step:
    """A step's rows over a layer in which pages lie in random order, and other pages hold large numbers."""

    def __init__(self, case: Case, seed: int) -> None:
        self.case = case
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-(start + rows) // case.page) for rows, start in case.segments]
        order = random.Random(seed).sample(range(sum(counts) + 3), sum(counts))
        self.pages = np.full((len(counts), max(counts) + 1), -1, np.int32)
        for n, count in enumerate(counts):
            self.pages[n, :count] = [order.pop() for _ in range(count)]
        self.layer = torch.full((sum(counts) + 3, 2, case.kv_heads, case.page, case.head_dim), 1e4, dtype=case.dtype)
        for n, (rows, start) in enumerate(case.segments):
            for position in range(start + rows):  # what is not the past is overwritten by the step
                page, slot = self.pages[n, position // case.page], position % case.page
                past = torch.randn(2, case.kv_heads, case.head_dim, generator=generator)
                self.layer[page, :, :, slot] = past.to(case.dtype)
        first, segments = 0, []
        for n, (rows, start) in enumerate(case.segments):
            segments.append((first, rows, start, n))
            first += rows
        self.segments = np.array(segments, np.int32)
        heads = case.kv_heads * (case.group + 2)
        self.qkv = torch.randn(first, heads, case.head_dim, generator=generator).to(case.dtype)
        rotation = Rotation(torch.rand(case.head_dim // 2, generator=generator), 0.9, 256) if case.turns else None
        self.shape = Shape(case.kv_heads * case.group, case.kv_heads, case.head_dim, case.page, case.dtype, rotation)

    def run(self, attention: SelfAttention[object]) -> tuple[Tensor, Tensor]:
        """(the layer, what is attended), of copies."""
        qkv, layer = self.qkv.clone(), self.layer.clone()
        plan = attention.plan(self.segments, np.maximum(self.pages, 0))
        attention.write(qkv, layer, plan)
        return layer, attention.attend(qkv, layer, plan)

    def expected(self, layer: Tensor, qkv: Tensor) -> Tensor:
        """Over `layer`, which holds the step's keys already, with turned queries; in float64."""
        case = self.case
        out = torch.zeros(len(qkv), case.kv_heads * case.group, case.head_dim, dtype=torch.float64)
        for (first, rows, start, n), head in itertools.product(self.segments.tolist(), range(out.shape[1])):
            for row in range(rows):
                positions = np.arange(max(0, start + row + 1 - case.window) if case.window else 0, start + row + 1)
                planes = layer[self.pages[n, positions // case.page], :, head // case.group, positions % case.page]
                keys, values = planes.double().unbind(1)
                weights = (keys @ qkv[first + row, head].double() * case.head_dim**-0.5).softmax(0)
                out[first + row, head] = weights @ values
        return out.view(len(qkv), -1)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("splits", [1, 4])
def test_a_step(name: str, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    if splits > 1 and not any(rows == 1 for rows, _ in case.segments):
        pytest.skip("no context to divide")
    monkeypatch.setattr(decode_module, "splits_for", lambda sequences, kv_heads: splits)
    step = Step(case, seed=len(name))
    wanted_layer, _ = step.run(TorchSelfAttention(step.shape))
    layer, attended = step.run(TritonSelfAttention(step.shape, CPU, case.window))
    torch.testing.assert_close(layer, wanted_layer, **TURNED[case.dtype])
    turned = step.qkv.clone()
    torch_attention = TorchSelfAttention(step.shape)
    torch_attention.write(turned, step.layer.clone(), torch_attention.plan(step.segments, np.maximum(step.pages, 0)))
    tolerance = ATTENDED[case.dtype]
    torch.testing.assert_close(
        attended.double(), step.expected(layer, turned), rtol=tolerance, atol=tolerance, check_dtype=False
    )


def test_rows_that_pad_a_graph_read_and_write_nothing() -> None:
    step = Step(Case(2, 2, 16, 8, ((1, 9), (1, 20))), seed=1)
    attention = TritonSelfAttention(step.shape, CPU)
    plan = attention.plan(step.segments, np.maximum(step.pages, 0))
    plan.positions[1] = -1
    layer, qkv = step.layer.clone(), step.qkv.clone()
    attention.write(qkv, layer, plan)
    assert (layer != step.layer).flatten(1).any(1).sum() == 1  # the page of the first sequence's new token
    attended = attention.attend(qkv, layer, plan)
    assert attended[0].abs().sum() > 0
    assert (attended[1] == 0).all()


def test_random_shapes_agree_with_torch() -> None:
    """Whatever the mixture: the two implementations of the protocol give the same step."""
    chance = random.Random(5)
    for seed in range(6):
        singles = tuple((1, chance.randrange(40)) for _ in range(chance.randrange(4)))
        chunks = tuple(
            (chance.randint(2, 20), chance.randrange(30)) for _ in range(chance.randint(0 if singles else 1, 2))
        )
        singles = tuple(sorted(singles, key=lambda each: each[1]))
        case = Case(chance.choice((1, 2)), chance.choice((1, 3)), chance.choice((16, 24)), 8, singles + chunks)
        step = Step(case, seed)
        ours, theirs = step.run(TritonSelfAttention(step.shape, CPU)), step.run(TorchSelfAttention(step.shape))
        for mine, reference in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, reference, rtol=1e-4, atol=1e-4)


def test_the_first_empty_share_is_no_trouble() -> None:
    """Contexts of one block, divided among more programs than there are blocks."""
    step = Step(Case(1, 1, 16, 8, ((1, 0), (1, 3))), seed=2)
    alone, divided = TritonSelfAttention(step.shape, CPU), TritonSelfAttention(step.shape, CPU)
    pages: NDArray[np.int32] = np.maximum(step.pages, 0)
    qkv, layer = step.qkv.clone(), step.layer.clone()
    plan = alone.plan(step.segments, pages)
    alone.write(qkv, layer, plan)
    outs = [torch.full((2, 16), torch.nan) for _ in range(2)]
    for out, splits in zip(outs, (1, 8), strict=True):
        decode_module.decode_attention(qkv, layer, plan.positions, plan.tables, out, divided.heads, splits)
    torch.testing.assert_close(outs[0], outs[1], rtol=1e-6, atol=1e-6)
