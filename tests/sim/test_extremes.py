"""One family of policies: over whole runs its ends are aggregation and pure disaggregation, event by event."""

from __future__ import annotations

from typing import Any

import pytest
from sim_world import config, costs

from cbdisagg.config import Scheduler
from cbdisagg.core.effects import RunStep
from cbdisagg.core.knobs import NEVER_MIX
from cbdisagg.messages import StepPlan
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.simulation import Outcome, simulate
from cbdisagg.sim.variants import AGGREGATE, Values, changed, disaggregate

DRAWN = make_workload(120, 60.0, Lengths(150, "exponential", 600), Lengths(20, "exponential", 80), 2)
ASKS = [ask for ask in DRAWN if min(ask.length, ask.output_tokens) > 1]
"""With one token there is only one phase, and nothing to hand over."""
APART = {"policy.rho": 0.0, "policy.eta": NEVER_MIX, "policy.pin_prefill": 1, "policy.pin_decode": 2}


class Recorded:
    """All events with their effects, and the plans of each worker."""

    def __init__(self, values: Values) -> None:
        self.events: list[tuple[str, float, Any, Any]] = []
        self.plans: dict[str, list[StepPlan]] = {}
        service = changed(config("any", "any", "any", scheduler=Scheduler(max_batch=16, token_budget=64)), values)
        self.outcome: Outcome = simulate(service, costs(), ASKS, observer=self._see)

    def _see(self, process: Any, now: float, event: Any, effects: Any) -> None:
        self.events.append((process.address.name, now, event, list(effects)))
        plans = [effect.plan for effect in effects if isinstance(effect, RunStep)]
        self.plans.setdefault(process.address.name, []).extend(plans)


@pytest.mark.parametrize(
    ("mode", "knobs"),
    [(AGGREGATE, {"policy.rho": 0.0, "policy.eta": 0.0}), (disaggregate(1, 2), APART)],
    ids=["aggregation", "disaggregation"],
)
def test_the_ends_of_the_range_are_the_modes_event_by_event(mode: Values, knobs: Values) -> None:
    named, turned = Recorded(mode), Recorded(knobs)
    assert named.events == turned.events and named.outcome == turned.outcome


def test_aggregation_moves_nothing_and_disaggregation_mixes_nothing() -> None:
    together, apart = Recorded(AGGREGATE), Recorded(disaggregate(1, 2))
    assert together.events != apart.events
    assert {kind for kind, _ in together.outcome.decisions} == {"local"}
    assert not any(meter.pushed_bytes for meter in together.outcome.meters.values())
    assert {kind for kind, _ in apart.outcome.decisions} == {"remote"}
    for name in ("worker-1", "worker-2"):
        assert apart.plans[name] and {piece.count for plan in apart.plans[name] for piece in plan.slices} == {1}
    assert apart.outcome.meters["worker-0"].draws == len(ASKS)  # of each request the first token, and no more
    assert {record.status for record in (*together.outcome.records, *apart.outcome.records)} == {"done"}
