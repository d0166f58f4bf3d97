"""Counts what serving asks the compiler for, on a GPU that is not there; kernels are neither compiled nor run.

A program of its own, for in a process whose kernels are interpreted nobody asks for one. Triton's own hook before each
compilation says what would be compiled, and answers that it need not be; all that kernels would write is zero. Prints
JSON: kernels, one name for each variant, that were asked for before serving, and in random steps afterwards; by a
runner that has warmed up ("warm") and by one that has not ("cold").
"""

from __future__ import annotations

import json
import random
from typing import Any

import torch
from ahead_of_time import StubDriver
from cbdisagg_bench.step import random_tensors
from cbdisagg_kernels.gpu.ops import triton_ops
from transformers import LlamaConfig
from triton import knobs
from triton.runtime import driver

from cbdisagg.engine.device import HostDevice
from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.engine.families import Spec, spec_of, weights_of
from cbdisagg.engine.kv import KvShape, as_pool
from cbdisagg.engine.model import Decoder, make_linears
from cbdisagg.engine.page_copier import KernelCopier
from cbdisagg.engine.warm_up import warm_up
from cbdisagg.messages import Address, Admit, AttemptId, Push, RequestId, Sampling, Slice, StepPlan, pack

PAGE, MAX_LEN, MOST_BATCH, MOST_ROWS = 16, 300, 70, 512
STEPS = 30
PLAIN = Sampling(max_tokens=9)
SAMPLINGS = (PLAIN, Sampling(max_tokens=9, logprobs=1), Sampling(max_tokens=9, presence_penalty=1.0))
INNER = 80
CONFIG = LlamaConfig(
    vocab_size=99,
    hidden_size=96,
    intermediate_size=INNER,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
)


def runner_of(spec: Spec, memory: torch.Tensor, kv: KvShape) -> DeviceRunner:
    ops, weights = triton_ops(HostDevice.torch_device), weights_of(spec, random_tensors(spec, INNER))
    decoder = Decoder(spec, weights, make_linears(weights, ops, kv.dtype), ops, as_pool(memory, kv), MAX_LEN)
    return DeviceRunner(decoder, MAX_LEN, HostDevice(), 2 * MOST_BATCH, MOST_BATCH)


def random_step(chance: random.Random) -> tuple[tuple[Admit, ...], tuple[Slice, ...]]:
    """Decodes and chunks, some of which draw, score or are pushed."""
    decodes = chance.choice((0, 1, 2, 15, 16, 17, 33, 34, chance.randrange(MOST_BATCH - 3)))
    count = decodes + chance.randrange(0 if decodes else 1, 4)
    lengths = [chance.randrange(1, MAX_LEN) for _ in range(count)]
    admits, slices, rows = [], [], 0
    for slot, length in enumerate(lengths):
        count = 1 if slot < decodes else min(length, chance.choice((1, 2, 15, 16, 17, 100, 257)))
        rows += count
        if rows > MOST_ROWS:
            break
        begin = length - count if chance.random() < 0.7 else 0
        draws = int(begin + count == length and chance.random() < 0.8)
        sampling = chance.choices(SAMPLINGS, (20, 1, 1))[0]
        push = None
        if chance.random() < 0.1:
            push = Push(slot, AttemptId(1, RequestId(1, 1), 1), Address("d", 1, ""), (0,), (1,), True)
        scores = count > 1 and chance.random() < 0.2
        admits.append(Admit(slot, pack([0] * length), b"", (0,) * -(-length // PAGE), sampling))
        slices.append(Slice(slot, begin, count, draws, scores, push=push))
    return tuple(admits), tuple(slices)


def serve(warm: bool, asked: list[str]) -> dict[str, list[str]]:
    """What has been asked for before serving, then while serving."""
    spec = spec_of(CONFIG)
    kv = KvShape(spec.layers, spec.kv_heads, spec.head_dim, PAGE, torch.bfloat16)
    memory = torch.zeros(spec.layers, 2, kv.page_bytes, dtype=torch.uint8)
    runner = runner_of(spec, memory, kv)
    host, number_of_copies = HostDevice(), 0
    copier = KernelCopier(host.torch_device, kv.page_bytes, lambda at, nbytes: memory[at, 0, :nbytes], host.queueing_on)
    if warm:
        warm_up(runner, MOST_BATCH, MOST_ROWS)
        copier.warm_up(0, 0)
    before = asked.copy()

    def push(layer: int, each: Push) -> None:
        nonlocal number_of_copies
        copier.copy(layer, layer, copier.prepare(each.source, each.target, 0), 0)
        number_of_copies += 1

    chance = random.Random(7)
    for number in range(STEPS):
        admits, slices = random_step(chance)
        runner.run(StepPlan(number, (), admits, (), slices), push)
        runner.run(StepPlan(number, tuple(each.slot for each in admits), (), (), ()), push)
    assert number_of_copies
    return {"before": before, "serving": asked[len(before) :]}


def main() -> None:
    driver.set_active(StubDriver(90))
    empty = torch.empty
    torch.empty = lambda *shape, **how: empty(*shape, **how).zero_()  # no kernel fills it
    asked, seen = list[str](), set[str]()

    def ask(*, key: str, fn: Any, **rest: object) -> bool:
        name = fn.name.rpartition(".")[2]
        if (variant := f"{name} {key}") not in seen:
            seen.add(variant)
            asked.append(name)
        return True  # nothing has to be compiled

    knobs.runtime.jit_cache_hook = ask
    found = {}
    for how in ("cold", "warm"):
        asked.clear()
        seen.clear()
        found[how] = serve(how == "warm", asked)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
