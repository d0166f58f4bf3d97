"""Drawing and log probabilities in C against the numpy reference: every filter, edges, ties; bitwise invariance."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cbdisagg_kernels.native import Native
from cbdisagg_kernels.native_sampling import NativeSampling
from cbdisagg_kernels.ops import select
from torch import Tensor

from cbdisagg.engine.philox import uniform
from cbdisagg.engine.sampler import Drawer, threshold
from cbdisagg.engine.samplers import NativeSampler, NumpySampler
from cbdisagg.messages import Logprobs, Sampling

PROMPT = np.array([3, 5, 5, 9], np.int32)
OUTPUT = np.array([5, 11, 11, 11], np.int32)
POSITION = len(PROMPT) + len(OUTPUT)
TIE = 2e-6
"""How near to the edge between two tokens a number may fall for float32 to decide."""
OPS = select(torch.device("cpu"), torch.float32, native_path=False)
REFERENCE = NumpySampler(OPS)


@pytest.fixture
def sampler(library: Native) -> NativeSampler:
    return NativeSampler(NativeSampling(library, 1))


def drawers(samplings: Sequence[Sampling], vocab: int) -> list[Drawer]:
    return [Drawer(each, PROMPT, OUTPUT, vocab) for each in samplings]


def from_edge(drawer: Drawer, logits: Tensor) -> float:
    """How far the number drawn is from the edge between two tokens."""
    adjusted = drawer._adjust(logits.numpy(), POSITION)
    scaled = (adjusted - adjusted.max()) / np.float32(drawer.sampling.temperature)
    floor = threshold(scaled, drawer.sampling.top_k, drawer.sampling.top_p, float(drawer.floor))
    weights = np.where(scaled >= floor, np.exp(scaled.astype(np.float64)), 0.0)
    edges = weights.cumsum() / weights.sum()
    return float(np.abs(edges - uniform(drawer.sampling.seed, drawer.sampling.choice, POSITION)).min())


def check(sampler: NativeSampler, logits: Tensor, samplings: Sequence[Sampling]) -> None:
    """The reference's tokens, except in ties; and the logits stay as they are."""
    rows, before = drawers(samplings, logits.shape[1]), logits.clone()
    positions = [POSITION] * len(rows)
    found, wanted = sampler.draw(logits, rows, positions), REFERENCE.draw(logits, rows, positions)
    assert torch.equal(logits, before)
    for n, (mine, its) in enumerate(zip(found, wanted, strict=True)):
        assert mine == its or from_edge(rows[n], logits[n]) < TIE, (samplings[n], mine, its)


def spread(rows: int, vocab: int, seed: int = 0) -> Tensor:
    """Peaked and flat rows, as models give them."""
    chance = torch.Generator().manual_seed(seed)
    widths = torch.tensor([0.05, 1.0, 3.0, 8.0]).repeat(rows)[:rows, None]
    return torch.randn(rows, vocab, generator=chance) * widths + 4


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 650},
    {"top_k": 10**6},
    {"top_p": 0.0},
    {"top_p": 1e-9},
    {"top_p": 0.5},
    {"top_p": 0.95},
    {"top_p": 1 - 1e-7},
    {"min_p": 1e-6},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.9},
    {"top_k": 400, "top_p": 0.999, "min_p": 1e-3},
]
ADJUSTED: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -1.5, "presence_penalty": -0.5, "repetition_penalty": 1.2},
    {"logit_bias": {3: 8.0, 11: -100.0, 699: 7.5, 10**6: 9.0}},
    {"min_tokens": 9, "end_ids": (44, 100_000), "logit_bias": {44: 100.0}},
    {"min_tokens": 4, "end_ids": (44,), "logit_bias": {44: 100.0}},
]


@pytest.mark.parametrize("temperature", [0.0, 1e-5, 0.3, 1.0, 2.5])
def test_all_filters_after_all_penalties(sampler: NativeSampler, temperature: float) -> None:
    logits = spread(len(FILTERS) * len(ADJUSTED), 700)
    kinds = [filters | adjusted for filters in FILTERS for adjusted in ADJUSTED]
    for seed in range(2):
        check(
            sampler,
            logits,
            [
                Sampling(max_tokens=99, temperature=temperature, seed=n * 0x9E3779B97F4A7C15 + seed, **kind)
                for n, kind in enumerate(kinds)
            ],
        )


@pytest.mark.parametrize("vocab", [1, 5, 16, 255, 256, 257, 1000, 49152])
def test_any_vocabulary(sampler: NativeSampler, vocab: int) -> None:
    """Broken vectors and blocks, rows that lie apart."""
    wide = spread(2 * len(FILTERS), vocab + 3, seed=vocab)
    samplings = [Sampling(max_tokens=9, seed=n, **kind) for n, kind in enumerate(2 * FILTERS)]
    check(sampler, wide[:, :vocab], samplings)


