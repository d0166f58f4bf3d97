"""What a step and a transfer cost, as formulas with few coefficients: for predictions, for simulation, for pictures.

    T(step) = h + h_mix [prefill and decode in one step] + L(m) + a sum((p + c)^2 - p^2) + d sum(ctx) + s n

m is the number of tokens in the step; p the tokens of a prompt computed before its chunk of c; ctx the context of a
sequence that decodes; n the number of those, each of which has a row of logits and a draw. L is piecewise linear
through measured points: flat while the weights' stream from memory bounds it, then proportional to m. A transfer of r
descriptors takes t0 + r t_d + bytes / B. All in seconds, tokens and bytes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct


class Work(NamedTuple):
    """One slice of a step: `tokens` tokens after `start` computed ones. A decode is a slice of one drawn token."""

    start: int
    tokens: int
    decodes: bool


class CostModel(Struct, frozen=True):
    """Names are those of the formula. `L`: (tokens, seconds), by rising tokens, at least one point."""

    h: float
    h_mix: float
    L: tuple[tuple[int, float], ...]
    a: float
    d: float
    t0: float
    t_d: float
    B: float
    s: float = 0.0

    def step_s(self, work: Iterable[Work]) -> float:
        """One step; 0 for one without work."""
        tokens, squares, context, decodes = 0, 0, 0, 0
        prefills = False
        for start, count, is_decode in work:
            tokens += count
            if is_decode:
                decodes += 1
                context += start + count
            else:
                prefills = True
                squares += (start + count) ** 2 - start**2
        if not tokens:
            return 0.0
        mixed = self.h_mix if prefills and decodes else 0.0
        return self.h + mixed + self.linear_s(tokens) + self.a * squares + self.d * context + self.s * decodes

    def linear_s(self, tokens: int) -> float:
        """L(m): beyond the last point its last slope goes on, before the first it is flat."""
        points = self.L
        n = bisect_right(points, (tokens, float("inf")))
        if n == 0:
            return points[0][1]
        if len(points) == 1:
            return points[0][1] * tokens / points[0][0]
        (m0, s0), (m1, s1) = (points[n - 1], points[n]) if n < len(points) else (points[-2], points[-1])
        return s0 + (s1 - s0) * (tokens - m0) / (m1 - m0)

    def transfer_s(self, nbytes: int, descriptors: int = 1) -> float:
        return self.t0 + descriptors * self.t_d + nbytes / self.B

    def exposed_transfer_s(self, nbytes: int, prefill_s: float, layers: int, descriptors: int = 1) -> float:
        """What is left of a transfer that goes layer by layer beside a prefill: its excess, and the last layer."""
        whole = self.transfer_s(nbytes, descriptors)
        return max(0.0, whole - prefill_s * (layers - 1) / layers) + nbytes / (layers * self.B)
