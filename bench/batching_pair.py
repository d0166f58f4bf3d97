"""All requests at once into a service of two workers, by the virtual clock: coordinator, hand-overs and links included.

Knows the simulator. The trace is that of the worker which decodes, or of the first of two equal ones; iterations depend
on when pages arrive, so nothing here has a formula.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg_bench.batching_burst import Burst
from cbdisagg_bench.batching_lengths import Request
from cbdisagg_bench.trace import Trace

from cbdisagg.config import Config
from cbdisagg.core.effects import Effect
from cbdisagg.core.profile import Profile
from cbdisagg.core.worker import WorkerCore
from cbdisagg.sim.machine import Machine
from cbdisagg.sim.network import Process
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.workload import Ask


class _Watch:
    """The trace of one worker among all that an observer hears of."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.trace: Trace | None = None
        self.cores: dict[str, WorkerCore] = {}

    def __call__(self, process: Process, now: float, event: object, effects: list[Effect]) -> None:
        if not isinstance(process, Machine):
            return
        self.cores[process.address.name] = process.core
        if process.address.name == self.name:
            self.trace = self.trace or Trace.of(process.core, detail=0)
            self.trace.observe(process.core, now, event, effects)


def run_pair(config: Config, profile: Profile, requests: Sequence[Request]) -> Burst:
    """Both workers have the profile's speed; `config` says what each does."""
    watch = _Watch("decode-0" if any(group.role == "decode" for group in config.workers) else "worker-0")
    asks = [Ask(0.0, request.output, prompt_ids=request.prompt) for request in requests]
    outcome = simulate(config, profile, asks, observer=watch)
    assert watch.trace is not None
    return Burst(
        seconds=outcome.seconds,
        steps=sum(meter.steps for meter in outcome.meters.values()),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=sum(record.tokens for record in outcome.records),
        preemptions=sum(record.preemptions for record in outcome.records),
        returned=all(core.pages.available() == core.pages.total for core in watch.cores.values()),
        trace=watch.trace,
        outputs=[[1] * record.tokens for record in outcome.records],
    )
