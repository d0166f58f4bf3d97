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

from cbdisagg.messages import Costs


class Work(NamedTuple):
    """One slice of a step: `tokens` tokens after `start` computed ones. A decode is a slice of one drawn token."""

    start: int
    tokens: int
    decodes: bool


class Sums(NamedTuple):
    """What the formula needs to know of a step: m, sum((p + c)^2 - p^2), sum(ctx), n, and whether a prompt is in it."""

    tokens: int = 0
    squares: int = 0
    context: int = 0
    decodes: int = 0
    prefills: bool = False

    def chunk(self, start: int, tokens: int) -> Sums:
        """With a chunk of a prompt more."""
        squares = self.squares + tokens * (2 * start + tokens)
        return Sums(self.tokens + tokens, squares, self.context, self.decodes, True)

    def rows(self, decodes: int, context: int) -> Sums:
        """With more sequences that decode, of `context` tokens together."""
        return Sums(self.tokens + decodes, self.squares, self.context + context, self.decodes + decodes, self.prefills)


NOTHING = Sums()


def sums(work: Iterable[Work]) -> Sums:
    tokens, squares, context, decodes = 0, 0, 0, 0
    prefills = False
    for start, count, is_decode in work:
        tokens += count
        if is_decode:
            decodes += 1
            context += start + count
        else:
            prefills = True
            squares += count * (2 * start + count)
    return Sums(tokens, squares, context, decodes, prefills)


class CostModel(Costs, frozen=True):
    """Names are those of the formula."""

    @classmethod
    def of(cls, costs: Costs) -> CostModel:
        if isinstance(costs, CostModel):
            return costs
        return cls(*(getattr(costs, name) for name in cls.__struct_fields__))

    def step_s(self, work: Iterable[Work]) -> float:
        """One step; 0 for one without work."""
        return self.sums_s(sums(work))

    def sums_s(self, step: Sums) -> float:
        """One step; 0 for one without work."""
        tokens, squares, context, decodes, prefills = step
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

    def chunk_within(self, beside: Sums, start: int, most: int, seconds: float) -> int:
        """The largest chunk of a prompt, of `most` tokens after `start`, whose step takes no more than `seconds`."""
        if self.sums_s(beside.chunk(start, most)) <= seconds:
            return most
        low, high = 0, most  # the largest known to fit, the smallest known not to
        while high - low > 1:
            middle = (low + high) // 2
            if self.sums_s(beside.chunk(start, middle)) <= seconds:
                low = middle
            else:
                high = middle
        return low

    def transfer_s(self, nbytes: int, descriptors: int = 1) -> float:
        return self.t0 + descriptors * self.t_d + nbytes / self.B

    def exposed_transfer_s(self, nbytes: int, prefill_s: float, layers: int, descriptors: int = 1) -> float:
        """What is left of a transfer that goes layer by layer beside a prefill: its excess, and the last layer."""
        whole = self.transfer_s(nbytes, descriptors)
        return max(0.0, whole - prefill_s * (layers - 1) / layers) + nbytes / (layers * self.B)
