"""`cbdisagg bench decision`: it times decisions that are taken, each request's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cbdisagg_bench.decision import PROFILE, decision, measure, quantiles
from typer import BadParameter, Typer

from cbdisagg.core.profile import parse_profile


@pytest.mark.parametrize("mode", ["split", "any"])
def test_every_request_is_placed(mode: str) -> None:
    profile = parse_profile(Path(PROFILE).read_bytes(), PROFILE.name)
    times = measure(4, mode, requests=20, prompt_tokens=100, profile=profile, seed=0)
    assert len(times) == 18 and min(times) > 0  # the first tenth warms up


def test_quantiles_are_in_microseconds() -> None:
    assert quantiles([n * 1e-6 for n in range(1, 100)]) == pytest.approx((50, 90, 99))


def test_figures_as_json_and_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(decision)
    app(["--workers", "2", "--requests", "10", "--json"], standalone_mode=False)
    told = json.loads(capsys.readouterr().out)
    assert [(row["workers"], row["roles"]) for row in told["rows"]] == [(2, "split"), (2, "any")]
    with pytest.raises(BadParameter, match="is not a number from 1 up"):
        app(["--workers", "0"], standalone_mode=False)
