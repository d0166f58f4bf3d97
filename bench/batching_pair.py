"""All requests at once into a service of two workers, by the virtual clock: coordinator, hand-overs and links included.

Knows the simulator. Iterations depend on when pages arrive, so nothing here has a formula.
"""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg_bench.batching_burst import Burst
from cbdisagg_bench.batching_lengths import Request
from cbdisagg_bench.trace import Trace, decoding

from cbdisagg.config import Config
from cbdisagg.core.effects import Effect
from cbdisagg.core.profile import Profile
from cbdisagg.core.worker import WorkerCore
from cbdisagg.sim.machine import Machine
from cbdisagg.sim.network import Process
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.workload import Ask


class _Watch:
    """The trace of each worker, by its name."""

    def __init__(self) -> None:
        self.cores: dict[str, WorkerCore] = {}
        self.traces: dict[str, Trace] = {}

    def __call__(self, process: Process, now: float, event: object, effects: list[Effect]) -> None:
        if not isinstance(process, Machine):
            return
        name = process.address.name
        if name not in self.traces:
            self.cores[name], self.traces[name] = process.core, Trace.of(process.core, detail=0)
        self.traces[name].observe(process.core, now, event, effects)


def run_pair(config: Config, profile: Profile, requests: Sequence[Request]) -> Burst:
    """Both workers have the profile's speed; `config` says what each does."""
    watch = _Watch()
    asks = [Ask(0.0, request.output, prompt_ids=request.prompt) for request in requests]
    outcome = simulate(config, profile, asks, observer=watch)
    return Burst(
        seconds=outcome.seconds,
        steps=sum(meter.steps for meter in outcome.meters.values()),
        prompt_tokens=sum(len(request.prompt) for request in requests),
        output_tokens=sum(record.tokens for record in outcome.records),
        preemptions=sum(record.preemptions for record in outcome.records),
        returned=all(core.pages.available() == core.pages.total for core in watch.cores.values()),
        trace=decoding([(watch.cores[name], watch.traces[name]) for name in sorted(watch.traces)]),
        outputs=[[1] * record.tokens for record in outcome.records],
    )
