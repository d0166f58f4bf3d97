"""Each field of `Sampling` against a plain reference in float64 that sorts the whole vocabulary."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cbdisagg.engine.philox import uniform
from cbdisagg.engine.sampler import BLOCK, Drawer, inverse_cdf, threshold
from cbdisagg.messages import Sampling

VOCAB = 700
PROMPT, OUTPUT = [3, 5, 5, 9], [5, 11, 11, 11]
POSITION = len(PROMPT) + len(OUTPUT)


def logits_of(seed: int, vocab: int = VOCAB, spread: float = 3.0) -> NDArray[np.float32]:
    return (spread * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def drawer(sampling: Sampling, prompt: list[int] = PROMPT, output: list[int] = OUTPUT, vocab: int = VOCAB) -> Drawer:
    return Drawer(sampling, np.array(prompt, np.int32), np.array(output, np.int32), vocab)


def adjusted(logits: NDArray[np.float32], sampling: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    """Bias, penalties and banned end ids, one id at a time."""
    values = [float(value) for value in logits]
    for n in range(len(values)):
        values[n] += sampling.logit_bias.get(n, 0.0)
        if n in prompt or n in output:
            values[n] = (
                values[n] / sampling.repetition_penalty if values[n] > 0 else values[n] * sampling.repetition_penalty
            )
        values[n] -= sampling.frequency_penalty * output.count(n)
        values[n] -= sampling.presence_penalty * (n in output)
        if n in sampling.end_ids and len(output) < sampling.min_tokens:
            values[n] = -np.inf
    return values


def distribution(values: list[float], sampling: Sampling) -> NDArray[np.float64]:
    """min_p, then top_k, then top_p over what is left; what ties with the last one kept is kept."""
    scaled = (np.array(values) - max(values)) / sampling.temperature
    weights = np.exp(scaled)
    weights[weights < sampling.min_p] = 0.0
    if sampling.top_k and sampling.top_k < np.count_nonzero(weights):
        weights[weights < np.sort(weights)[-sampling.top_k]] = 0.0
    order = np.argsort(-weights, kind="stable")
    running = 0.0
    for n in order:
        running += weights[n] / weights.sum()
        if running >= sampling.top_p:
            weights[weights < weights[n]] = 0.0
            break
    return weights / weights.sum()


def reference(
    logits: NDArray[np.float32], sampling: Sampling, prompt: list[int], output: list[int]
) -> tuple[int, float]:
    """The id, and how far the uniform number is from the next id's share."""
    values = adjusted(logits, sampling, prompt, output)
    if sampling.temperature == 0.0:
        second = sorted(values)[-2]
        return values.index(max(values)), max(values) - second
    cumulative = distribution(values, sampling).cumsum()
    u = uniform(sampling.seed, sampling.choice, len(prompt) + len(output))
    return int(np.searchsorted(cumulative, u, side="right")), float(np.abs(cumulative - u).min())


FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.3},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 650},  # further down than the near ids
    {"top_k": 10_000},
    {"top_p": 0.0},
    {"top_p": 0.3},
    {"top_p": 0.9},
    {"top_p": 0.99999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-6},
    {"min_p": 0.02, "top_k": 12, "top_p": 0.8, "temperature": 1.4},
    {"top_k": 400, "top_p": 0.9999, "temperature": 3.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.6, "temperature": 0.0},
    {"presence_penalty": 1.5},
    {"frequency_penalty": 0.9},
    {"frequency_penalty": -1.5, "presence_penalty": -0.5, "temperature": 0.0},
    {"logit_bias": {3: 8.0, 11: -100.0, 699: 7.5}},
    {"logit_bias": {44: 100.0}, "temperature": 0.0},
    {"min_tokens": 5, "end_ids": (1, 2, 44), "logit_bias": {44: 100.0}},
    {"min_tokens": 4, "end_ids": (1, 2, 44), "logit_bias": {44: 100.0}},
    {"min_tokens": 9, "end_ids": (44, 100_000), "logit_bias": {44: 100.0}, "temperature": 0.0},
    {"choice": 3},
    {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
        "logit_bias": {5: 3.0},
        "top_p": 0.95,
        "temperature": 0.7,
    },
]


