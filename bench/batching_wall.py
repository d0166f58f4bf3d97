"""The real model under the wall clock: loaded once, calibrated once, a fresh runner for every system.

Knows the engine. What a step costs is measured at the start, on this machine and as it is loaded now, and fitted to the
cost model: that says beforehand how long the experiment will take, and afterwards what the ratios should have been.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np
from cbdisagg_bench.batching_scales import Scale
from cbdisagg_bench.profile_fit import fit_steps
from cbdisagg_bench.profile_steps import Case, Stepper, decode

from cbdisagg.core.cost import CostModel, Work
from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.runner import TorchRunner

ROUNDS = 5


class Lab:
    """One model in this process, with the pool of a scale."""

    def __init__(self, folder: Path, dtype: str, threads: int, scale: Scale) -> None:
        self.folder, self.dtype, self.threads, self.scale = folder, dtype, threads, scale
        info = describe(folder, dtype)
        self.vocab = info.vocab
        self._max_len = scale.prompt + max(scale.caps)
        memory = np.zeros((info.layers, scale.pages, info.page_bytes(scale.page_size)), np.uint8)
        self._decoder = build_runner(folder, dtype, memory, scale.page_size, self._max_len, threads).decoder

    def runner(self) -> TorchRunner:
        """No slot is taken. One at a time: they share the pool."""
        return TorchRunner(self._decoder, self._max_len)

    def calibrate(self, progress: Callable[[int, int], None], rounds: int = ROUNDS) -> CostModel:
        """The cost model fitted to steps as these systems make them. `progress`: (done, of)."""
        cases = calibration(self.scale)
        stepper = Stepper(self.folder, self.dtype, self.threads, self.scale.page_size, cases, seed=0)
        for done, _ in enumerate(stepper.measure(cases, rounds), 1):
            progress(done, rounds * len(cases))
        steps = fit_steps(cases)
        link = self.scale.profile
        return CostModel(**asdict(steps), t0=link.t0, t_d=link.t_d, B=link.B)


def calibration(scale: Scale) -> list[Case]:
    """Decodes of every batch that the pool has room for, prompts by themselves, and prompts beside decodes."""
    most = scale.pool // scale.prompt
    batches = sorted({n for n in (1, 2, 4, 8, 12, 16, 24, 32, most) if n <= most})
    contexts = (scale.prompt, scale.prompt + scale.caps[-1] // 2)
    cases = [decode([context] * batch) for batch in batches for context in contexts if batch * context <= scale.pool]
    prompt = Work(0, scale.prompt, False)
    cases += [Case((prompt,) * n) for n in batches if n * scale.prompt <= scale.pool]
    cases += [Case((*decode([contexts[0]] * (most - n - 1)).work, *(prompt,) * n)) for n in (1, 2, 4) if n + 2 < most]
    return cases
