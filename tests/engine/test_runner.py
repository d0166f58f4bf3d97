"""The runner's order of business: deltas, pushes, plans ahead, refusals; and that company changes nothing."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cbdisagg.config import ModelError
from cbdisagg.engine.build import build_runner, describe
from cbdisagg.engine.fake import FakeRunner, fake_token
from cbdisagg.messages import Address, Admit, AttemptId, Push, RequestId, Sampling, Slice, StepPlan, pack

PAGE, VOCAB = 8, 200
GREEDY = Sampling(max_tokens=50, temperature=0.0)


def plan(number: int = 0, **parts: Any) -> StepPlan:
    return StepPlan(number, **{"release": (), "admit": (), "grow": (), "slices": (), **parts})


def ignore(layer: int, push: Push) -> None:
    pass


def a_push(serial: int) -> Push:
    attempt = AttemptId(1, RequestId(2, serial), 0)
    return Push(serial, attempt, Address("d", 1, "ipc://d"), source=(3,), target=(4,), last=False)


def test_seeded_draws_do_not_depend_on_company(twin: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    """Alone, in one crowd, in another with other chunks, and admitted again half-way: the same tokens."""

    def sequence(output: tuple[int, ...] = ()) -> Any:
        sampling = Sampling(
            max_tokens=24, seed=2**63 + 5, temperature=0.9, top_p=0.95, presence_penalty=0.3, repetition_penalty=1.1
        )
        return make_sequence(list(range(11)), sampling, output=list(output))

    chance = random.Random(3)
    alone = drive(twin, [sequence()])[0].output
    assert len(set(alone)) > 3
    for n in range(3):
        crowd = [make_sequence([7] * (5 + k), Sampling(max_tokens=15, seed=k)) for k in range(1 + n)]
        served = drive(twin, [*crowd, sequence()], seed=n, chunk=lambda: chance.randint(1, 9))
        assert served[-1].output == alone
    assert drive(twin, [sequence(tuple(alone[:9]))])[0].output == alone


def test_end_ids_are_held_back_until_min_tokens(llama: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    free = drive(llama, [make_sequence([1, 2, 3], GREEDY)])[0].output
    held = Sampling(max_tokens=30, min_tokens=10, temperature=0.0, end_ids=(free[0], free[1]))
    output = drive(llama, [make_sequence([1, 2, 3], held)])[0].output
    assert not {*output[:10]} & {*held.end_ids}


def test_a_plan_may_name_a_token_that_the_host_has_not_seen(llama: Any) -> None:
    runner = llama.runner()
    runner.run(plan(1, admit=(Admit(0, pack([1, 2, 3]), b"", (5, 2), GREEDY),), slices=(Slice(0, 0, 3, 1),)), ignore)
    seen = [runner.run(plan(n, slices=(Slice(0, n + 1, 1, 1),)), ignore).sampled[0].ids[0] for n in range(2, 6)]
    assert seen == llama.greedy([1, 2, 3], 5)[0][1:]


def test_a_slot_starts_anew_after_release(llama: Any) -> None:
    runner = llama.runner()
    for ids in ([1, 2, 3, 4], [9, 8]):
        admit = Admit(2, pack(ids), b"", (), GREEDY)
        result = runner.run(plan(admit=(admit,), grow=((2, (7,)),), slices=(Slice(2, 0, len(ids), 1),)), ignore)
        assert list(result.sampled[0].ids) == llama.greedy(ids, 1)[0]
        runner.run(plan(release=(2,)), ignore)
    both = plan(1, admit=(Admit(0, pack([4]), b"", (1,), GREEDY),), slices=(Slice(0, 0, 1, 1),))
    runner.run(both, ignore)
    again = plan(2, release=(0,), admit=(Admit(0, pack([5]), b"", (1,), GREEDY),), slices=(Slice(0, 0, 1, 1),))
    assert list(runner.run(again, ignore).sampled[0].ids) == llama.greedy([5], 1)[0]


def test_an_empty_plan_and_a_chunk_without_a_draw_give_nothing(llama: Any) -> None:
    runner = llama.runner()
    assert runner.run(plan(4), ignore).sampled == ()
    admit = Admit(0, pack(range(20)), b"", (0, 1, 2), GREEDY)
    result = runner.run(plan(5, admit=(admit,), slices=(Slice(0, 0, 16, 0),)), ignore)
    assert (result.number, result.sampled[0].ids, result.seconds > 0) == (5, (), True)


def test_each_layer_is_pushed_once_its_pages_are_written(llama: Any) -> None:
    """At the call for a layer that layer's pages hold what they hold in the end."""
    runner = llama.runner()
    pool = runner.decoder.pool
    calls: list[tuple[int, int]] = []
    copies: list[torch.Tensor] = []

    def push(layer: int, each: Push) -> None:
        calls.append((layer, each.serial))
        copies.append(pool[layer, [3, 6]].clone())

    admits = tuple(Admit(n, pack(range(16)), b"", pages, GREEDY) for n, pages in enumerate(((3, 6), (4, 1), (0, 2))))
    slices = (Slice(0, 0, 16, 1, push=a_push(8)), Slice(1, 0, 1, 0), Slice(2, 0, 9, 0, push=a_push(9)))
    runner.run(plan(admit=admits, slices=slices), push)
    assert calls == [(layer, serial) for layer in range(runner.layers) for serial in (8, 9)]
    for (layer, _), copy in zip(calls, copies, strict=True):
        assert torch.equal(copy, pool[layer, [3, 6]])
        assert copy.count_nonzero() == copy.numel()


