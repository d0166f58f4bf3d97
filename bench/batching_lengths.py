"""The requests of the experiment: what each prompt is and how many tokens each answer will have.

Knows the distributions of the published benchmark (Anyscale, June 2023) and the order in which it drew from its two
generators: the prompts' lengths, the prompts' ids, a seed for numpy, then exponential lengths, rounded, those above the
cap drawn anew. With the article's own settings the lengths are therefore the original ones, number for number.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

SEED = 0xCADE
"""The article's."""
IDS = (10, 50_000)
"""Its prompt ids lie between these, both included; larger ones than a vocabulary's are folded into it."""
ARTICLE_SUMS = {32: 15_610, 128: 54_331, 512: 122_108, 1536: 129_570}
"""Cap -> output tokens of the article's 1000 requests, each of at least one."""


@dataclass(frozen=True, slots=True)
class Request:
    """Of `output` tokens exactly: the end token is ignored."""

    prompt: tuple[int, ...]
    output: int


def burst(count: int, prompt: int, mean: float, cap: int, vocab: int, seed: int = SEED) -> list[Request]:
    """Requests that all come at once, with prompts of one length."""
    return _requests(count, (prompt, prompt), mean, cap, vocab, seed)


def mixed(count: int, longest: int, mean: float, cap: int, vocab: int, seed: int = SEED) -> list[Request]:
    """Those of the latency experiment: prompts of any length from 1 to `longest`."""
    return _requests(count, (1, longest), mean, cap, vocab, seed)


def poisson(count: int, per_second: float, seed: int = SEED) -> list[float]:
    """Seconds at which requests arrive, the first at 0."""
    draw = random.Random(seed)
    times, clock = [], 0.0
    for _ in range(count):
        times.append(clock)
        clock += draw.expovariate(per_second)
    return times


def lengths(count: int, mean: float, cap: int, numpy_seed: int) -> list[int]:
    """Output lengths: exponential, rounded, drawn anew above `cap`; a rounded 0 counts as 1."""
    draw = np.random.RandomState(numpy_seed)
    found: list[int] = []
    while len(found) < count:
        length = round(draw.exponential(mean))
        if length <= cap:
            found.append(max(1, length))
    return found


def _requests(count: int, prompt: tuple[int, int], mean: float, cap: int, vocab: int, seed: int) -> list[Request]:
    draw = random.Random(seed)
    sizes = [draw.randint(*prompt) for _ in range(count)]
    prompts = [tuple(draw.randint(*IDS) % vocab for _ in range(size)) for size in sizes]
    outputs = lengths(count, mean, cap, draw.randint(0, 10**6))
    return [Request(*pair) for pair in zip(prompts, outputs, strict=True)]
