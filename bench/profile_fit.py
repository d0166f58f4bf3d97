"""From measured times to the coefficients of the cost model, and how far off the model is.

Knows the formula of `core/cost.py` as columns of a linear system; measures nothing. All coefficients are at least 0:
non-negative least squares by the active-set method of Lawson and Hanson (Solving Least Squares Problems, 1974, ch. 23).
Rows are divided by the measured time, so that it is relative errors that are small.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from cbdisagg_bench.profile_steps import REGIONS, Case
from numpy.typing import NDArray

from cbdisagg.core.cost import CostModel, Work
from cbdisagg.core.profile import Error

KNOTS = (1, 2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256, 512, 1024, 2048, 4096)
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Steps:
    """The coefficients of a step, named as in the formula. What every step takes is in `h`, so L begins at 0."""

    h: float
    h_mix: float
    L: tuple[tuple[int, float], ...]
    a: float
    d: float
    s: float


def fit_steps(cases: Sequence[Case]) -> Steps:
    """L has its knots where the steps have tokens; its slope is nowhere below 0."""
    most = max(_tokens(case.work) for case in cases)
    knots = [knot for knot in KNOTS if knot < most] + [most]
    rows = np.array([_row(case.work, knots) for case in cases])
    h, h_mix, a, d, s, *slopes = solve(rows, np.array([case.median for case in cases]))
    rises = [slope * (high - low) for slope, (low, high) in zip(slopes, pairwise(knots), strict=True)]
    heights = np.cumsum([0.0, *rises])
    return Steps(h, h_mix, tuple(zip(knots, map(float, heights), strict=True)), a, d, s)


def _tokens(work: Sequence[Work]) -> int:
    return sum(part.tokens for part in work)


def _row(work: Sequence[Work], knots: Sequence[int]) -> list[float]:
    """The columns: 1, mixed or not, squares, context, sequences that decode, tokens between each two knots."""
    tokens = _tokens(work)
    decodes = sum(part.decodes for part in work)
    squares = sum((part.start + part.tokens) ** 2 - part.start**2 for part in work if not part.decodes)
    context = sum(part.start + part.tokens for part in work if part.decodes)
    between = [float(min(max(tokens - low, 0), high - low)) for low, high in pairwise(knots)]
    return [1.0, float(0 < decodes < len(work)), float(squares), float(context), float(decodes), *between]


def fit_transfers(transfers: Sequence[tuple[int, int, float]]) -> tuple[float, float, float]:
    """(t0, t_d, B) from (bytes, descriptors, seconds)."""
    rows = np.array([[1.0, float(runs), float(nbytes)] for nbytes, runs, _ in transfers])
    t0, t_d, per_byte = solve(rows, np.array([seconds for _, _, seconds in transfers]))
    return t0, t_d, 1.0 / max(per_byte, 1e-15)


def solve(rows: Matrix, times: Matrix) -> list[float]:
    """The coefficients, none below 0, with the least squares of relative errors."""
    scale = np.linalg.norm(rows / times[:, None], axis=0)
    scale[scale == 0] = 1.0
    found = nnls(rows / times[:, None] / scale, np.ones(len(times))) / scale
    return [float(value) for value in found]


def nnls(rows: Matrix, wanted: Matrix) -> Matrix:
    """x >= 0 that minimises |rows x - wanted|."""
    count = rows.shape[1]
    x, free = np.zeros(count), np.zeros(count, dtype=bool)
    tolerance = 1e-10 * max(1.0, float(np.abs(rows).sum()))
    for _ in range(3 * count + 10):
        gradient = rows.T @ (wanted - rows @ x)
        candidates = np.where(free, -np.inf, gradient)
        if free.all() or candidates.max() <= tolerance:
            break
        free[int(candidates.argmax())] = True
        while True:
            best = np.zeros(count)
            best[free] = np.linalg.lstsq(rows[:, free], wanted, rcond=None)[0]
            if (best[free] > 0).all():
                x = best
                break
            falling = free & (best <= 0)
            step = float((x[falling] / np.maximum(x[falling] - best[falling], 1e-300)).min())
            x = x + step * (best - x)
            free &= x > 1e-14
            x[~free] = 0.0
    return x


def errors(model: CostModel, cases: Sequence[Case]) -> dict[str, Error]:
    """By region, and over all: |predicted - measured| / measured."""
    off: dict[str, list[float]] = {region: [] for region in (*REGIONS, "all")}
    for case in cases:
        error = abs(model.step_s(case.work) - case.median) / case.median
        off[case.region].append(error)
        off["all"].append(error)
    return {
        region: Error(float(np.median(values)), float(np.percentile(values, 90)), len(values))
        for region, values in off.items()
        if values
    }
