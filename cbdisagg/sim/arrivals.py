"""Made-up workloads: when requests arrive, and how long they are. From a seed alone, alike on every machine.

Arrivals: Poisson, or bursty (gamma-distributed gaps: `burst` 1 is Poisson, above it arrivals come in clumps). Lengths:
a fixed number, or `exponential`, `lognormal`, `uniform` around a mean, cut off at a greatest length.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

import numpy as np
from msgspec.structs import replace
from numpy.random import Generator

from cbdisagg.sim.workload import Ask

Shape: TypeAlias = Literal["fixed", "exponential", "lognormal", "uniform"]
_SPREAD = 1.0  # sigma of a lognormal length: as in traces of conversations


@dataclass(frozen=True, slots=True)
class Lengths:
    """Tokens of prompts or answers: at least 1, at most `most` (0: no limit); `mean` is that before the cut."""

    mean: float
    shape: Shape = "fixed"
    most: int = 0

    def __str__(self) -> str:
        limit = f":{self.most}" if self.most else ""
        return f"{self.mean:g}" if self.shape == "fixed" else f"{self.shape}:{self.mean:g}{limit}"


def parse_lengths(text: str) -> Lengths:
    """ "512", "exponential:128" or "lognormal:200:2048". Raises ValueError, which says what would be right."""
    parts = text.split(":")
    example = 'write a number, or a shape, a mean and a limit, as "exponential:128:1536"'
    if len(parts) == 1:
        parts = ["fixed", *parts]
    if parts[0] not in get_args(Shape) or len(parts) > 3:
        raise ValueError(f"{text!r}: the shapes are {', '.join(get_args(Shape))}; {example}")
    try:
        mean, most = float(parts[1]), int(parts[2]) if len(parts) == 3 else 0
    except ValueError:
        raise ValueError(f"{text!r}: {example}") from None
    if not 1 <= mean < float("inf") or most < 0:
        raise ValueError(f"{text!r}: the mean must be at least 1, the limit not below 0")
    if 0 < most < mean:
        raise ValueError(f"{text!r}: the mean must be at most the limit, or nearly all lengths are {most}")
    return Lengths(mean, parts[0], most)  # type: ignore[arg-type]  # one of the shapes


def draw_lengths(random: Generator, count: int, lengths: Lengths) -> list[int]:
    match lengths.shape:
        case "fixed":
            drawn = np.full(count, lengths.mean)
        case "exponential":
            drawn = random.exponential(lengths.mean, count)
        case "lognormal":
            drawn = random.lognormal(np.log(lengths.mean) - _SPREAD**2 / 2, _SPREAD, count)
        case "uniform":
            drawn = random.uniform(1, 2 * lengths.mean - 1, count)
    most = lengths.most or np.inf
    return [int(n) for n in np.clip(np.rint(drawn), 1, most)]


def draw_arrivals(random: Generator, count: int, rate: float, burst: float = 1.0) -> list[float]:
    """Seconds. `rate` requests per second on average; the gaps' variance is `burst` times that of a Poisson process."""
    return [float(at) for at in np.cumsum(random.gamma(1 / burst, burst / rate, count))]


def make_workload(
    count: int, rate: float, prompts: Lengths, outputs: Lengths, seed: int, burst: float = 1.0
) -> list[Ask]:
    """`rate` 0: all at once."""
    random = np.random.default_rng(seed)
    arrivals = draw_arrivals(random, count, rate, burst) if rate else [0.0] * count
    lengths = zip(draw_lengths(random, count, prompts), draw_lengths(random, count, outputs), strict=True)
    return [Ask(at, output, prompt) for at, (prompt, output) in zip(arrivals, lengths, strict=True)]


def rearrive(asks: Sequence[Ask], rate: float, seed: int, burst: float = 1.0) -> list[Ask]:
    """The same requests in the same order, at another rate."""
    arrivals = draw_arrivals(np.random.default_rng(seed), len(asks), rate, burst)
    return [replace(ask, arrival_s=at) for ask, at in zip(asks, arrivals, strict=True)]


def resample(asks: Sequence[Ask], count: int, seed: int) -> list[Ask]:
    """`count` requests with the lengths of these, drawn with repetition; they share no prefixes. All arrive at 0."""
    chosen = np.random.default_rng(seed).integers(0, len(asks), count)
    return [replace(asks[n], arrival_s=0.0, prefix_blocks=()) for n in chosen]
