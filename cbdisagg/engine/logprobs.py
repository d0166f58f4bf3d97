"""Log probabilities as the api reports them: of a token and of the best alternatives, from the model's own logits.

Taken before temperature, bias and penalties. A token's value and its entry among the alternatives are computed alike,
so they are equal bit for bit. Alternatives descend; equal ones are in the order of their ids.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cbdisagg.messages import Logprobs

NEAR = 8.0
"""Nats below the best within which the alternatives are looked for first."""


def logprobs(logits: NDArray[np.float32], token: int, alternatives: int) -> Logprobs:
    """Of `token` under `logits` [vocab], with that many alternatives (0: none)."""
    best = logits.max()
    normaliser = best + np.float32(np.log(np.exp(logits - best).sum(dtype=np.float64)))
    top = best_ids(logits, alternatives)
    return Logprobs(float(logits[token] - normaliser), tuple(top.tolist()), tuple((logits[top] - normaliser).tolist()))


def best_ids(logits: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """The ids of the `count` largest logits, descending, ties by id."""
    if count <= 0:
        return np.zeros(0, np.intp)
    ids = np.flatnonzero(logits >= logits.max() - NEAR)
    if len(ids) < count:
        ids = np.arange(len(logits))
    return ids[np.lexsort((ids, -logits[ids]))[:count]]
