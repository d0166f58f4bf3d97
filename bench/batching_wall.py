"""The real model under the wall clock: loaded once, calibrated once, a fresh runner for every system.

Knows the engine. What a step costs is measured at the start, on this machine and as it is loaded now, and fitted to the
cost model: that says beforehand how long the experiment will take, and afterwards what the ratios should have been.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from cbdisagg_bench.batching_scales import Scale
from cbdisagg_bench.batching_systems import ALONE
from cbdisagg_bench.machine import processor
from cbdisagg_bench.profile_fit import fit_steps
from cbdisagg_bench.profile_steps import Case, Stepper, decode, prefill
from msgspec.structs import replace

from cbdisagg.core.cost import CostModel, Work
from cbdisagg.engine.base import PushLayer, Runner
from cbdisagg.engine.build import build_device_runner, build_runner, describe
from cbdisagg.engine.device import open_device
from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.engine.runner import TorchRunner
from cbdisagg.messages import StepPlan, StepResult

ROUNDS = 5


class Lab:
    """One model in this process, with a pool of the scale for each system of one worker.

    On a GPU decode steps are replayed from graphs, as in a worker, but the host waits for each step: whose turn is next
    depends on it.
    """

    def __init__(self, folder: Path, dtype: str, threads: int, scale: Scale, device: str = "cpu") -> None:
        self.folder, self.scale = folder, scale
        self.device = None if device == "cpu" else open_device(device)
        self.info = describe(folder, dtype, device=self.device.torch_device if self.device else torch.device("cpu"))
        self._max_len = scale.prompt + max(scale.caps)
        shape = (self.info.layers, scale.pages * len(ALONE), self.info.page_bytes(scale.page_size))
        if self.device is None:
            memory = np.zeros(shape, np.uint8)
            self._decoder = build_runner(folder, dtype, memory, scale.page_size, self._max_len, threads).decoder
        else:
            pool = torch.zeros(shape, dtype=torch.uint8, device=self.device.torch_device)
            slots, batch, rows = 2 * scale.max_batch, scale.max_batch, scale.max_batch + scale.prompt
            self._decoder = build_device_runner(
                folder, dtype, pool, scale.page_size, self._max_len, self.device, slots, batch, rows
            ).decoder

    @property
    def machine(self) -> str:
        return torch.cuda.get_device_name(self.device.torch_device) if self.device else processor()

    def runner(self, place: int) -> PlacedRunner:
        """With no slot taken, and a pool of its own: the `place`th of as many as there are systems."""
        if self.device is None:
            return PlacedRunner(TorchRunner(self._decoder, self._max_len), place * self.scale.pages)
        slots = 2 * self.scale.max_batch  # a static batch's padding has slots of its own
        device_runner = DeviceRunner(self._decoder, self._max_len, self.device, slots, self.scale.max_batch)
        return PlacedRunner(device_runner, place * self.scale.pages)

    def calibrate(self, progress: Callable[[int, int], None], rounds: int = ROUNDS) -> CostModel:
        """The cost model fitted to steps as these systems make them. `progress`: (done, of)."""
        cases = calibration(self.scale)
        stepper = Stepper.of(self.info, self.runner(0), self.scale.page_size, cases, seed=0)
        for done, _ in enumerate(stepper.measure(cases, rounds), 1):
            progress(done, rounds * len(cases))
        steps = fit_steps(cases)
        link = self.scale.profile
        return CostModel(**asdict(steps), t0=link.t0, t_d=link.t_d, B=link.B)

    def close(self) -> None:
        """Its memory is free for services."""
        del self._decoder
        gc.collect()
        if self.device is not None:
            torch.cuda.empty_cache()


class PlacedRunner:
    """A runner whose page 0 is page `first` of the memory: several share one model and one memory, and no page."""

    def __init__(self, runner: Runner, first: int) -> None:
        self.runner, self.first = runner, first

    @property
    def layers(self) -> int:
        return self.runner.layers

    def run(self, plan: StepPlan, push: PushLayer) -> StepResult:
        admit = tuple(replace(entry, pages=self._placed(entry.pages)) for entry in plan.admit)
        grow = tuple((slot, self._placed(pages)) for slot, pages in plan.grow)
        return self.runner.run(replace(plan, admit=admit, grow=grow), push)

    def _placed(self, pages: Iterable[int]) -> tuple[int, ...]:
        return tuple(self.first + page for page in pages)


def calibration(scale: Scale) -> list[Case]:
    """Decodes of every batch that the pool has room for; prompts by themselves, whole and in parts; and both."""
    most = scale.pool // scale.prompt
    batches = sorted({n for n in (1, 2, 4, 8, 12, 16, 24, 32, most) if n <= most})
    contexts = (scale.prompt, scale.prompt + scale.caps[-1] // 2)
    cases = [decode([context] * batch) for batch in batches for context in contexts if batch * context <= scale.pool]
    prompt, parts = Work(0, scale.prompt, False), (scale.prompt // 4, scale.prompt // 2)
    cases += [Case((prompt,) * n) for n in batches if n * scale.prompt <= scale.pool]
    cases += [prefill(start, part) for part in parts for start in (0, part)]
    room = most - 2  # decodes beside two prompts
    cases += [Case((*decode([contexts[0]] * n).work, prompt)) for n in sorted({1, room // 2, room})]
    cases += [Case((*decode([contexts[0]] * n).work, prompt, Work(0, parts[0], False))) for n in (1, room // 2)]
    cases += [Case((*decode([contexts[0]] * room).work, Work(0, part, False))) for part in parts]
    return cases