def test_pages_copied_to_another_pool_continue_there(llama: Any) -> None:
    """What a hand-over does: pages that one runner has written, moved to other numbers in another's pool."""
    prefill, decode = llama.runner(), llama.runner()
    prompt = list(range(30, 49))
    source, target = [5, 0, 9], [1, 7, 2]

    def push(layer: int, each: Push) -> None:
        decode.decoder.pool[layer, target] = prefill.decoder.pool[layer, source]

    admit = Admit(0, pack(prompt), b"", tuple(source), GREEDY)
    first = prefill.run(plan(admit=(admit,), slices=(Slice(0, 0, 19, 1, push=a_push(1)),)), push).sampled[0].ids
    moved = Admit(3, pack(prompt), pack(first), tuple(target), GREEDY)
    output = [*first]
    for n in range(5):
        step = plan(n, admit=(moved,) if n == 0 else (), slices=(Slice(3, 19 + n, 1, 1),))
        output += decode.run(step, ignore).sampled[0].ids
    assert output == llama.greedy(prompt, 6)[0]


@pytest.mark.parametrize("fake", [False, True])
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ({"slices": (Slice(0, 0, 0, 0),)}, "Slice"),
        ({"slices": (Slice(0, 3, 2, 1),)}, "Slice"),  # a token that is not there
        ({"slices": (Slice(0, 0, 2, 1),)}, "Slice"),  # draws in the middle
        (
            {"grow": (), "admit": (Admit(1, pack(range(9)), b"", (2,), GREEDY),), "slices": (Slice(1, 0, 9, 1),)},
            "pages",
        ),
        ({"admit": (Admit(0, pack([1]), b"", (2,), GREEDY),)}, "slot 0 is taken"),
    ],
)
def test_impossible_plans_are_refused(llama: Any, fake: bool, bad: dict[str, Any], why: str) -> None:
    runner = FakeRunner(page_size=PAGE) if fake else llama.runner()
    runner.run(plan(admit=(Admit(0, pack([1, 2, 3, 4]), b"", (1,), GREEDY),)), ignore)
    with pytest.raises(ValueError, match=why):
        runner.run(plan(**bad), ignore)
    with pytest.raises(KeyError):
        runner.run(plan(slices=(Slice(9, 0, 1, 0),)), ignore)


def test_fake_runner_is_a_pure_function_of_prompt_and_position() -> None:
    prompt = pack([1, 2, 3])
    sampling = Sampling(max_tokens=9, min_tokens=2, end_ids=tuple(range(0, 1000, 2)), logprobs=0, prompt_logprobs=0)
    expected = [fake_token(prompt, 3 + n, sampling) for n in range(6)]
    assert len(set(expected)) == 6
    assert expected[0] % 2 == expected[1] % 2 == 1
    for given in (0, 2, 5):
        runner = FakeRunner(layers=3, page_size=4)
        admit = Admit(0, prompt, pack(expected[:given]), (1, 2, 3), sampling)
        chunk = Slice(0, 0, 3 + given, 1, scores=True, push=a_push(1))
        pushed: list[int] = []
        result = runner.run(plan(7, admit=(admit,), slices=(chunk,)), lambda layer, _, to=pushed: to.append(layer))
        (sampled,) = result.sampled
        assert (result.number, sampled.ids, pushed) == (7, (expected[given],), [0, 1, 2])
        assert (len(sampled.logprobs), len(sampled.prompt_logprobs)) == (1, 2)


def test_a_pool_of_another_model_is_refused(llama: Any) -> None:
    info = describe(llama.folder, "float32")
    assert info.page_bytes(PAGE) == 2 * 2 * PAGE * 16 * 4
    memory = np.zeros((info.layers, 4, info.page_bytes(PAGE) // 2), np.uint8)
    with pytest.raises(ValueError, match="the model needs"):
        build_runner(llama.folder, "float32", memory, PAGE, 32, 1)


def test_more_tokens_than_the_model_sees_are_refused(llama: Any) -> None:
    info = describe(llama.folder, "float32")
    memory = np.zeros((info.layers, 4, info.page_bytes(PAGE)), np.uint8)
    with pytest.raises(ModelError, match=f"context is {info.context}"):
        build_runner(llama.folder, "float32", memory, PAGE, info.context + 1, 1)
