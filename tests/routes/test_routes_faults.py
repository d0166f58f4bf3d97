"""A stream does not change because a process dies under it, is suspected, or because its neighbours are cancelled.

What is killed here is killed by the test: its pool and sockets are gone in the middle of whatever it did.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from routes_fields import PROMPT, assert_same
from routes_models import PAGE, TinyModel, make_prompt
from routes_world import Answer, World

from cbdisagg.messages import Sampling

COUNT = 16
PROMPTS = [make_prompt(length, seed=20) for length in (129, 60, 2 * PAGE, 90, 33, 5)]

NewWorld = Callable[..., World]
Models = Callable[[str], TinyModel]
Alone = dict[str, tuple[Sampling, Answer]]


@pytest.fixture
def model(models: Models) -> TinyModel:
    return models("llama-gqa")


def submit_all(world: World) -> None:
    for prompt in PROMPTS:
        world.submit(prompt, Sampling(max_tokens=COUNT, temperature=0.0))


def check(model: TinyModel, answers: list[Answer]) -> None:
    for prompt, answer in zip(PROMPTS, answers, strict=True):
        expected = model.greedy(prompt, COUNT)
        assert expected.sure == COUNT, "choose another prompt: this one has a near tie"
        assert answer.ids == expected.ids, f"prompt of {len(prompt)}"


@pytest.mark.parametrize("kind", ["shm", "zmq"])
@pytest.mark.parametrize("layers", [0, 1, 3, 8])
def test_the_prefill_worker_dies_in_the_middle_of_a_push(
    model: TinyModel, new_world: NewWorld, kind: str, layers: int
) -> None:
    """Some layers of some pages have been written; the prompt is computed where they lie."""
    world = new_world(model, ["prefill", "decode"], kind=kind, token_budget=24)
    world.workers["prefill-0"].die_in = layers
    submit_all(world)
    check(model, world.run())
    assert "prefill-0" not in world.workers
    assert world.local_prefills("prefill-worker-lost") > 0


@pytest.mark.parametrize("kind", ["shm", "zmq"])
@pytest.mark.parametrize("seed", range(4))
def test_the_prefill_worker_dies_at_any_time_and_comes_back(
    model: TinyModel, new_world: NewWorld, kind: str, seed: int
) -> None:
    world = new_world(model, ["prefill", "decode"], kind=kind, token_budget=24, seed=seed)
    submit_all(world)
    for _ in range(random.Random(seed).randrange(120)):
        world.turn()
    world.kill("prefill-0")
    world.start_worker("prefill-0", "prefill")
    check(model, world.run())
    world.run_until(world.is_ready)
    before = world.pushes("prefill-0")
    world.submit(make_prompt(70, seed=21), Sampling(max_tokens=1 + COUNT, temperature=0.0))
    world.run()
    assert world.pushes("prefill-0") > before


@pytest.mark.parametrize("kind", ["shm", "zmq"])
@pytest.mark.parametrize("seed", range(4))
def test_a_suspect_goes_on_writing(model: TinyModel, new_world: NewWorld, kind: str, seed: int) -> None:
    """Its attempts are given up while it still pushes: what it writes must harm nobody, and it lets go in the end."""
    world = new_world(model, ["prefill", "decode"], kind=kind, token_budget=24, seed=seed, pages=60)
    decode = world.workers["decode-0"].core
    submit_all(world)
    world.run_until(lambda: any(job.job and job.job.pushed for job in world.workers["prefill-0"].core.jobs.values()))
    world.suspect("prefill-0")
    world.run_until(lambda: bool(decode.pages.quarantined))
    check(model, world.run())
    assert world.local_prefills("prefill-worker-lost") > 0


@pytest.mark.parametrize("kind", ["shm", "zmq"])
@pytest.mark.parametrize("roles", [["prefill", "decode", "decode"], ["any", "any"]], ids="-".join)
@pytest.mark.parametrize("seed", range(3))
def test_a_decode_worker_dies_and_its_streams_go_on_elsewhere(
    model: TinyModel, new_world: NewWorld, alone: Alone, kind: str, roles: list[str], seed: int
) -> None:
    """Resumed with the output that the client has: with every sampling field the rest is what it would have been."""
    world = new_world(model, roles, kind=kind, seed=seed)
    for sampling, _ in alone.values():
        world.submit(PROMPT, sampling)
    world.run_until(lambda: sum(len(stream.output) > 5 for stream in world.streams) > len(alone) // 2)
    world.kill(roles[-1] + "-0")
    for (name, (_, expected)), answer in zip(alone.items(), world.run(), strict=True):
        assert_same(answer, expected, name)
    assert world.api.client.resumed["worker"] > 0
    assert world.resumed_with_output > 0


def test_what_a_stream_has_left_in_a_cache_before_its_worker_died_does_not_count_as_cached(
    model: TinyModel, new_world: NewWorld
) -> None:
    """The prefill worker has the pages of the prompt, and goes on with the stream; its client paid for all of them."""
    world = new_world(model, ["prefill", "decode"])
    stream = world.submit(make_prompt(6 * PAGE, seed=22), Sampling(max_tokens=COUNT, temperature=0.0))
    world.run_until(lambda: bool(stream.output))
    world.kill("decode-0")
    (answer,) = world.run()
    assert world.total("prefix_hits") > 0
    assert (len(answer.ids), answer.cached_tokens) == (COUNT, 0)


@pytest.mark.parametrize("kind", ["shm", "zmq"])
@pytest.mark.parametrize("roles", [["any"], ["prefill", "decode"], ["any", "any"]], ids="-".join)
@pytest.mark.parametrize("seed", range(4))
def test_others_are_cancelled_at_any_time(
    model: TinyModel, new_world: NewWorld, kind: str, roles: list[str], seed: int
) -> None:
    """Queued, reserved, being prefilled or pushed, running: nothing of it stays, and the neighbours do not notice."""
    chance = random.Random(seed)
    world = new_world(model, roles, kind=kind, token_budget=24, seed=seed, pages=44, max_batch=6)
    submit_all(world)
    victims = [
        world.submit(make_prompt(length, seed=22), Sampling(max_tokens=40, temperature=0.0))
        for length in chance.choices(range(1, 120), k=8)
    ]
    for victim in chance.sample(victims, len(victims)):
        for _ in range(chance.randrange(60)):
            world.turn()
        victim.cancel("disconnect")
    answers = world.run()
    check(model, answers[: len(PROMPTS)])
