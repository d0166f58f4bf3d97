"""The formulas of the cost model, on numbers that can be worked out by hand."""

from __future__ import annotations

import pytest

from cbdisagg.core.cost import CostModel, Work

MODEL = CostModel(h=1.0, h_mix=0.5, L=((1, 2.0), (16, 2.0), (32, 4.0)), a=0.001, d=0.01, t0=0.1, t_d=0.01, B=100.0)


@pytest.mark.parametrize(("tokens", "seconds"), [(1, 2.0), (7, 2.0), (16, 2.0), (24, 3.0), (32, 4.0), (48, 6.0)])
def test_the_linear_part_goes_through_its_points_and_on(tokens: int, seconds: float) -> None:
    assert MODEL.linear_s(tokens) == pytest.approx(seconds)


def test_a_decode_step_pays_for_context() -> None:
    assert MODEL.step_s([Work(9, 1, True), Work(19, 1, True)]) == pytest.approx(1 + 2 + 0.01 * 30)


def test_a_chunk_pays_for_the_squares_that_it_adds() -> None:
    assert MODEL.step_s([Work(10, 22, False)]) == pytest.approx(1 + 2.75 + 0.001 * (32**2 - 10**2))


def test_only_a_mixed_step_pays_for_mixing() -> None:
    decode, chunk = [Work(9, 1, True)], [Work(0, 15, False)]
    both = MODEL.step_s([*decode, *chunk])
    assert both == pytest.approx(1 + 0.5 + 2 + 0.1 + 0.001 * 225)


def test_an_empty_step_costs_nothing() -> None:
    assert MODEL.step_s([]) == 0.0


def test_a_single_point_scales() -> None:
    model = CostModel(h=0, h_mix=0, L=((10, 1.0),), a=0, d=0, t0=0, t_d=0, B=1)
    assert model.linear_s(25) == pytest.approx(2.5)


def test_a_transfer_is_hidden_behind_all_layers_but_the_last() -> None:
    whole = MODEL.transfer_s(1000, 3)
    assert whole == pytest.approx(0.1 + 0.03 + 10)
    assert MODEL.exposed_transfer_s(1000, 100.0, 10, 3) == pytest.approx(1.0)
    assert MODEL.exposed_transfer_s(1000, 5.0, 10, 3) == pytest.approx(whole - 4.5 + 1.0)
