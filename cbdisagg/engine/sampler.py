"""How one sequence draws its next token from the model's logits.

Knows `Sampling` and the ids that the sequence has so far; nothing of batches, so no row can depend on its neighbours.
The order is vLLM's: bias, penalties, the ban on end ids before `min_tokens`, temperature, min_p, top_k, top_p; each
filter sees what the one before it has left. Filters are thresholds: ids that tie with the last one kept are kept too.
The draw is the inverse of the cumulative distribution, in id order, at one uniform number of (seed, choice, position).

This is the reference, and what serves where there are no C kernels: in numpy, in one thread, so its bits do not depend
on the number of threads. Who draws for a batch, and by what, is in samplers.py.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from cbdisagg.engine.philox import uniform
from cbdisagg.messages import Sampling

Floats = NDArray[np.float32]
Ids = NDArray[np.int32]

NEAR = 8.0
"""Nats below the best within which thresholds are looked for first: few ids lie there, so sorting them is cheap."""
BLOCK = 256
"""Ids whose weights are summed as one when the cumulative distribution is searched."""


class Seen:
    """The ids that a sequence has so far, each once, and how often each is in its output."""

    def __init__(self, prompt: Ids, output: Ids, vocab: int) -> None:
        known = [n for n in dict.fromkeys((*prompt.tolist(), *output.tolist())) if 0 <= n < vocab]
        self.place = {token: n for n, token in enumerate(known)}
        self._ids = np.array(known, np.int32)
        self._counts = np.zeros(len(known), np.float32)
        for token in output.tolist():
            if token in self.place:
                self._counts[self.place[token]] += 1

    @property
    def ids(self) -> Ids:
        return self._ids[: len(self.place)]

    @property
    def counts(self) -> Floats:
        return self._counts[: len(self.place)]

    def add(self, token: int) -> None:
        """Once more in the output."""
        place = self.place.setdefault(token, len(self.place))
        if place == len(self._ids):
            room = max(64, place)
            self._ids, self._counts = np.pad(self._ids, (0, room)), np.pad(self._counts, (0, room))
        self._ids[place] = token
        self._counts[place] += 1


class Drawer:
    """Made when a sequence is admitted; `draw` and `observe` alternate. `prompt`, `output`: its ids so far.

    `seen` is None unless a penalty needs it. `floor`: the logarithm of min_p, in the precision of logits.
    """

    def __init__(self, sampling: Sampling, prompt: Ids, output: Ids, vocab: int) -> None:
        self.sampling = sampling
        self.prompt_length = len(prompt)
        self.end_ids = np.array([n for n in sampling.end_ids if 0 <= n < vocab], np.int32)
        biased = {n: value for n, value in sampling.logit_bias.items() if 0 <= n < vocab}
        self.bias_ids = np.array(list(biased.keys()), np.int32)
        self.bias = np.array(list(biased.values()), np.float32)
        self.floor = np.float32(math.log(sampling.min_p) if sampling.min_p > 0.0 else -math.inf)
        penalties = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
        self.seen = None if penalties == (1.0, 0.0, 0.0) else Seen(prompt, output, vocab)

    def observe(self, token: int) -> None:
        """The sequence goes on with `token`."""
        if self.seen is not None:
            self.seen.add(token)

    def takes_best(self, position: int) -> bool:
        """Whether `draw` at `position` gives the best of the logits as they are, the lowest id among equals."""
        return self.sampling.temperature == 0.0 and not self._adjusts(position)

    def draw(self, logits: Floats, position: int) -> int:
        """The id at `position` of prompt + output. `logits` [vocab] are left as they are."""
        adjusted = self._adjust(logits, position)
        if self.sampling.temperature == 0.0:
            return int(adjusted.argmax())  # the first of equals: the lowest id
        with np.errstate(over="ignore"):  # far below the best, at a low temperature: -inf is right
            scaled = (adjusted - adjusted.max()) / np.float32(self.sampling.temperature)
        u = uniform(self.sampling.seed, self.sampling.choice, position)
        floor = threshold(scaled, self.sampling.top_k, self.sampling.top_p, float(self.floor))
        if floor == -math.inf:
            return inverse_cdf(np.exp(scaled), u)
        kept = np.flatnonzero(scaled >= floor)
        return int(kept[inverse_cdf(np.exp(scaled[kept]), u)])

    def _adjust(self, logits: Floats, position: int) -> Floats:
        """Bias, penalties and the ban on end ids; `logits` itself if none applies."""
        if not self._adjusts(position):
            return logits
        sampling = self.sampling
        adjusted = logits.copy()
        adjusted[self.bias_ids] += self.bias
        if self.seen is not None:
            ids, counts = self.seen.ids, self.seen.counts
            values = adjusted[ids]
            penalty = np.float32(sampling.repetition_penalty)
            # Keskar et al. 2019 divide; a negative logit has to be multiplied to become less likely too.
            values = np.where(values > 0, values / penalty, values * penalty)
            values -= np.float32(sampling.frequency_penalty) * counts
            adjusted[ids] = values - np.float32(sampling.presence_penalty) * (counts > 0)
        if self.bans(position):
            adjusted[self.end_ids] = -np.inf
        return adjusted

    def _adjusts(self, position: int) -> bool:
        return self.bans(position) or len(self.bias_ids) > 0 or self.seen is not None

    def bans(self, position: int) -> bool:
        """Whether it is too early for an end id."""
        return len(self.end_ids) > 0 and position - self.prompt_length < self.sampling.min_tokens


def threshold(scaled: Floats, top_k: int, top_p: float, floor: float) -> float:
    """The lowest logit that may be drawn, -inf for all. `scaled` [vocab]: logits over temperature, the best is 0.

    `floor`: what min_p leaves. Only ids within NEAR of the best are sorted; all of them, where the filters reach
    further down.
    """
    limit = top_k if 0 < top_k < len(scaled) else 0
    if not limit and top_p >= 1.0:
        return floor

    near = _descending(scaled, max(floor, -NEAR))
    if len(near) < limit and floor < -NEAR:
        near = _descending(scaled, floor)
    if limit and len(near) >= limit:  # equal: the others may be behind NEAR
        floor = float(near[limit - 1])
        near = near[near >= floor]
    if top_p >= 1.0:
        return floor

    wanted = top_p * _mass(scaled[scaled >= floor])
    cumulative = np.exp(near).cumsum(dtype=np.float64)
    if cumulative[-1] < wanted and floor < -NEAR:
        near = _descending(scaled, floor)
        cumulative = np.exp(near).cumsum(dtype=np.float64)
    last = min(int(cumulative.searchsorted(wanted)), len(near) - 1)
    return float(near[last])


def inverse_cdf(weights: Floats, u: float) -> int:
    """The first index at which the running sum of `weights`, in float64, exceeds u times the whole."""
    starts = np.arange(0, len(weights), BLOCK)
    sums = np.add.reduceat(weights.astype(np.float64), starts).cumsum()
    aim = min(u * sums[-1], np.nextafter(sums[-1], 0.0))
    block = int(sums.searchsorted(aim, side="right"))
    before = sums[block - 1] if block else 0.0
    inner = weights[block * BLOCK : (block + 1) * BLOCK].cumsum(dtype=np.float64)
    # Summed in another order than `sums`, so the last bit may differ: stay inside the block.
    within = min(int(inner.searchsorted(aim - before, side="right")), int(np.flatnonzero(inner == inner[-1])[0]))
    return block * BLOCK + within


def _descending(scaled: Floats, floor: float) -> Floats:
    return np.sort(scaled[scaled >= floor])[::-1]


def _mass(scaled: Floats) -> float:
    return float(np.exp(scaled).sum(dtype=np.float64))
