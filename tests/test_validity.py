"""What `bench validity` compares, without a service: loads below saturation, and when a prediction holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from cbdisagg_bench.validity import PARTS, _loads, compare, predict, validity

from cbdisagg.config import Config, ConfigError
from cbdisagg.core.profile import parse_profile

PATH = Path(__file__).parents[1] / "configs" / "profiles" / "h200-llama3.1-8b.json"
COSTS = parse_profile(PATH.read_bytes(), PATH.name)


def test_loads_are_parts_of_what_saturates_with_the_same_lengths() -> None:
    loads = _loads(Config(), COSTS, 40, "exponential:64:200", "16", 0)
    rates = list(loads)
    assert len(rates) == len(PARTS) and rates[0] / rates[2] == pytest.approx(PARTS[0] / PARTS[2], rel=0.01)
    lengths = [[(ask.length, ask.output_tokens) for ask in asks] for asks in loads.values()]
    assert lengths[0] == lengths[1] == lengths[2]
    slow, fast = (predict(Config(), COSTS, asks) for asks in (loads[rates[0]], loads[rates[2]]))
    assert 0 < slow["TTFT", "p50"] <= slow["TTFT", "p99"] and slow["TPOT", "p50"] <= fast["TPOT", "p50"]


def test_a_prediction_holds_within_its_bound_of_the_median_run() -> None:
    runs = [{("TTFT", "p50"): value, ("TTFT", "p99"): 2 * value} for value in (90.0, 100.0, 140.0)]
    half, tail = compare(2.0, runs, {("TTFT", "p50"): 116.0, ("TTFT", "p99"): 150.0})
    assert (half.measured, half.spread, half.off) == (100.0, 50.0, pytest.approx(0.16))
    assert not half.holds and tail.holds and tail.off == pytest.approx(-0.25)


def test_a_folder_is_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        validity(PATH.parents[1] / "1p1d.toml", tmp_path)
