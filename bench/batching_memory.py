"""What the KV memory was used for, over a run: as the vLLM paper splits it.

`filled` holds tokens of living sequences; `promised` is held by a sequence that will fill it; `internal` is held and
will never be filled; `external` is free, and yet what waits cannot use it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbdisagg_bench.trace import Step, Trace


@dataclass(frozen=True, slots=True)
class Shares:
    """Parts of the pool, averaged over time; they add up to 1."""

    filled: float
    promised: float
    internal: float
    external: float


def contended(trace: Trace) -> list[Step]:
    """The steps at whose start somebody waited for memory: at the end of a burst the pool empties in any system."""
    return [step for step in trace.steps if step.waiting]


def shares(trace: Trace) -> Shares:
    """Over the contended steps, or all if there is none; weighted by their seconds."""
    steps: Sequence[Step] = contended(trace) or trace.steps
    time = sum(step.seconds for step in steps)

    def mean(values: Sequence[int]) -> float:
        return sum(value * step.seconds for value, step in zip(values, steps, strict=True)) / time / trace.pool_tokens

    filled, promised = mean([step.filled for step in steps]), mean([step.promised for step in steps])
    held = mean([step.held for step in steps])
    return Shares(filled, promised, held - filled - promised, 1 - held)


def filled_of_held(trace: Trace) -> float:
    """Tokens over the room that is held for them, averaged over time."""
    steps = [step for step in trace.steps if step.held]
    return sum(step.filled / step.held * step.seconds for step in steps) / sum(step.seconds for step in steps)