def all_but_one(vocab: int) -> Tensor:
    logits = torch.full((vocab,), -torch.inf)
    logits[vocab // 3] = -2.0
    return logits


EDGES: dict[str, Callable[[int], Tensor]] = {
    "one finite": all_but_one,
    "half of them infinite": lambda vocab: torch.arange(vocab).remainder(2).log() + torch.linspace(0, 3, vocab),
    "all equal": torch.zeros,
    "few values": lambda vocab: torch.arange(vocab).remainder(7).float(),
    "tiny differences": lambda vocab: 1 + torch.arange(vocab) * 2.0**-23,
    "denormal": lambda vocab: -torch.arange(vocab) * 1e-44,
    "all magnitudes": lambda vocab: -torch.logspace(-44, 38, vocab),
    "as far as floats go": lambda vocab: torch.linspace(-1.5e38, 1.5e38, vocab),
    "the tail carries the mass": lambda vocab: torch.cat((torch.zeros(1), torch.linspace(-9.0, -9.5, vocab - 1))),
}


@pytest.mark.filterwarnings("ignore:overflow")  # the reference's, far below the best
@pytest.mark.parametrize("edge", EDGES)
def test_edges(sampler: NativeSampler, edge: str) -> None:
    for temperature in (1e-5, 0.7, 100.0):
        samplings = [Sampling(max_tokens=9, temperature=temperature, seed=n, **kind) for n, kind in enumerate(FILTERS)]
        check(sampler, EDGES[edge](5000).expand(len(samplings), -1).contiguous(), samplings)


def test_numbers_that_are_none_end_somewhere(sampler: NativeSampler) -> None:
    """A broken model draws what it likes, but of its vocabulary, and the worker goes on."""
    logits = torch.full((3 * len(FILTERS), 500), torch.nan)
    logits[len(FILTERS) :, 7:300] = 1.0
    logits[2 * len(FILTERS) :] = -torch.inf
    samplings = [Sampling(max_tokens=9, seed=n, logprobs=3, **kind) for n, kind in enumerate(3 * FILTERS)]
    tokens = sampler.draw(logits, drawers(samplings, 500), [POSITION] * len(samplings))
    assert all(0 <= token < 500 for token in tokens)
    for score in sampler.score(logits, tokens, [3] * len(tokens)):
        assert all(0 <= token < 500 for token in score.top_ids)


def test_the_number_is_that_of_seed_choice_and_position(sampler: NativeSampler) -> None:
    vocab, chance = 4096, random.Random(1)
    draws = [(chance.getrandbits(64), chance.getrandbits(20), chance.getrandbits(20)) for _ in range(300)]
    draws += [(0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (1 << 32, 0, 1)]
    rows = drawers([Sampling(max_tokens=1, seed=seed, choice=choice) for seed, choice, _ in draws], vocab)
    found = sampler.draw(torch.zeros(len(rows), vocab), rows, [position for _, _, position in draws])
    assert found == [math.floor(uniform(*each) * vocab) for each in draws]


def test_penalties_follow_the_tokens_drawn(sampler: NativeSampler) -> None:
    sampling = Sampling(max_tokens=999, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7)
    growing, output = Drawer(sampling, PROMPT, OUTPUT[:0], 300), list[int]()
    for step in range(150):
        logits = spread(1, 300, seed=step)
        fresh = Drawer(sampling, PROMPT, np.array(output, np.int32), 300)
        position = len(PROMPT) + step
        (token,) = sampler.draw(logits, [growing], [position])
        assert [token] == sampler.draw(logits, [fresh], [position])
        growing.observe(token)
        output.append(token)
    assert len(set(output)) > 64, "more than there was room for at first"


def test_a_row_is_the_same_in_any_company_and_on_any_threads(library: Native) -> None:
    vocab = 3000
    kinds = [filters | adjusted for filters in FILTERS[1:14:3] for adjusted in ADJUSTED[::2]]
    logits, rows = spread(len(kinds), vocab), drawers([Sampling(max_tokens=9, seed=7, **kind) for kind in kinds], vocab)
    alone = NativeSampler(NativeSampling(library, 1))
    tokens = [alone.draw(logits[n : n + 1], [row], [POSITION])[0] for n, row in enumerate(rows)]
    scores = [alone.score(logits[n : n + 1], [token], [n % 9])[0] for n, token in enumerate(tokens)]
    assert len(set(tokens)) > 5
    order = list(range(len(rows)))
    for threads in (1, 2, 3):
        together = NativeSampler(NativeSampling(library, threads))
        random.Random(threads).shuffle(order)
        shuffled = logits[order]
        assert together.draw(shuffled, [rows[n] for n in order], [POSITION] * len(order)) == [tokens[n] for n in order]
        told = together.score(shuffled, [tokens[n] for n in order], [n % 9 for n in order])
        assert told == [scores[n] for n in order]


def near(mine: Logprobs, its: Logprobs) -> None:
    assert mine.top_ids == its.top_ids
    assert mine.logprob == pytest.approx(its.logprob, rel=1e-5, abs=1e-5)
    assert mine.top == pytest.approx(its.top, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("vocab", [1, 17, 256, 5000])
def test_log_probabilities(sampler: NativeSampler, vocab: int) -> None:
    """Many equal ones too: they are in the order of their ids."""
    counts = [0, 1, 2, 5, 20, 300, 10**4] * 3
    logits = spread(len(counts), vocab + 1)[:, :vocab]
    logits[7:14] = logits[7:14].round()
    logits[14:, 1::2] = -torch.inf
    tokens = [(n * 37 + 1) % vocab for n in range(len(counts))]
    pairs = zip(sampler.score(logits, tokens, counts), REFERENCE.score(logits, tokens, counts), strict=True)
    for (mine, its), token, count in zip(pairs, tokens, counts, strict=True):
        near(mine, its)
        assert len(mine.top_ids) == min(count, vocab)
        assert all(value == mine.logprob for id_, value in zip(mine.top_ids, mine.top, strict=True) if id_ == token)


def test_logits_that_cannot_be_read_are_refused(sampler: NativeSampler) -> None:
    rows = drawers([Sampling(max_tokens=1)], 8)
    for wrong in (torch.zeros(8, 2).T[:1], torch.zeros(1, 8, dtype=torch.bfloat16)):
        with pytest.raises(ValueError, match="not rows of float32"):
            sampler.draw(wrong, rows, [0])
