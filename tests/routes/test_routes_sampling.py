"""Every sampling field gives on every route what one worker gives that has nothing else to do."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from routes_fields import COUNT, DRAWN, GREEDY, NAMES, PROMPT, assert_same, make_fields
from routes_models import CONTEXT, PAGE, TinyModel, make_prompt
from routes_world import Answer, World

from cbdisagg.messages import Sampling

NewWorld = Callable[..., World]
Models = Callable[[str], TinyModel]
Alone = dict[str, tuple[Sampling, Answer]]


def test_every_field_matters(alone: Alone) -> None:
    """A field that nobody read would be equal on all routes too."""
    plain = {sampling.temperature > 0: answer for sampling, answer in (alone["greedy"], alone["drawn"])}
    ended_alike = ("logprobs", "prompt_logprobs")
    for name in NAMES:
        sampling, answer = alone[name]
        same = answer.ids == plain[sampling.temperature > 0].ids
        assert same == (name in ended_alike), name
    assert all(len(entry.top_ids) == 20 for entry in alone["logprobs"][1].logprobs)
    scores = alone["prompt_logprobs"][1].prompt_logprobs
    assert scores[0] is None
    assert [len(entry.top_ids) for entry in scores[1:] if entry is not None] == [5] * (len(PROMPT) - 1)
    assert {alone[name][1].reason for name in ("end_ids", "min_tokens")} == {"stop"}
    assert 18 <= len(alone["min_tokens"][1].ids) < COUNT


@pytest.mark.parametrize("roles", [["prefill", "decode"], ["any", "any"]], ids="-".join)
@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_across_a_hand_over(models: Models, new_world: NewWorld, alone: Alone, roles: list[str], kind: str) -> None:
    world = new_world(models("llama-gqa"), roles, kind=kind, token_budget=24, prefix_cache=False)
    for sampling, _ in alone.values():
        world.submit(PROMPT, sampling)
    for (name, (_, expected)), answer in zip(alone.items(), world.run(), strict=True):
        assert_same(answer, expected, name)
    assert sum(world.pushes(worker) for worker in world.workers) >= len(alone)


def test_in_company_and_with_cached_prefixes(models: Models, new_world: NewWorld, alone: Alone) -> None:
    """All have one prompt: they join its pages, unless its scores are wanted, which nobody has kept."""
    world = new_world(models("llama-gqa"), ["any"])
    for sampling, _ in alone.values():
        world.submit(PROMPT, sampling)
    answers = world.run()
    for (name, (sampling, expected)), answer in zip(alone.items(), answers, strict=True):
        assert_same(answer, expected, name)
        assert answer.cached_tokens == 0 or sampling.prompt_logprobs < 0, name
    assert sum(answer.cached_tokens > 0 for answer in answers) == len(alone) - 3


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"]], ids="-".join)
@pytest.mark.parametrize("name", NAMES)
def test_across_a_preemption(models: Models, new_world: NewWorld, alone: Alone, name: str, roles: list[str]) -> None:
    """An older sequence needs the pages; what comes back has its output counted as output, not as prompt."""
    sampling, expected = alone[name]
    world = new_world(models("llama-gqa"), roles, pages=CONTEXT // PAGE, prefix_cache=False)
    world.submit(make_prompt(100, seed=12), Sampling(max_tokens=CONTEXT - 100, temperature=0.0))
    world.run_until(lambda: len(world.streams[0].output) > 0)
    world.submit(PROMPT, sampling)
    answer = world.run()[1]
    assert_same(answer, expected, name)
    assert answer.preemptions > 0
    assert (world.jobs_with_output > 0) == (len(roles) == 2)


def test_a_preemption_in_the_middle_of_the_prompt(models: Models, new_world: NewWorld, alone: Alone) -> None:
    """Some scores of the prompt were there already: all are computed again, and told once."""
    sampling, expected = alone["prompt_logprobs"]
    world = new_world(
        models("llama-gqa"), ["any"], pages=CONTEXT // PAGE, prefix_cache=False, token_budget=3, max_batch=2
    )
    world.submit(make_prompt(106, seed=12), Sampling(max_tokens=CONTEXT - 106, temperature=0.0))
    world.run_until(lambda: len(world.streams[0].output) > 0)
    world.submit(PROMPT, sampling)
    world.run_until(lambda: world.total("preemptions") > 0)
    assert len(world.streams[1].output) == 0
    assert_same(world.run()[1], expected, "prompt_logprobs")


def test_opt_across_a_hand_over_and_preemptions(models: Models, new_world: NewWorld) -> None:
    """The same for the other family, all fields in one crowd."""
    model = models("opt")
    one = new_world(model, ["any"], max_batch=1, prefix_cache=False)
    one.submit(PROMPT, DRAWN)
    (drawn,) = one.run()
    fields = {"greedy": GREEDY, "drawn": DRAWN, **make_fields(drawn.ids)}
    answers = []
    for world in (one, new_world(model, ["prefill", "decode"], pages=CONTEXT // PAGE + 8)):
        for sampling in fields.values():
            world.submit(PROMPT, sampling)
        answers.append(world.run())
    for name, expected, answer in zip(fields, *answers, strict=True):
        assert_same(answer, expected, name)
    assert world.total("preemptions") > 0
