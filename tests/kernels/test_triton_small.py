"""The smaller Triton kernels, in the interpreter, against their references: norm, activation, page copies, draws."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from cbdisagg_kernels import activation as torch_activation
from cbdisagg_kernels import norm as torch_norm
from cbdisagg_kernels.gpu import sample
from cbdisagg_kernels.gpu.activation import silu_mul
from cbdisagg_kernels.gpu.norm import rms_norm
from cbdisagg_kernels.gpu.pages import copy_pages
from torch import Tensor

from cbdisagg.engine.philox import uniform
from cbdisagg.engine.sampler import Drawer
from cbdisagg.messages import Sampling

ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
"""Two last bits or more: the interpreter cuts off what bfloat16 does not hold, where a GPU rounds to the nearest."""


@pytest.mark.parametrize("width", [1, 16, 96, 257])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_rms_norm_with_and_without_the_sum(width: int, dtype: torch.dtype) -> None:
    torch.manual_seed(width)
    wide = torch.randn(3, 2 * width).to(dtype)
    x, residual, weight = wide[:, :width], torch.randn(3, width).to(dtype), torch.randn(width).to(dtype)
    tolerance = ROUNDING[dtype]
    expected = torch_norm.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5), expected, rtol=tolerance, atol=tolerance)
    total = x + residual
    normed = rms_norm(x, weight, 1e-5, residual)
    if dtype == torch.bfloat16:
        torch.testing.assert_close(residual, total, rtol=tolerance / 2, atol=0.0)
    else:
        assert (residual == total).all()
    expected = torch_norm.rms_norm(residual, weight, 1e-5)  # of the sum as it was rounded
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("inner", [1, 96, 2049])
@pytest.mark.parametrize("dtype", list(ROUNDING))
def test_silu_mul(inner: int, dtype: torch.dtype) -> None:
    torch.manual_seed(inner)
    gate_up = (5 * torch.randn(2, 2 * inner)).to(dtype)
    tolerance = ROUNDING[dtype]
    expected = torch_activation.silu_mul(gate_up.clone())
    torch.testing.assert_close(silu_mul(gate_up), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("page_bytes", [64, 16_384, 20_480])
def test_pages_are_copied_by_number(page_bytes: int) -> None:
    chance = random.Random(page_bytes)
    source = torch.randint(0, 256, (9, page_bytes), dtype=torch.uint8)
    target = torch.randint(0, 256, (7, page_bytes), dtype=torch.uint8)
    here, there = (torch.tensor(chance.sample(range(count), 5), dtype=torch.int32) for count in (9, 7))
    expected = target.clone()
    expected[there.long()] = source[here.long()]
    copy_pages(source, target, here, there)
    assert (target == expected).all()
    copy_pages(source, target, here[:0], there[:0])
    assert (target == expected).all()


# ---------------------------------------------------------------------------------------------------------- draws


def draws_of(samplings: list[Sampling], positions: list[int]) -> sample.Draws:
    def floats(values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32)

    def words(values: list[int]) -> Tensor:
        return torch.from_numpy(np.array([value & 0xFFFFFFFF for value in values], np.uint32).view(np.int32))

    return sample.Draws(
        temperature=floats([each.temperature for each in samplings]),
        top_p=floats([each.top_p for each in samplings]),
        most_depth=floats([-math.log(each.min_p) if each.min_p else math.inf for each in samplings]),
        top_k=words([each.top_k for each in samplings]),
        seed_low=words([each.seed for each in samplings]),
        seed_high=words([each.seed >> 32 for each in samplings]),
        choice=words([each.choice for each in samplings]),
        position=words(positions),
    )


def drawn(logits: Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    return sample.draw(logits, draws_of(samplings, positions)).tolist()


def on_the_host(logits: Tensor, samplings: list[Sampling], positions: list[int]) -> list[int]:
    nothing = np.zeros(0, np.int32)
    return [
        Drawer(sampling, nothing, nothing, logits.shape[1]).draw(row.numpy(), position)
        for row, sampling, position in zip(logits, samplings, positions, strict=True)
    ]


FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.1},
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.8},
    {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
    {"temperature": 0.3, "top_p": 0.95},
    {"temperature": 5.0, "top_k": 290},  # further down than what is searched first
    {"temperature": 0.05, "top_k": 250},  # most lie far below
    {"temperature": 40.0, "top_p": 0.999},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("block", [64, 512])
def test_draws_are_those_of_the_host(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All filters, seeds of 64 bits, positions and choices, rows of one batch; also when a row takes many blocks."""
    monkeypatch.setattr(sample, "BLOCK", block)
    chance = random.Random(block)
    samplings = [
        Sampling(**{"max_tokens": 1, "seed": chance.getrandbits(64), "choice": chance.randrange(3), **filters})
        for filters in FILTERS
    ]
    positions = [chance.randrange(1 << 20) for _ in samplings]
    logits = 4 * torch.randn(len(samplings), 300, generator=torch.Generator().manual_seed(block))
    assert drawn(logits, samplings, positions) == on_the_host(logits, samplings, positions)


def test_ids_that_tie_with_the_last_one_kept_are_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0, 1.0, -3.0, -torch.inf]])
    seen = set()
    for seed in range(24):
        sampling = Sampling(max_tokens=1, seed=seed, top_k=3)
        seen |= set(drawn(logits, [sampling], [seed]))
        assert drawn(logits, [sampling], [seed]) == on_the_host(logits, [sampling], [seed])
    assert seen == {1, 2, 3, 4, 5}


def test_the_best_is_the_lowest_among_equals() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0], [-torch.inf, -torch.inf, 0.0], [2.0, 2.0, 2.0]])
    assert sample.argmax(logits).tolist() == [1, 2, 0]
    greedy = [Sampling(max_tokens=1, temperature=0.0)] * 3
    assert drawn(logits, greedy, [0, 1, 2]) == [1, 2, 0]


def test_the_uniform_number_is_the_hosts() -> None:
    """One id for each part of [0, 1): the draw tells the number to one part in 4,096."""
    logits = torch.zeros(6, 4096)
    samplings = [
        Sampling(max_tokens=1, seed=seed, choice=n) for n, seed in enumerate((0, 1, 1 << 32, (1 << 64) - 1, 7, 9))
    ]
    positions = [0, 1, 2, 4095, 1 << 20, (1 << 31) - 1]
    expected = [int(4096 * uniform(s.seed, s.choice, p)) for s, p in zip(samplings, positions, strict=True)]
    assert drawn(logits, samplings, positions) == expected
