"""What a worker needs of an engine, and the fake that tests use instead of a model. No torch here.

A `Runner` owns the slots: for each, its token ids, its pages and how to draw. It lives in one thread and runs plans in
the order given. Everything it derives (block tables, penalty counts) is a function of prompt, output and sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias

from cbdisagg.messages import Push, StepPlan, StepResult

PushLayer: TypeAlias = Callable[[int, Push], None]
"""`push(layer, push)`: this layer's K and V of the named pages are final; called once for each layer, in order."""


class Runner(Protocol):
    """One worker's model. `run` blocks; it is called from one thread only."""

    @property
    def layers(self) -> int: ...

    def run(self, plan: StepPlan, push: PushLayer) -> StepResult:
        """Apply the plan's delta, compute its slices, draw. Any exception is a bug and ends the worker."""
        ...
