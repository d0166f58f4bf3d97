"""`cbdisagg bench decision`: it times decisions that are taken, each request's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cbdisagg_bench.decision import (
    LIMITS_US,
    PROFILE,
    STREAMS,
    Row,
    busy_load,
    decision,
    measure,
    middle,
    quantiles,
)
from typer import BadParameter, Typer

from cbdisagg.core.profile import parse_profile


@pytest.mark.parametrize("mode", ["split", "any"])
def test_every_request_is_placed(mode: str) -> None:
    profile = parse_profile(Path(PROFILE).read_bytes(), PROFILE.name)
    times = measure(4, mode, requests=20, prompt_tokens=100, profile=profile, seed=0)
    assert len(times) == 18 and min(times) > 0  # the first tenth warms up


def test_quantiles_are_in_microseconds() -> None:
    assert quantiles([n * 1e-6 for n in range(1, 100)]) == pytest.approx((50, 90, 99))


def test_busy_workers_have_told_of_their_streams() -> None:
    load = busy_load(parse_profile(Path(PROFILE).read_bytes(), PROFILE.name))
    assert load.busy and load.decodes == load.running == STREAMS and load.forecast.tpot_s > 0


def test_the_median_of_the_runs_is_held_against_the_limit() -> None:
    assert middle([(1.0, 9.0, 3.0), (5.0, 2.0, 4.0), (2.0, 3.0, 9.0)]) == (2.0, 3.0, 4.0)
    assert Row(16, "any", 100.0, 900.0, 900.0).holds and not Row(16, "any", 101.0, 1.0, 1.0).holds
    assert Row(17, "any", 1e9, 1e9, 1e9).holds  # nothing is said of so many


def test_a_decision_that_takes_too_long_makes_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(decision)
    given = ["--workers", "2", "--requests", "10", "--runs", "1"]
    assert not app(given, standalone_mode=False)
    monkeypatch.setitem(LIMITS_US, 2, 0.0)
    assert app(given, standalone_mode=False) == 1
    assert "no" in capsys.readouterr().out


def test_figures_as_json_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(decision)
    app(["--workers", "2", "--requests", "10", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert [(row["workers"], row["roles"]) for row in told["rows"]] == [(2, "split"), (2, "any")]
    with pytest.raises(BadParameter, match="is not a number from 1 to 2,000"):
        app(["--workers", "0"], standalone_mode=False)
