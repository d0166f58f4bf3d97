"""The spine: in float32 every route gives the tokens of `transformers.generate`, greedy, one by one.

One worker, a hand-over by shm or zmq, several workers of each kind, workers that serve each other, pools so small that
sequences are preempted, prefixes that are cached already, steps of one kind only, chunks that end anywhere: all equal.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from routes_models import CONTEXT, PAGE, TinyModel, make_prompt
from routes_world import Answer, World

from cbdisagg.messages import Sampling

BUDGET = 64
COUNT = 20
LENGTHS = (1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE - 1, 2 * PAGE, 2 * PAGE + 1, 40, 63, 64, 65, 100, 129)
"""Around pages and around the 64 tokens of a step."""
PROMPTS = [make_prompt(length) for length in LENGTHS]
SMALLEST = CONTEXT // PAGE
"""Pages of the smallest pool that holds a sequence of full length."""

NewWorld = Callable[..., World]
Models = Callable[[str], TinyModel]


def greedy(count: int = COUNT) -> Sampling:
    return Sampling(max_tokens=count, temperature=0.0)


def check(model: TinyModel, prompts: Sequence[list[int]], answers: Sequence[Answer], count: int = COUNT) -> None:
    """Equal up to the first token whose two best logits nearly tied; more than 2 % of such ends fail."""
    cut = 0
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = model.greedy(prompt, min(count, CONTEXT - len(prompt)))
        assert answer.ids[: expected.sure] == expected.ids[: expected.sure], f"prompt of {len(prompt)}"
        assert (len(answer.ids), answer.reason) == (len(expected.ids), "length")
        cut += answer.ids != expected.ids
    assert cut <= 0.02 * len(prompts)


def serve(world: World, prompts: Sequence[list[int]], count: int = COUNT) -> list[Answer]:
    for prompt in prompts:
        world.submit(prompt, greedy(count))
    return world.run()


# ------------------------------------------------------------------------------------------------------- routes


def test_one_worker(model: TinyModel, new_world: NewWorld) -> None:
    world = new_world(model, ["any"])
    check(model, PROMPTS, serve(world, PROMPTS))
    assert world.total("preemptions") == world.total("prefix_hits") == 0


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_one_prefill_and_one_decode_worker(model: TinyModel, new_world: NewWorld, kind: str) -> None:
    world = new_world(model, ["prefill", "decode"], kind=kind)
    check(model, PROMPTS, serve(world, PROMPTS))
    assert world.pushes("prefill-0") >= len(PROMPTS)
    assert world.worker("decode-0").core.reporter.prompt_tokens == 0


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_two_prefill_and_two_decode_workers(model: TinyModel, new_world: NewWorld, kind: str) -> None:
    world = new_world(model, ["prefill", "prefill", "decode", "decode"], kind=kind)
    check(model, PROMPTS, serve(world, PROMPTS))
    assert all(world.pushes(f"prefill-{n}") for n in range(2))
    assert all(world.worker(f"decode-{n}").core.reporter.generated_tokens for n in range(2))


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_two_workers_that_prefill_for_each_other(model: TinyModel, new_world: NewWorld, kind: str) -> None:
    """Steps of both hold pieces of prompts for the other beside their own sequences."""
    world = new_world(model, ["any", "any"], kind=kind)
    check(model, PROMPTS, serve(world, PROMPTS))
    assert all(world.pushes(f"any-{n}") for n in range(2))
    assert all(world.worker(f"any-{n}").core.reporter.generated_tokens for n in range(2))


@pytest.mark.parametrize("seed", range(1, 4))
def test_interleavings(models: Models, new_world: NewWorld, seed: int) -> None:
    model = models("llama-gqa")
    world = new_world(model, ["prefill", "any", "decode"], seed=seed, max_batch=4, token_budget=24)
    check(model, PROMPTS, serve(world, PROMPTS))


def test_the_policy_chooses(model: TinyModel, new_world: NewWorld) -> None:
    """Mode auto: some prompts stay local, some are handed over."""
    world = new_world(model, ["prefill", "decode"], mode="auto")
    check(model, PROMPTS, serve(world, PROMPTS))
    assert {kind for kind, _ in world.coordinator.core.decisions} == {"local", "remote"}


# -------------------------------------------------------------------------------------------------------- steps


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"], ["any", "any"]], ids="-".join)
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "separate"])
@pytest.mark.parametrize("budget", [13, 37])
def test_chunks_of_odd_lengths(models: Models, new_world: NewWorld, roles: list[str], mixed: bool, budget: int) -> None:
    """The edges of chunks fall anywhere in pages, with and without decodes in the same step."""
    model = models("llama-gqa")
    world = new_world(model, roles, mixed=mixed, token_budget=budget)
    prompts = PROMPTS + [make_prompt(length) for length in (budget - 1, budget, budget + 1, 2 * budget)]
    check(model, prompts, serve(world, prompts))


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"]], ids="-".join)
def test_separate_steps(model: TinyModel, new_world: NewWorld, roles: list[str]) -> None:
    world = new_world(model, roles, mixed=False)
    check(model, PROMPTS, serve(world, PROMPTS))


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"]], ids="-".join)
@pytest.mark.parametrize("pages", [320, SMALLEST])
def test_full_context(model: TinyModel, new_world: NewWorld, roles: list[str], pages: int) -> None:
    """To the last position of the context: from one token on, and with room for one token only."""
    world = new_world(model, roles, pages=pages)
    prompts = [make_prompt(length) for length in (1, CONTEXT - PAGE, CONTEXT - 2, CONTEXT - 1)]
    check(model, prompts, serve(world, prompts, CONTEXT), CONTEXT)


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"]], ids="-".join)
def test_a_prompt_beyond_the_context_is_refused(models: Models, new_world: NewWorld, roles: list[str]) -> None:
    world = new_world(models("opt"), roles)
    stream = world.submit(make_prompt(CONTEXT), greedy())
    world.run_until(lambda: stream.ended)
    world.settle()
    assert len(stream.output) == 0


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"], ["any", "any"]], ids="-".join)
def test_one_token(model: TinyModel, new_world: NewWorld, roles: list[str]) -> None:
    world = new_world(model, roles)
    check(model, PROMPTS, serve(world, PROMPTS, 1), 1)


# -------------------------------------------------------------------------------------------------- small pools

CROWD = [make_prompt(length, seed=1) for length in (30, 41, 50, 9, 62, 17, 33, 24, 70, 12)]
LONG = 40
"""So many tokens make each of the crowd grow by five pages: not all that are let in can stay."""
ORDERS = 8
"""Of events, each by another seed. Pushes take their own time, so that no seed makes sure what happens."""


def serve_in_orders(
    model: TinyModel, prompts: Sequence[list[int]], make: Callable[[int], World], counts: Callable[[World], list[int]]
) -> None:
    """All answers are right in every order; in as many as it takes, each of `counts` has gone up."""
    seen: list[int] = []
    for seed in range(ORDERS):
        world = make(seed)
        check(model, prompts, serve(world, prompts, LONG), LONG)
        seen = [sum(both) for both in itertools.zip_longest(seen, counts(world), fillvalue=0)]
        if all(seen):
            break
    assert all(seen)


def test_preemption_on_one_worker(model: TinyModel, new_world: NewWorld) -> None:
    world = new_world(model, ["any"], pages=SMALLEST)
    check(model, CROWD, serve(world, CROWD, LONG), LONG)
    assert world.total("preemptions") > 0


@pytest.mark.parametrize("kind", ["shm", "zmq"])
def test_preemption_on_the_decode_worker(model: TinyModel, new_world: NewWorld, kind: str) -> None:
    """What is preempted is handed over anew, with its output, unless it is short enough to compute where it is."""
    serve_in_orders(
        model,
        CROWD,
        lambda seed: new_world(model, ["prefill", "decode"], kind=kind, pages=SMALLEST, seed=seed),
        lambda world: [world.worker("decode-0").core.reporter.preemptions, world.jobs_with_output],
    )


CROWD_OF_TWO = CROWD + [make_prompt(length, seed=9) for length in (90, 22, 100, 57, 11, 66, 28, 39)]


@pytest.mark.parametrize("kind", ["shm", "zmq"])
@pytest.mark.parametrize("budget", [10, 16, 64])
def test_preemption_on_both_sides(models: Models, new_world: NewWorld, kind: str, budget: int) -> None:
    """Both workers decode and prefill for each other, and neither has room: they preempt, decline, hand over anew."""
    model = models("llama-gqa")
    serve_in_orders(
        model,
        CROWD_OF_TWO,
        lambda seed: new_world(model, ["any", "any"], kind=kind, pages=SMALLEST, token_budget=budget, seed=seed),
        lambda world: [
            *(worker.core.reporter.preemptions for worker in world.workers.values()),
            world.local_prefills("declined"),
            world.jobs_with_output,
        ],
    )


# ----------------------------------------------------------------------------------------------------- prefixes

STEM = make_prompt(10 * PAGE, seed=2)
BRANCHES = [
    *(STEM + make_prompt(length, seed=3) for length in (1, PAGE - 1, PAGE, 5 * PAGE + 3, 7 * PAGE)),
    STEM[: 4 * PAGE],
    STEM[: 4 * PAGE + 1],
    STEM[: 9 * PAGE + 3] + make_prompt(20, seed=4),
    STEM[3 * PAGE :],
]
"""What they share with the stem, in pages, is in SHARED; the last has pages of it, but after other tokens."""
SHARED = (10, 10, 10, 10, 10, 3, 4, 9, 0)


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"], ["any", "any"]], ids="-".join)
def test_cached_prefixes(model: TinyModel, new_world: NewWorld, roles: list[str]) -> None:
    world = new_world(model, roles)
    serve(world, [STEM])
    answers = serve(world, BRANCHES)
    check(model, BRANCHES, answers)
    if len(roles) == 1:
        assert [answer.cached_tokens for answer in answers] == [pages * PAGE for pages in SHARED]
    assert world.total("prefix_hits") > 0


def test_a_hit_is_never_written_by_the_prefill_worker(model: TinyModel, new_world: NewWorld) -> None:
    """The decode worker has the stem; only what follows is computed elsewhere and pushed behind it."""
    world = new_world(model, ["prefill", "decode"])
    serve(world, [STEM])
    before = world.transfer_bytes
    branch = STEM + make_prompt(6 * PAGE, seed=5)
    (answer,) = serve(world, [branch])
    check(model, [branch], [answer])
    assert answer.cached_tokens == len(STEM)
    decode = world.worker("decode-0").core
    assert (world.transfer_bytes - before) == 6 * decode.info.pool.layers * decode.info.pool.page_bytes
    assert decode.reporter.prompt_tokens == 0


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"]], ids="-".join)
def test_what_was_said_is_a_prefix_too(model: TinyModel, new_world: NewWorld, roles: list[str]) -> None:
    """A second turn: prompt, answer and more. The answer's pages were decoded, not prefilled."""
    world = new_world(model, roles)
    first = make_prompt(3 * PAGE + 5, seed=6)
    (answer,) = serve(world, [first], 3 * PAGE)
    second = [*first, *answer.ids, *make_prompt(5, seed=7)]
    (again,) = serve(world, [second])
    check(model, [second], [again])
    assert again.cached_tokens == 6 * PAGE


@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"], ["prefill", "decode", "decode"]], ids="-".join)
def test_siblings_join_the_prefix_of_the_first(model: TinyModel, new_world: NewWorld, roles: list[str]) -> None:
    world = new_world(model, roles)
    prompt = make_prompt(12 * PAGE + 1, seed=8)
    first = world.submit(prompt, greedy())
    for _ in range(3):
        world.submit(prompt, greedy(), group=first.id)
    answers = world.run()
    check(model, [prompt] * 4, answers)
    assert sorted(answer.cached_tokens for answer in answers)[1:] == [12 * PAGE] * 3


def test_small_pools_and_shared_prefixes(models: Models, new_world: NewWorld) -> None:
    """Cached pages are evicted, pinned, and computed again while sequences are preempted around them."""
    model = models("llama-gqa")
    for seed in range(4):
        world = new_world(model, ["any", "any"], pages=SMALLEST + 4, seed=seed)
        for _ in range(2):
            check(model, BRANCHES, serve(world, BRANCHES))
        assert world.total("preemptions") > 0
        assert world.total("prefix_hits") > 0
