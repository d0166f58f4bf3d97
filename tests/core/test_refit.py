"""The cost model that a worker fits to its own steps: it finds the true one, in spite of noise, and forgets the old."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdisagg.core.cost import NOTHING, CostModel, Sums
from cbdisagg.core.refit import Refit
from cbdisagg.messages import COARSE, ERROR_BOUNDS, Costs

LAPTOP = CostModel(0.001, 0.002, ((1, 0.006), (16, 0.008), (64, 0.03), (512, 0.22)), 2e-9, 1e-7, 1e-3, 0, 1e9, 2e-4)
FASTER = CostModel(0.001, 0.0, ((1, 0.003), (16, 0.004), (64, 0.015), (512, 0.11)), 1e-9, 1e-7, 1e-3, 0, 1e9, 1e-4)


def a_step(random: Random) -> Sums:
    streams = random.choice([0, 1, 2, 4, 8, 16])
    chunk = random.choice([0, 0, 16, 64, 200, 500]) if streams else random.choice([64, 200, 512])
    step = NOTHING.rows(streams, streams * random.randrange(50, 800)) if streams else NOTHING
    return step.chunk(random.choice([0, 100, 500]), chunk) if chunk else step


def median_error(refit: Refit, true: CostModel, random: Random) -> float:
    steps = [a_step(random) for _ in range(101)]
    return sorted(abs(refit.model.sums_s(step) / true.sums_s(step) - 1) for step in steps)[50]


def run(refit: Refit, true: CostModel, steps: int, random: Random, noise: float = 0.03) -> None:
    """Each step takes as long as it should, but for some noise; one in 30 takes three times as long."""
    for _ in range(steps):
        step = a_step(random)
        late = 3 if random.random() < 1 / 30 else 1
        refit.observe(step, true.sums_s(step) * (1 + noise * random.gauss(0, 1)) * late)


@pytest.mark.parametrize(("start", "steps", "most"), [(COARSE, 200, 0.05), (LAPTOP, 50, 0.03), (FASTER, 600, 0.05)])
def test_it_learns_what_steps_cost(start: Costs, steps: int, most: float) -> None:
    random = Random(3)
    refit = Refit(start)
    run(refit, LAPTOP, steps, random)
    assert median_error(refit, LAPTOP, random) < most


def test_it_follows_a_machine_that_changes() -> None:
    random = Random(4)
    refit = Refit(COARSE)
    run(refit, FASTER, 1000, random)
    assert median_error(refit, LAPTOP, random) > 0.3
    run(refit, LAPTOP, 1500, random)
    assert median_error(refit, LAPTOP, random) < 0.08


def test_a_step_that_somebody_has_disturbed_changes_little() -> None:
    refit = Refit(LAPTOP)
    step = NOTHING.rows(4, 800)
    before = refit.model.sums_s(step)
    refit.observe(step, 100 * before)
    assert refit.model.sums_s(step) < 1.3 * before


def test_errors_are_counted_by_how_far_off_the_prediction_was() -> None:
    refit = Refit(LAPTOP)
    step = NOTHING.rows(4, 800)
    true = LAPTOP.sums_s(step)
    for seconds in (true, true / 1.04, true / 9):
        refit.observe(step, seconds)
    assert sum(refit.errors) == 3
    assert refit.errors[0] == refit.errors[ERROR_BOUNDS.index(0.05)] == refit.errors[-1] == 1
    assert refit.error_sum == pytest.approx(0 + 0.04 + 8, rel=0.05)
    refit.observe(NOTHING, 0.01)
    refit.observe(step, 0.0)
    assert sum(refit.errors) == 3, "nothing to learn from"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 600), st.floats(1e-4, 10)), min_size=1, max_size=60))
def test_no_coefficient_falls_below_zero(seen: list[tuple[int, int, float]]) -> None:
    """Whatever steps are said to have taken: a longer step is never predicted to be shorter."""
    refit = Refit(COARSE)
    for streams, chunk, seconds in seen:
        refit.observe(NOTHING.rows(streams, 100 * streams).chunk(0, chunk), seconds)
    model = refit.model
    assert min(model.h, model.h_mix, model.a, model.d, model.s) >= 0
    assert all(sooner <= later for (_, sooner), (_, later) in zip(model.L, model.L[1:], strict=False))
