"""From times to coefficients: what was put in comes out, nothing falls below 0, errors are of steps not fitted."""

from __future__ import annotations

import os
from typing import cast

import numpy as np
import pytest
import typer
from cbdisagg_bench import profile
from cbdisagg_bench.profile_fit import errors, fit_steps, fit_transfers, nnls
from cbdisagg_bench.profile_host import measure_host
from cbdisagg_bench.profile_live import Spent, divided
from cbdisagg_bench.profile_neighbour import Neighbour, Pushes
from cbdisagg_bench.profile_steps import (
    LONG,
    REGIONS,
    SHORT,
    SMALL_BATCH,
    Case,
    Range,
    Stepper,
    decode,
    prefill,
    sweep,
    unseen,
)
from cbdisagg_bench.transfer import Geometry
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.progress import Progress

from cbdisagg.actors.cores import Cores
from cbdisagg.config import Config, Kv, Scheduler, Transfer
from cbdisagg.core.cost import CostModel
from cbdisagg.engine.build import ModelInfo

REACH = Range(batch=64, chunk=512, context=2048, pool=20_000)
TRUE = CostModel(
    h=0.01, h_mix=0.002, L=((1, 0.0), (16, 0.0), (512, 0.5)), a=2e-7, d=2e-6, t0=0.0, t_d=0.0, B=1.0, s=3e-4
)


def timed(cases: list[Case], noise: float = 0.0) -> list[Case]:
    random = np.random.default_rng(0)
    for case in cases:
        case.seconds = [TRUE.step_s(case.work) * (1 + noise * float(random.standard_normal())) for _ in range(3)]
    return cases


def test_what_was_put_in_comes_out() -> None:
    found = fit_steps(timed(sweep(REACH)))
    assert (found.h, found.h_mix, found.a, found.d, found.s) == pytest.approx(
        (TRUE.h, TRUE.h_mix, TRUE.a, TRUE.d, TRUE.s), rel=1e-5
    )
    assert dict(found.L)[512] == pytest.approx(0.5) and dict(found.L)[16] == pytest.approx(0.0, abs=1e-9)


def test_noise_is_averaged_and_errors_are_told_by_region() -> None:
    found = fit_steps(timed(sweep(REACH), noise=0.05))
    model = CostModel(found.h, found.h_mix, found.L, found.a, found.d, 0.0, 0.0, 1.0, found.s)
    told = errors(model, timed(unseen(REACH, 48, seed=3)))
    assert told.keys() == {*REGIONS, "all"} and told["all"].steps == 48
    assert 0 < told["all"].median < 0.05 and told["all"].p90 < 0.12
    wrong = CostModel(2 * TRUE.h, TRUE.h_mix, TRUE.L, TRUE.a, TRUE.d, 0.0, 0.0, 1.0, TRUE.s)
    off = errors(wrong, timed([decode([100])]))["decode small"]
    assert off.median == pytest.approx(TRUE.h / TRUE.step_s(decode([100]).work))


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 8), st.integers(1, 12))
def test_least_squares_without_negatives_are_least(seed: int, columns: int, rows: int) -> None:
    """At the solution no coefficient can grow, and none above 0 can change, to the better (Kuhn and Tucker)."""
    random = np.random.default_rng(seed)
    matrix, wanted = random.standard_normal((rows, columns)), random.standard_normal(rows)
    x = nnls(matrix, wanted)
    gradient = matrix.T @ (wanted - matrix @ x)
    assert (x >= 0).all()
    assert (gradient <= 1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0.0) <= 1e-6


def test_transfers_have_a_start_a_price_for_each_run_and_a_speed() -> None:
    timed_transfers = [
        (nbytes, runs, 1e-4 + 2e-6 * runs + nbytes / 8e9) for nbytes in (10**5, 10**7, 10**8) for runs in (1, 50)
    ]
    assert fit_transfers(timed_transfers) == pytest.approx((1e-4, 2e-6, 8e9), rel=1e-6)


def tokens(case: Case, *, decodes: bool) -> list[int]:
    return [part.start + part.tokens for part in case.work if part.decodes == decodes]


@pytest.mark.parametrize(
    "furthest",
    [
        REACH,
        Range(batch=256, chunk=2048, context=4096, pool=46_000),
        Range(batch=2, chunk=3, context=8, pool=16),
        Range(batch=64, chunk=512, context=512, pool=600),  # the whole batch never fits with more than a few tokens
    ],
)
def test_the_steps_go_as_far_as_they_may_and_are_of_every_region(furthest: Range) -> None:
    for cases in (sweep(furthest), unseen(furthest, 100, seed=1)):
        regions = set(REGIONS) if furthest.context > SHORT else set(REGIONS) - {LONG}
        assert {case.region for case in cases} >= (regions if furthest.batch > SMALL_BATCH else {"prefill", "mixed"})
        for case in cases:
            lengths = [*tokens(case, decodes=True), *tokens(case, decodes=False)]
            assert len(tokens(case, decodes=True)) <= furthest.batch
            assert sum(part.tokens for part in case.work if not part.decodes) <= furthest.chunk
            assert max(lengths) <= furthest.context and sum(lengths) <= furthest.pool
            assert all(part.tokens >= 1 and part.start >= 0 for part in case.work)
    swept = sweep(furthest)
    assert max(part.tokens for case in swept for part in case.work) == furthest.chunk
    assert max(length for case in swept for length in tokens(case, decodes=False)) == furthest.context
    assert [case.work for case in unseen(furthest, 8, 1)] == [case.work for case in unseen(furthest, 8, 1)]
    assert prefill(3, 4).region == "prefill" and prefill(SHORT, 4).region == LONG


