"""What a worker needs of an engine, and the fake that tests use instead of a model. No torch here.

A `Runner` owns the slots: for each, its token ids, its pages and how to draw. It lives in one thread and runs plans in
the order given. Everything it derives (block tables, penalty counts) is a function of prompt, output and sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeAlias, runtime_checkable

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


@runtime_checkable
class Launcher(Runner, Protocol):
    """A runner whose device works while the host goes on: one plan may be launched while another is under way."""

    def launch(self, plan: StepPlan, push: PushLayer) -> Callable[[], StepResult]:
        """Queue a step; the result waits for it. Waits are called once each, in order, from one other thread.

        `push` is called when a layer's pages will be final in the order of the device's queue, not when they are.
        """
        ...
