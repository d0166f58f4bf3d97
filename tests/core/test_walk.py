"""Every state that small worlds can reach is a good one, and every run in them ends well."""

from __future__ import annotations

import pytest
from walk import Scenario, Walk
from walk_scenarios import LARGE, SCENARIOS


def _walk(scenario: Scenario) -> None:
    walk = Walk(scenario)
    walk.run()
    print(f"{scenario.name}: {walk.states:,} states, {walk.steps:,} steps, {walk.ends} ends")
    assert walk.states >= scenario.floor, "it has stopped early"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
def test_every_reachable_state_is_good(scenario: Scenario) -> None:
    _walk(scenario)


@pytest.mark.slow
@pytest.mark.parametrize("scenario", LARGE, ids=lambda scenario: scenario.name)
def test_every_reachable_state_of_a_larger_world_is_good(scenario: Scenario) -> None:
    _walk(scenario)
