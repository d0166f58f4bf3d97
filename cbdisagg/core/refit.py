"""The cost model of one worker, fitted anew by each step that it runs: recursive least squares with forgetting.

Knows sums of steps and the seconds they took. Each coefficient of the formula is a unit, taken from what the fit starts
from, times a weight that is fitted; errors are relative to their size, so that short and long steps count alike. L
keeps its shape and gets two weights: of that shape, and of a line through zero. A machine that others use is noisy: an
error beyond three times the usual one counts no more than that.

The recursion is in information form: normal equations that fade, solved again by a sweep of coordinate descent with
each weight kept at 0 or above. Clipping weights of the covariance form instead leaves the others wrong; and what no
step has shown for long keeps its weight, as its equations fade on both sides alike. Source: G. Golub, C. Van Loan,
Matrix Computations, 4th ed., ch. 6 (least squares, normal equations) and 11.2 (Gauss-Seidel, here projected).
"""

from __future__ import annotations

from bisect import bisect_left
from math import sqrt

from cbdisagg.core.cost import CostModel, Sums
from cbdisagg.messages import COARSE, ERROR_BOUNDS, Costs

FORGETTING = 0.998  # a step counts half of a new one after 350
_GUESS, _PROFILE = 0.01, 2.0  # steps that the start is worth: a guess, and a measured profile
_QUIET = 0.02  # once so many steps have been seen, an error below this is no reason to compute
_SEEN = 64
_RISES, _FALLS = 0.1, 0.02  # weight of the newest error in the usual one: a wrong profile is to be noticed soon


class Refit:
    """`model` is what is known now; `errors` counts steps by how far off the prediction was (ERROR_BOUNDS)."""

    def __init__(self, costs: Costs) -> None:
        self.model = CostModel.of(costs)
        self.errors = [0] * (len(ERROR_BOUNDS) + 1)
        self.error_sum = 0.0
        self._shape = self.model
        self._units = _units(self.model)
        self._weights = _weights(self.model, self._units)
        worth = _GUESS if costs == COARSE else _PROFILE
        count = len(self._units)
        self._matrix = [[worth if row == column else 0.0 for column in range(count)] for row in range(count)]
        self._vector = [worth * weight for weight in self._weights]
        self._usual = 1.0 if costs == COARSE else 0.1
        self._steps = 0

    def observe(self, step: Sums, seconds: float) -> None:
        """A step of this work took so long. One that took no time, or had nothing to do, says nothing."""
        predicted = self.model.sums_s(step)
        if predicted <= 0.0 or seconds <= 0.0:
            return
        off = abs(predicted - seconds) / seconds
        self.errors[bisect_left(ERROR_BOUNDS, off)] += 1
        self.error_sum += off
        self._steps += 1
        if self._steps > _SEEN and off < _QUIET:
            return
        scale = sqrt(seconds * predicted)  # so that twice as long and half as long are equally far off
        error = (seconds - predicted) / scale
        bound = max(0.05, 3 * self._usual)
        beyond = min(1.0, abs(error)) - self._usual
        self._usual += (_RISES if beyond > 0 else _FALLS) * beyond
        self._learn(self._features(step, scale), predicted / scale + max(-bound, min(bound, error)))

    def _features(self, step: Sums, scale: float) -> list[float]:
        """What each weight of 1 would add to the prediction, as a part of `scale`."""
        tokens, squares, context, decodes, prefills = step
        h, h_mix, shape, line, a, d, s = self._units
        return [
            h / scale,
            h_mix / scale if prefills and decodes else 0.0,
            shape * self._shape.linear_s(tokens) / scale,
            line * tokens / scale,
            a * squares / scale,
            d * context / scale,
            s * decodes / scale,
        ]

    def _learn(self, features: list[float], wanted: float) -> None:
        vector, weights = self._vector, self._weights
        for n, (row, feature) in enumerate(zip(self._matrix, features, strict=True)):
            row[:] = [FORGETTING * value + feature * other for value, other in zip(row, features, strict=True)]
            vector[n] = FORGETTING * vector[n] + feature * wanted
        for n, row in enumerate(self._matrix):
            if row[n] > 1e-12:
                lacking = vector[n] - sum(value * weight for value, weight in zip(row, weights, strict=True))
                weights[n] = max(0.0, weights[n] + lacking / row[n])
        self.model = self._model()

    def _model(self) -> CostModel:
        h, h_mix, shape, line, a, d, s = (
            weight * unit for weight, unit in zip(self._weights, self._units, strict=True)
        )
        old = self._shape
        points = tuple([(tokens, shape * seconds + line * tokens) for tokens, seconds in old.L])
        return CostModel(h, h_mix, points, a, d, old.t0, old.t_d, old.B, s, old.first_s)


def _units(model: CostModel) -> list[float]:
    """Of h, h_mix, L's shape, a line, a, d, s. What the start has as 0 may turn out not to be."""
    alone = model.sums_s(Sums(1, 0, 1, 1, False))
    (m0, s0), (m1, s1) = (model.L[0], model.L[-1]) if len(model.L) > 1 else ((0, 0.0), model.L[0])
    token = max((s1 - s0) / (m1 - m0), alone / 1000)
    return [
        max(model.h, alone / 20),
        max(model.h_mix, alone / 20),
        1.0,
        token / 4,
        max(model.a, token / 16384),
        max(model.d, alone / 65536),
        max(model.s, token / 4),
    ]


def _weights(model: CostModel, units: list[float]) -> list[float]:
    known = (model.h, model.h_mix, 1.0, 0.0, model.a, model.d, model.s)
    return [value / unit for value, unit in zip(known, units, strict=True)]
