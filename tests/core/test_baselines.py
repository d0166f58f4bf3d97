"""Static batches and reservations ahead of time, in a world where pages are looked into and anything is cancelled."""

from __future__ import annotations

from random import Random

import pytest
from core_world import END_ID, Setting, World, expected_output

from cbdisagg.config import Config, Kv, Policy, Scheduler, Workers
from cbdisagg.core.baselines import Allocator, Baseline, Batching
from cbdisagg.core.request import Request
from cbdisagg.messages import Address, Generate, RequestId, Route, Sampling, Targets, pack

NOWHERE = Address("", 0, "")
WAYS: list[tuple[Batching, Allocator]] = [
    ("static", "reserve-max"),
    ("static-global", "reserve-max"),
    ("continuous", "reserve-max"),
    ("continuous", "reserve-pow2"),
    ("continuous", "reserve-oracle"),
]


class ShortLived(Setting):
    """A third of the pool holds the longest sequence."""

    @property
    def max_len(self) -> int:
        return 12


def setting(batching: Batching, allocator: Allocator, draw: Random) -> Setting:
    roles = draw.choice([("any",), ("any", "any")])
    config = Config(
        workers=(Workers(role="any", count=len(roles)),),
        kv=Kv(prefix_cache=draw.random() < 0.5, allocator=allocator),
        scheduler=Scheduler(token_budget=draw.choice([4, 9, 64]), batching=batching),
        policy=Policy(mode="aggregate", suspect_s=1e9, silent_s=1e9),
    )
    return ShortLived(roles, config, pages=18, max_batch=4, plans_ahead=draw.randint(0, 1))


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("batching", "allocator"), WAYS)
def test_every_request_gets_its_tokens_and_every_page_comes_back(
    batching: Batching, allocator: Allocator, seed: int, leaves: bool
) -> None:
    """Also if a worker leaves, and its running requests move into batches of another."""
    draw = Random(seed)
    world = World(setting(batching, allocator, draw))
    world.settle()
    for number in range(10):
        if leaves and number == 6 and len(world.workers) > 1:
            world.workers[0].leave()
        prompt = [draw.randint(0, 3) for _ in range(draw.randint(1, 7))]
        sampling = Sampling(draw.randint(1, 9), end_ids=draw.choice([(), (END_ID,)]), seed=draw.randint(0, 2))
        world.api.submit(prompt, sampling, Targets(1.0, 0.1), None)
        for _ in range(draw.randint(0, 12)):
            actions = list(world.actions())
            if actions:
                draw.choice(actions)()
        if draw.random() < 0.3:
            world.api.cancel(draw.choice(world.api.streams))
    world.settle()
    world.check_quiet()
    for stream in world.api.streams:
        if stream.id.n not in world.api.cancelled:
            request = stream.request
            prompt = list(memoryview(request.prompt).cast("i"))
            assert list(stream.output) == expected_output(prompt, request.sampling, 12)


def request(prompt: int, output: int, max_tokens: int) -> Request:
    spec = Generate(
        RequestId(1, 1), 0, pack([1] * prompt), pack([1] * output), b"", b"", Sampling(max_tokens), Targets(1, 1), 0.0
    )
    return Request(1, spec, Route(NOWHERE, NOWHERE), 0.0, page_size=4, limit=prompt + max_tokens)


@pytest.mark.parametrize(
    ("allocator", "pages"),
    [
        ("paged", {8: 2, 9: 3, 13: 4, 17: 5}),
        ("reserve-max", {8: 10, 9: 10, 13: 10, 17: 10}),
        ("reserve-oracle", {8: 5, 9: 5, 13: 5, 17: 5}),
        ("reserve-pow2", {8: 3, 9: 3, 11: 3, 13: 4, 17: 6, 25: 10, 39: 10}),  # 8 + 1, 1, 4, 8, 16, 32 of at most 40
    ],
)
def test_pages_to_reserve(allocator: Allocator, pages: dict[int, int]) -> None:
    """A prompt of 8 tokens, 10 to come, pages of 4, sequences of at most 40."""
    reserve = Baseline(allocator=allocator, max_len=40).pages_to_reserve
    assert {tokens: reserve(request(8, tokens - 8, 10), tokens) for tokens in pages} == pages


def test_only_the_oracle_knows_how_long_a_request_will_be() -> None:
    for allocator in ("paged", "reserve-max", "reserve-pow2"):
        reserve = Baseline(allocator=allocator, max_len=40).pages_to_reserve  # type: ignore[arg-type]
        assert reserve(request(8, 0, 1), 8) == reserve(request(8, 0, 30), 8)
