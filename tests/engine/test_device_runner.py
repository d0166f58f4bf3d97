"""The runner of devices, on Triton's interpreter: the tokens of torch's path, whatever is launched ahead of what."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from cbdisagg_kernels.gpu import decode_attention
from cbdisagg_kernels.gpu.ops import triton_ops

from cbdisagg.engine.base import Launcher
from cbdisagg.engine.build import build_runner, describe, weight_bytes
from cbdisagg.engine.device import HostDevice
from cbdisagg.engine.device_runner import DeviceRunner
from cbdisagg.engine.graphs import sizes_up_to
from cbdisagg.engine.warm_up import warm_up
from cbdisagg.messages import Admit, Push, Sampling, Slice, StepPlan, pack

PAGE, CONTEXT, VOCAB = 8, 96, 200


@pytest.fixture(autouse=True)
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contexts are divided in two, not in 32 to fill a device: programs are what the interpreter is slow at."""
    monkeypatch.setattr(decode_attention, "PROGRAMS", 4)


def device_runner(twin: Any, most_batch: int = 2) -> DeviceRunner:
    info = describe(twin.folder, "float32")
    memory = np.zeros((info.layers, twin.pages, info.page_bytes(PAGE)), np.uint8)
    ops = triton_ops(HostDevice.torch_device)
    decoder = build_runner(twin.folder, "float32", memory, PAGE, CONTEXT, 1, ops).decoder
    return DeviceRunner(decoder, CONTEXT, HostDevice(), most_slots=64, most_batch=most_batch)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


GREEDY = {"temperature": 0.0}
SAMPLINGS: list[dict[str, Any]] = [
    GREEDY,
    {"seed": 5},
    {"seed": 1 << 40, "choice": 1, "top_k": 9, "top_p": 0.9},
    {"temperature": 0.7, "min_p": 0.1, "seed": 3},
    {"temperature": 0.0, "logprobs": 2, "prompt_logprobs": 1},
    {"seed": 8, "frequency_penalty": 0.5, "repetition_penalty": 1.3},
    {"temperature": 0.0, "logit_bias": {7: 3.0}},
]