@pytest.mark.parametrize(
    "fields", FIELDS, ids=lambda fields: " ".join(f"{k}={v}" for k, v in fields.items()) or "plain"
)
def test_every_field(fields: dict[str, Any]) -> None:
    compared = 0
    for seed in range(60):
        sampling = Sampling(**{"max_tokens": 99, "seed": seed * 0x9E3779B97F4A7C15 % 2**64, **fields})
        logits = logits_of(seed)
        before = logits.copy()
        expected, margin = reference(logits, sampling, PROMPT, OUTPUT)
        if margin > 1e-5:  # else float32 may fall on the other side
            assert drawer(sampling).draw(logits, POSITION) == expected
            compared += 1
        assert (logits == before).all(), "the model's own logits are needed for log probabilities"
    assert compared > 50


def test_penalties_follow_the_tokens_drawn() -> None:
    sampling = Sampling(max_tokens=99, seed=5, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.7)
    growing, output = drawer(sampling, output=[]), list[int]()
    for step in range(30):
        logits = logits_of(step)
        fresh = drawer(sampling, output=output)
        position = len(PROMPT) + len(output)
        token = growing.draw(logits, position)
        assert token == fresh.draw(logits, position)
        growing.observe(token)
        output.append(token)


def test_a_draw_depends_on_seed_choice_and_position_only() -> None:
    logits = logits_of(1)
    first = Sampling(max_tokens=9, seed=77)
    assert drawer(first).draw(logits, 40) == drawer(first, output=[1] * 36).draw(logits, 40)
    assert len({drawer(first).draw(logits, position) for position in range(40)}) > 10
    assert len({drawer(Sampling(max_tokens=9, seed=77, choice=n)).draw(logits, 40) for n in range(40)}) > 10


def test_ties_are_kept_together() -> None:
    logits = np.zeros(50, np.float32)
    logits[[4, 9, 20]] = 2.0
    assert threshold(logits - 2, top_k=2, top_p=1.0, floor=-np.inf) == 0.0
    assert threshold(logits - 2, top_k=0, top_p=1e-9, floor=-np.inf) == 0.0
    drawn = {drawer(Sampling(max_tokens=9, top_k=1), vocab=50).draw(logits, position) for position in range(100)}
    assert drawn == {4, 9, 20}
    assert drawer(Sampling(max_tokens=9, temperature=0.0), vocab=50).draw(logits, 0) == 4


def test_top_k_of_all_that_are_near() -> None:
    """As many near ids as are wanted, and a tail behind them that carries mass."""
    scaled = np.full(5000, -9.0, np.float32)
    scaled[[3, 8]] = 0.0, -1.0
    assert [threshold(scaled, top_k, top_p=1.0, floor=-np.inf) for top_k in (1, 2, 3)] == [0.0, -1.0, -9.0]


def test_flat_distribution_reaches_past_the_near_ids() -> None:
    """top_p over a vocabulary whose tail carries mass: the whole has to be sorted."""
    scaled = np.full(5000, -9.0, np.float32)
    scaled[0] = 0.0
    scaled[1:] += np.linspace(0.0, -0.5, 4999, dtype=np.float32)
    floor = threshold(scaled, top_k=0, top_p=0.8, floor=-np.inf)
    weights = np.exp(scaled.astype(np.float64))
    kept = scaled >= floor
    assert weights[kept].sum() >= 0.8 * weights.sum() > weights[scaled > floor].sum()
    assert kept.sum() > 1000


@pytest.mark.parametrize("count", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK + 3])
def test_inverse_cdf(count: int) -> None:
    chance = random.Random(count)
    weights = np.array([chance.choice([0.0, chance.random()]) for _ in range(count)], np.float32)
    weights[chance.randrange(count)] = 0.5
    cumulative = weights.astype(np.float64).cumsum() / weights.sum(dtype=np.float64)
    for u in [0.0, 1 - 2.0**-53, *(chance.random() for _ in range(50))]:
        found = inverse_cdf(weights, u)
        assert weights[found] > 0
        assert cumulative[found] >= u - 1e-12
        assert found == 0 or cumulative[found - 1] <= u + 1e-12


def test_draws_follow_the_distribution() -> None:
    logits = logits_of(3, vocab=6, spread=1.0)
    sampling = Sampling(max_tokens=9, temperature=0.8, seed=123)
    count = 4000
    drawn = np.bincount([drawer(sampling, vocab=12).draw(logits, n) for n in range(count)], minlength=6)
    expected = count * distribution(list(map(float, logits)), sampling)
    assert ((drawn - expected) ** 2 / expected).sum() < 20.5  # 5 degrees of freedom: once in a thousand seeds
