"""All requests at once into one worker: the production core and a runner, driven step by step, by any clock.

Knows events and plans; a runner prices them or computes them, and says how long that took. Nothing here decides
anything, and with no targets the core does not either by looking at times: so the steps are the same by every clock.
Life of a run: a queue is handed in while no plan may be made -> steps until nothing is left -> what came of it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbdisagg_bench.batching_lengths import Request
from cbdisagg_bench.trace import Trace, mean_batch

from cbdisagg.config import Config
from cbdisagg.core.cost import CostModel, Work
from cbdisagg.core.effects import Effect, RunStep, Tell
from cbdisagg.core.events import FromWorkerInbox, StepDone, Tick, WorkerEvent
from cbdisagg.core.worker import WorkerCore
from cbdisagg.engine.base import PushLayer, Runner
from cbdisagg.messages import (
    Address,
    Generate,
    Members,
    PoolInfo,
    Push,
    RequestId,
    Route,
    Sampled,
    Sampling,
    StepPlan,
    StepResult,
    Submit,
    Targets,
    Tokens,
    WorkerInfo,
    pack,
)

ME, API, COORDINATOR = Address("any-0", 1, ""), Address("bench", 2, ""), Address("coordinator", 3, "")
NO_PLANS = -1
"""Plans that may be ahead of none: the core waits, so that a burst is there as a whole when the first step is made."""
QUEUE = 2
"""Requests that wait in the core, in parts of what can run at once: nobody further behind can start before these."""
DETAIL = 64
"""Steps whose cells are kept for pictures."""


@dataclass(slots=True)
class Burst:
    """`seconds` by the clock of the run; `outputs` by request. `returned`: every page is free at the end."""

    seconds: float
    steps: int
    prompt_tokens: int
    output_tokens: int
    preemptions: int
    returned: bool
    trace: Trace
    outputs: list[list[int]] = field(default_factory=list)

    @property
    def tokens_per_s(self) -> float:
        """The article's metric: prompt and output tokens by the seconds of all."""
        return (self.prompt_tokens + self.output_tokens) / self.seconds

    @property
    def mean_batch(self) -> float:
        return mean_batch(self.trace.steps)


class PricedRunner:
    """Instead of a model: every token is 1, a step takes what the cost model says."""

    layers = 1

    def __init__(self, cost: CostModel) -> None:
        self.cost = cost

    def run(self, plan: StepPlan, push: PushLayer) -> StepResult:
        seconds = self.cost.step_s(Work(s.start, s.count, s.count == 1 and s.start > 0) for s in plan.slices)
        return StepResult(plan.number, tuple(_DRAWN if s.draws else _NOTHING for s in plan.slices), seconds)


_DRAWN, _NOTHING = Sampled((1,)), Sampled(())


class Drive:
    """One burst, a step at a time. `wall`: by the machine's clock, the core's own time included; else the runner's.

    The clock stands still between two steps, so that several drives can take turns.
    """

    def __init__(
        self, config: Config, requests: Sequence[Request], runner: Runner, *, wall: bool, detail: int = DETAIL
    ) -> None:
        self.runner, self.wall, self.requests = runner, wall, requests
        self.core = WorkerCore(worker_info(config), config, plans_ahead=NO_PLANS)
        self.trace = Trace.of(self.core, detail)
        self.outputs: dict[int, list[int]] = {n: [] for n in range(len(requests))}
        self.now = 0.0
        self._coming = deque(enumerate(requests))
        self.core.handle(FromWorkerInbox(COORDINATOR, Members(0, (API,), (self.core.info,), (), ())), 0.0)
        self._hand_in()
        self.core.steps.plans_ahead = 0
        self._ended = 0
        self._event: WorkerEvent = Tick()

    def step(self) -> bool:
        """The next step, if there is one."""
        began = time.perf_counter()
        self._hand_in()
        effects = self.core.handle(self._event, self.now)
        self.trace.observe(self.core, self.now, self._event, effects)
        self._ended += _collect(effects, self.outputs)
        plan = next((effect.plan for effect in effects if isinstance(effect, RunStep)), None)
        if plan is None:
            return False
        result = self.runner.run(plan, _no_push)
        self.now += time.perf_counter() - began if self.wall else result.seconds
        self._event = StepDone(result)
        return True

    def _hand_in(self) -> None:
        """The next requests, as old as the burst, as the queue grows short.

        What the core does is the same as if all were there, but it has not a thousand to put in order at every step.
        """
        config = self.core.config
        targets = Targets(config.targets.ttft_ms / 1e3, config.targets.tpot_ms / 1e3)
        while self._coming and len(self.core.scheduler.waiting) < QUEUE * config.scheduler.max_batch:
            n, request = self._coming.popleft()
            sampling = Sampling(max_tokens=request.output, temperature=0.0)
            id = RequestId(API.incarnation, n)
            spec = Generate(id, 0, pack(request.prompt), b"", b"", b"", sampling, targets, self.now)
            self.core.handle(FromWorkerInbox(COORDINATOR, Submit(spec, Route(ME, ME), 0)), self.now)

    def burst(self) -> Burst:
        """What came of it, once no step is left."""
        pages = self.core.pages
        return Burst(
            seconds=self.now,
            steps=len(self.trace.steps),
            prompt_tokens=sum(len(request.prompt) for request in self.requests),
            output_tokens=sum(map(len, self.outputs.values())),
            preemptions=self.core.reporter.preemptions,
            returned=pages.available() == pages.total and self._ended == len(self.requests),
            trace=self.trace,
            outputs=list(self.outputs.values()),
        )


def run_burst(config: Config, requests: Sequence[Request], cost: CostModel, detail: int = DETAIL) -> Burst:
    """By the virtual clock."""
    drive = Drive(config, requests, PricedRunner(cost), wall=False, detail=detail)
    while drive.step():
        pass
    return drive.burst()


def worker_info(config: Config) -> WorkerInfo:
    """A worker that hands nothing over, with the pool and the lengths of the config."""
    pool = PoolInfo(0, 0, "", 0, 0, layers=1, pages=config.kv.pages, page_bytes=1, data_endpoint="")
    return WorkerInfo(
        ME, "any", "bench", "bench", pool, config.kv.page_size, config.scheduler.max_batch, config.model.max_len
    )


def _collect(effects: Sequence[Effect], outputs: dict[int, list[int]]) -> int:
    """What clients are told; how many requests ended with it."""
    ended = 0
    for effect in effects:
        if isinstance(effect, Tell) and isinstance(effect.message, Tokens):
            for run in effect.message.runs:
                outputs[run.id.n] += run.ids
                ended += run.finish is not None
    return ended


def _no_push(layer: int, push: Push) -> None:
    raise AssertionError("a burst has one worker: nothing is pushed")