def test_all_ways_to_draw_in_one_batch(llama: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    """Random chunks and pages; sequences begin and end in between, so that batches grow, shrink and pad graphs."""
    outputs = []
    for runner in (llama.runner(), device_runner(llama)):
        cuts = random.Random(3)
        sequences = [
            make_sequence(prompt(length, seed=length), Sampling(max_tokens=count, **sampling), start_step=n // 2)
            for n, (length, count, sampling) in enumerate(
                zip((1, 8, 17, 9, 12, 7, 20), (5, 2, 4, 3, 2, 3, 2), SAMPLINGS, strict=True)
            )
        ]
        outputs.append(drive(llama, sequences, seed=1, runner=runner, chunk=partial(cuts.randint, 1, 12)))
    for ours, theirs in zip(*outputs, strict=True):
        assert ours.output == theirs.output
        for mine, reference in ((ours.logprobs, theirs.logprobs), (ours.prompt_logprobs, theirs.prompt_logprobs)):
            assert [each.top_ids for each in mine] == [each.top_ids for each in reference]
            assert [each.logprob for each in mine] == pytest.approx([each.logprob for each in reference], abs=1e-3)


def test_every_family(twin: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    """Learned positions, norms after the sums, biases, heads whose size is no power of two."""
    outputs = []
    for runner in (twin.runner(), device_runner(twin, most_batch=1)):
        sequence = make_sequence(prompt(10, seed=2), Sampling(max_tokens=3, temperature=0.0))
        outputs.append(drive(twin, [sequence], runner=runner, chunk=lambda: 7)[0].output)
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------------------------------------------------- ahead


class Ahead:
    """Launches one plan while another is under way, as the core does."""

    def __init__(self, runner: DeviceRunner) -> None:
        self.runner = runner
        self.number = 0
        self.waits: list[tuple[tuple[int, ...], Callable[[], Any]]] = []
        self.outputs: dict[int, list[int]] = {}

    def plan(self, *slices: Slice, admit: tuple[Admit, ...] = (), release: tuple[int, ...] = ()) -> None:
        self.number += 1
        plan = StepPlan(self.number, release, admit, (), slices)
        self.waits.append((tuple(part.slot for part in slices), self.runner.launch(plan, no_push)))
        if len(self.waits) > 1:
            self.collect()

    def collect(self) -> None:
        slots, wait = self.waits.pop(0)
        for slot, sampled in zip(slots, wait().sampled, strict=True):
            self.outputs.setdefault(slot, []).extend(sampled.ids)


def no_push(layer: int, push: Push) -> None:
    raise AssertionError("nothing is pushed here")


def admit(slot: int, length: int, first_page: int, **sampling: Any) -> Admit:
    pages = tuple(range(first_page, first_page + 6))
    return Admit(slot, pack(prompt(length, seed=length)), b"", pages, Sampling(max_tokens=40, **sampling))


@pytest.mark.parametrize("watched", [False, True])
def test_the_next_step_is_launched_before_tokens_are_known(
    llama: Any, drive: Callable[..., Any], make_sequence: Any, watched: bool
) -> None:
    """Also where the host has to draw for one of the two."""
    how = [{"temperature": 0.0}, {"seed": 4, "top_k": 20} | ({"presence_penalty": 0.4} if watched else {})]
    wanted = [
        drive(llama, [make_sequence(prompt(length, seed=length), Sampling(max_tokens=7, **sampling))])[0].output
        for length, sampling in zip((9, 5), how, strict=True)
    ]
    ahead = Ahead(device_runner(llama))
    ahead.plan(Slice(0, 0, 9, 1), Slice(1, 0, 5, 1), admit=(admit(0, 9, 0, **how[0]), admit(1, 5, 10, **how[1])))
    for step in range(6):
        ahead.plan(Slice(0, 9 + step, 1, 1), Slice(1, 5 + step, 1, 1))
    ahead.collect()
    assert [ahead.outputs[0], ahead.outputs[1]] == wanted
    ids = ahead.runner.slots.ids
    assert ids[0, 9:14].tolist() == wanted[0][:5]  # what has been waited for before the last launch is settled
    assert ids[0, 15] == (-1 if not watched else wanted[0][6])


def test_a_token_does_not_follow_its_slot_to_the_next_sequence(llama: Any) -> None:
    """A sequence ends while its next token is under way, and its slot is given to another at once."""
    ahead = Ahead(device_runner(llama))
    ahead.plan(Slice(0, 0, 9, 1), admit=(admit(0, 9, 0, **GREEDY),))
    ahead.plan(Slice(0, 0, 5, 1), admit=(admit(0, 5, 10, **GREEDY),), release=(0,))
    ahead.plan(Slice(0, 5, 1, 1))
    ahead.collect()
    alone = Ahead(device_runner(llama))
    alone.plan(Slice(0, 0, 5, 1), admit=(admit(0, 5, 20, **GREEDY),))
    alone.plan(Slice(0, 5, 1, 1))
    alone.collect()
    assert ahead.outputs[0][1:] == alone.outputs[0]
    assert ahead.runner.slots.ids[0, :5].tolist() == prompt(5, seed=5)


def test_a_layer_is_pushed_when_it_is_queued(llama: Any) -> None:
    runner = device_runner(llama)
    push = Push(1, (0, (0, 0), 1), ("d", 1, ""), (0,), (5,), True)  # type: ignore[arg-type]
    told: list[tuple[int, Push]] = []
    plan = StepPlan(1, (), (admit(0, 9, 0),), (), (Slice(0, 0, 9, 1, push=push),))
    wait = runner.launch(plan, lambda layer, each: told.append((layer, each)))
    assert told == [(layer, push) for layer in range(runner.layers)]
    assert len(wait().sampled[0].ids) == 1


@pytest.mark.parametrize("most_rows", [1, 20, 120])
def test_warming_up_leaves_nothing_behind(
    llama: Any, drive: Callable[..., Any], make_sequence: Any, most_rows: int
) -> None:
    """Whether the largest step is no chunk at all, one, or several."""
    runner, told = device_runner(llama), list[float]()
    warm_up(runner, 2, most_rows, told.append)
    assert told[0] == 0.0 and told[-1] == 1.0 and told == sorted(told)
    assert not runner.slots.held
    outputs = []
    for each in (llama.runner(), runner):
        sequence = make_sequence(prompt(10, seed=2), Sampling(max_tokens=3, temperature=0.0))
        outputs.append(drive(llama, [sequence], runner=each)[0].output)
    assert outputs[0] == outputs[1]


def test_graphs_are_used_for_decode_steps_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = device_runner(llama, most_batch=2)
    assert isinstance(runner, Launcher)
    replayed = []
    for rows, graph in runner.graphs.graphs.items():
        again = graph.replay

        def replay(rows: int = rows, again: Callable[[], None] = again) -> None:
            replayed.append(rows)
            again()

        monkeypatch.setitem(runner.graphs.graphs, rows, type(graph)(graph.layout, graph.words, graph.tokens, replay))
    ahead = Ahead(runner)
    admits = tuple(admit(n, 4, 10 * n, **GREEDY) for n in range(3))
    ahead.plan(*(Slice(n, 0, 4, 1) for n in range(3)), admit=admits)
    ahead.plan(Slice(0, 4, 1, 1))
    ahead.plan(Slice(0, 5, 1, 1), Slice(1, 4, 1, 1))
    ahead.plan(Slice(0, 6, 1, 1), Slice(1, 5, 1, 1), Slice(2, 4, 1, 1))  # more than the largest graph
    ahead.collect()
    assert replayed == [1, 2]


def test_sizes_of_graphs() -> None:
    assert sizes_up_to(1) == [1]
    assert sizes_up_to(12) == [1, 2, 4, 8, 12]
    assert sizes_up_to(512)[-2:] == [480, 512]
    assert all(b <= max(2 * a, 1.51 * a) for a, b in zip(sizes_up_to(512), sizes_up_to(512)[1:], strict=False))


def test_weights_are_counted_as_they_will_lie_there(twin: Any) -> None:
    """Whatever they are stored in: the folders are in float32, tied heads have a copy of their own."""
    decoder = device_runner(twin, most_batch=1).decoder
    products = [each for layer in decoder.stack.layers for each in (layer.qkv, layer.out, layer.up, layer.down)]
    products += [each for each in (decoder.stack.project_in, decoder.project_out, decoder.head) if each is not None]
    wide = sum(each.weight.nbytes for each in products)
    assert weight_bytes(twin.folder, "float32") == wide + decoder.stack.embedding.nbytes
    assert weight_bytes(twin.folder, "bfloat16") == wide // 2 + decoder.stack.embedding.nbytes
