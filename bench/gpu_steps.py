"""Steps of a Llama 3.1 8B with random weights: decode at several batches, and prefill; the host one step ahead."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from cbdisagg_bench.gpu_models import LLAMA_8B, PAGE, TINY, device_runner
from cbdisagg_bench.gpu_rows import Row, Setting, at_most, copy_bytes_per_s
from triton import knobs

from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.messages import Admit, Push, Sampling, Slice, StepPlan, pack

PART = "steps"
BATCHES = (1, 32, 128, 256)
CONTEXT = 1024
PREFILL = 2048
STEPS = 24
BOUND = {1: 1.25, 32: 1.25}
"""A decode step's time over that of streaming weights and KV, at most."""


def run(setting: Setting) -> Iterator[Row]:
    streamed = copy_bytes_per_s(setting)
    batches = (1, 2) if setting.tiny else BATCHES
    context, steps = setting.size(CONTEXT, 20), setting.size(STEPS, 3)
    prompt = setting.size(PREFILL, 40)
    each = -(-(context + steps + 1) // PAGE)
    pages = max(batches) * each + -(-prompt // PAGE)
    shape = TINY if setting.tiny else LLAMA_8B
    longest = max(context + steps + 1, prompt) + PAGE
    runner = device_runner(setting, shape, pages, longest, max(batches), most_rows=prompt)
    bench, compiled = Steps(runner, pages), list[str]()
    knobs.runtime.jit_post_compile_hook = lambda *, fn, **rest: compiled.append(fn.name)
    for batch in batches:
        taken = bench.decode(batch, context, steps)
        nbytes = weight_bytes(runner) + kv_bytes(runner, batch * context)
        yield Row(PART, f"decode step, batch {batch}, context {context}", 1e3 * taken, "ms")
        yield Row(PART, f"  tokens per second, batch {batch}", batch / taken, "tok/s")
        over = taken / (nbytes / streamed)
        what = f"  over streaming weights and KV, batch {batch}"
        yield at_most(PART, what, over, "x", BOUND[batch]) if batch in BOUND else Row(PART, what, over, "x")
    taken = bench.prefill(prompt, setting.size(6, 2))
    yield Row(PART, f"prefill of {prompt} tokens", prompt / taken, "tok/s")
    yield at_most(PART, "kernels compiled in these steps", len(compiled), "kernels", 0)


def weight_bytes(runner: DeviceRunner) -> int:
    decoder = runner.decoder
    return (decoder.product_weights + decoder.spec.vocab * decoder.spec.hidden) * decoder.dtype.itemsize


def kv_bytes(runner: DeviceRunner, tokens: int) -> int:
    spec = runner.decoder.spec
    return 2 * spec.layers * spec.kv_heads * spec.head_dim * runner.decoder.dtype.itemsize * tokens


class Steps:
    """Plans for one runner, as a worker would make them; each is launched before the one before it is waited for."""

    def __init__(self, runner: DeviceRunner, pages: int) -> None:
        self.runner, self.number = runner, 0
        self.random = np.random.default_rng(0)
        self.pages: list[int] = self.random.permutation(pages).tolist()
        self.taken = 0  # of them

    def decode(self, batch: int, context: int, steps: int) -> float:
        """The median time from a step's end to the next one's, at about `context` tokens each."""
        self._run(admit=tuple(self._admit(n, context, context + steps + 1) for n in range(batch)))
        ends, waits = list[float](), list[Callable[[], Any]]()
        for length in range(context, context + steps):
            slices = tuple(Slice(n, length - 1, 1, 1) for n in range(batch))
            waits.append(self._launch(slices=slices))
            if len(waits) > 1:
                waits.pop(0)()
                ends.append(time.perf_counter())
        waits.pop()()
        self._run(release=tuple(range(batch)))
        self.taken = 0
        return statistics.median(b - a for a, b in pairwise(ends))

    def prefill(self, tokens: int, repeat: int) -> float:
        times = []
        for _ in range(1 + repeat):
            self._run(admit=(self._admit(0, tokens, tokens),))
            began = time.perf_counter()
            self._run(slices=(Slice(0, 0, tokens, 1),))
            times.append(time.perf_counter() - began)
            self._run(release=(0,))
            self.taken = 0
        return statistics.median(times[1:])

    def _admit(self, slot: int, length: int, longest: int) -> Admit:
        count = -(-longest // PAGE)
        pages = tuple(self.pages[self.taken : self.taken + count])
        self.taken += count
        prompt = pack(self.random.integers(0, self.runner.decoder.spec.vocab, length).tolist())
        return Admit(slot, prompt, b"", pages, Sampling(max_tokens=1 << 20, temperature=0.0))

    def _run(self, **what: Any) -> None:
        self._launch(**what)()

    def _launch(
        self, release: tuple[int, ...] = (), admit: tuple[Admit, ...] = (), slices: tuple[Slice, ...] = ()
    ) -> Callable[[], Any]:
        self.number += 1
        return self.runner.launch(StepPlan(self.number, release, admit, (), slices), _no_push)


def _no_push(layer: int, push: Push) -> None:
    raise AssertionError("no slice of the bench pushes")
