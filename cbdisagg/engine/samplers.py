"""Who draws the next tokens of a batch, and tells log probabilities: chosen once, when the runner is built.

Knows sequences by their `Drawer` and rows of logits; not slots or plans. Both kinds give the same tokens but where a
number falls on the edge between two, and a row's results depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

from cbdisagg_kernels.native_sampling import Draw, NativeSampling
from cbdisagg_kernels.ops import Ops
from torch import Tensor

from cbdisagg.engine.logprobs import logprobs
from cbdisagg.engine.philox import WORD
from cbdisagg.engine.sampler import Drawer
from cbdisagg.messages import Logprobs

SEED = (1 << 64) - 1
MOST_K = (1 << 31) - 1


class Sampler(Protocol):
    """Called by one thread. `logits` float32 [rows, vocab], which are left as they are."""

    def draw(self, logits: Tensor, drawers: Sequence[Drawer], positions: Sequence[int]) -> list[int]:
        """The id that each row's sequence has at its position of prompt + output."""
        ...

    def score(self, logits: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[Logprobs]:
        """Of each row's token, with that many alternatives."""
        ...


def sampler_for(ops: Ops) -> Sampler:
    return NumpySampler(ops) if ops.sampling is None else NativeSampler(ops.sampling)


class NumpySampler:
    """One row after the other, by the reference."""

    def __init__(self, ops: Ops) -> None:
        self.argmax = ops.argmax

    def draw(self, logits: Tensor, drawers: Sequence[Drawer], positions: Sequence[int]) -> list[int]:
        if _all_take_best(drawers, positions):
            return self.argmax(logits).tolist()
        rows = zip(logits.numpy(), drawers, positions, strict=True)
        return [drawer.draw(row, position) for row, drawer, position in rows]

    def score(self, logits: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[Logprobs]:
        return [logprobs(*each) for each in zip(logits.numpy(), tokens, alternatives, strict=True)]


class NativeSampler:
    """All rows by one call of the C kernels."""

    def __init__(self, sampling: NativeSampling) -> None:
        self.sampling = sampling
        self.draws: WeakKeyDictionary[Drawer, Draw] = WeakKeyDictionary()

    def draw(self, logits: Tensor, drawers: Sequence[Drawer], positions: Sequence[int]) -> list[int]:
        if _all_take_best(drawers, positions):
            return self.sampling.best(logits)
        return self.sampling.draw(logits, [self._draw(*each) for each in zip(drawers, positions, strict=True)])

    def score(self, logits: Tensor, tokens: Sequence[int], alternatives: Sequence[int]) -> list[Logprobs]:
        return [
            Logprobs(logprob, tuple(ids.tolist()), tuple(values.tolist()))
            for logprob, ids, values in self.sampling.score(logits, tokens, alternatives)
        ]

    def _draw(self, drawer: Drawer, position: int) -> Draw:
        draw = self.draws.get(drawer)
        if draw is None:
            draw = self.draws[drawer] = _unchanging(drawer)
        draw.position = position & WORD
        draw.banned_count = len(drawer.end_ids) if drawer.bans(position) else 0
        if drawer.seen is not None:
            draw.seen, draw.counts = drawer.seen.ids.ctypes.data, drawer.seen.counts.ctypes.data
            draw.seen_count = len(drawer.seen.ids)
        return draw


def _unchanging(drawer: Drawer) -> Draw:
    """What is the same for all of a sequence's draws. Points into the drawer's arrays."""
    sampling = drawer.sampling
    return Draw(
        biased=drawer.bias_ids.ctypes.data,
        bias=drawer.bias.ctypes.data,
        banned=drawer.end_ids.ctypes.data,
        seed=sampling.seed & SEED,
        top_p=sampling.top_p,
        temperature=sampling.temperature,
        floor=drawer.floor,
        repetition=sampling.repetition_penalty,
        presence=sampling.presence_penalty,
        frequency=sampling.frequency_penalty,
        top_k=min(sampling.top_k, MOST_K),
        biased_count=len(drawer.bias_ids),
        choice=sampling.choice & WORD,
    )


def _all_take_best(drawers: Sequence[Drawer], positions: Sequence[int]) -> bool:
    return all(drawer.takes_best(position) for drawer, position in zip(drawers, positions, strict=True))
