"""From times to coefficients: what was put in comes out, nothing falls below 0, errors are of steps not fitted."""

from __future__ import annotations

import numpy as np
import pytest
import typer
from cbdisagg_bench import profile
from cbdisagg_bench.profile_fit import errors, fit_steps, fit_transfers, nnls
from cbdisagg_bench.profile_host import measure_host
from cbdisagg_bench.profile_steps import REGIONS, Case, Range, decode, prefill, sweep, unseen
from hypothesis import given, settings
from hypothesis import strategies as st

from cbdisagg.actors.cores import Cores
from cbdisagg.config import Config
from cbdisagg.core.cost import CostModel

REACH = Range(batch=64, chunk=512, context=2048)
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


def test_the_steps_are_within_reach_and_of_every_region() -> None:
    for cases in (sweep(REACH), unseen(REACH, 40, seed=1)):
        assert {case.region for case in cases} == set(REGIONS)
        for case in cases:
            assert sum(part.decodes for part in case.work) <= REACH.batch
            assert sum(part.tokens for part in case.work if not part.decodes) <= REACH.chunk
    assert [case.work for case in unseen(REACH, 8, 1)] == [case.work for case in unseen(REACH, 8, 1)]
    tiny = Range(batch=2, chunk=3, context=8)
    for case in [*sweep(tiny), *unseen(tiny, 40, 0)]:
        assert all(part.tokens >= 1 and part.start + part.tokens <= tiny.context for part in case.work)
    assert prefill(3, 4).region == "prefill"


def test_the_host_s_share_grows_with_the_batch() -> None:
    host = measure_host(Config(), batches=(1, 32))
    assert host.step_s > 0 and host.token_s > 0 and host.event_s > 0 and host.request_s > 0


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