def test_the_config_says_how_far_steps_go() -> None:
    info = ModelInfo("llama", "bfloat16", 30, 3, 64, 49_152, 8192, "", "torch")
    found = profile.reach(Config(), info, 0)
    assert found == Range(64, 512, 4096, (512 << 20) // 368_640 * 16)
    large = Config(kv=Kv(pages=200, page_size=32), scheduler=Scheduler(max_batch=256, token_budget=2048))
    assert profile.reach(large, info, 0) == Range(256, 2048, 4096, 6400)
    assert profile.reach(large, info, 1000) == Range(256, 1000, 1000, 6400)
    with pytest.raises(typer.BadParameter, match="the config allows 6400 tokens"):
        profile.reach(large, info, 6401)


@pytest.mark.parametrize(("kind", "measured"), [("auto", "shm"), ("shm", "shm"), ("zmq", "zmq")])
def test_pages_of_the_model_s_size_go_the_config_s_way(
    monkeypatch: pytest.MonkeyPatch, kind: str, measured: str
) -> None:
    assert profile.transfer_kind(Config(transfer=Transfer(kind=kind))) == measured  # type: ignore[arg-type]
    asked: list[tuple[str, int, Geometry]] = []

    class Recorded:
        def __init__(self, kind: str, pages: int, geometry: Geometry) -> None:
            asked.append((kind, pages, geometry))

        def __enter__(self) -> Recorded:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def hand_over(self, pages: tuple[int, ...]) -> float:
            return 1e-3 * len(pages)

    monkeypatch.setattr(profile, "Pair", Recorded)
    geometry = Geometry(2, 512, 8)
    timed = profile._time_transfers(measured, geometry, Progress(disable=True))
    assert asked == [(measured, 128, geometry)]
    assert {nbytes for nbytes, _, _ in timed} == {2 * 512 * count for count in profile.TRANSFER_PAGES}


def test_a_neighbour_s_part_is_what_steps_take_longer_beside_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other process is played by a flag, the steps by a clock that it slows."""
    busy = [False]

    class Played:
        def __init__(self, task: object) -> None: ...

        def __enter__(self) -> Played:
            return self

        def __exit__(self, *_: object) -> None: ...

        def busy(self) -> None:
            busy[0] = True

        def idle(self) -> None:
            busy[0] = False

    class Slowed:
        def measure(self, cases: list[Case], rounds: int) -> list[Case]:
            for case in cases:
                case.seconds.append(0.013 if busy[0] else 0.010)
            return cases

    monkeypatch.setattr(profile, "Neighbour", Played)
    works, stepper, bar = [decode([4])], cast(Stepper, Slowed()), Progress(disable=True)
    pushes = Pushes("shm", Geometry(2, 512, 8), (1,), (0,))
    assert profile._slowed(stepper, works, pushes, "", bar) == pytest.approx(0.3)
    assert not works[0].seconds  # what is fitted is not mixed with it
    assert profile._slowed(stepper, works, replace(pushes, cores=()), "", bar) == 0.0


def test_a_neighbour_pushes_pages_until_its_input_ends() -> None:
    cores = tuple(sorted(os.sched_getaffinity(0)))
    with Neighbour(Pushes("zmq", Geometry(2, 512, 8), cores, cores)) as neighbour:
        neighbour.busy()
        neighbour.idle()
        process = neighbour._process
    assert process.returncode == 0


def test_the_host_s_share_grows_with_the_batch() -> None:
    event_s, step_s, token_s, request_s = measure_host(Config(), batches=(1, 32))
    assert step_s > 0 and token_s > 0 and event_s > 0 and request_s > 0


@given(st.tuples(*[st.floats(1e-4, 1e-2)] * 3))
def test_what_others_compute_is_divided_among_messages_tokens_and_requests(costs: tuple[float, float, float]) -> None:
    counts = [(24, 24, 24), (310, 300, 1), (160, 1200, 8)]
    loads = [Spent(*count, sum(n * each for n, each in zip(count, costs, strict=True))) for count in counts]
    assert divided(loads) == pytest.approx(costs, rel=1e-3)


@pytest.mark.parametrize(
    ("cores", "threads", "workers", "own", "beside"),
    [
        (Cores((0, 1), 2), 0, 2, (0,), (1,)),
        (Cores((0, 1), 2), 0, 1, (0, 1), ()),  # no room for another: it may use all cores
        (Cores((2, 3, 6, 7), 4), 2, 1, (2, 3), (6, 7)),
        (Cores(tuple(range(64)), 2), 1, 1, tuple(range(64)), tuple(range(64))),  # others use them too
    ],
)
def test_what_is_measured_sits_as_serve_would_have_it(
    monkeypatch: pytest.MonkeyPatch,
    cores: Cores,
    threads: int,
    workers: int,
    own: tuple[int, ...],
    beside: tuple[int, ...],
) -> None:
    monkeypatch.setattr(profile, "usable_cores", lambda: cores)
    place = profile.seat(threads, workers)
    assert (place.own, place.beside) == (own, beside)
    with pytest.raises(typer.BadParameter, match="this machine has"):
        profile.seat(65, 1)
