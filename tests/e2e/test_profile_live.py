"""What a service adds to its workers' steps, measured on one of a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest
from cbdisagg_bench import profile_live
from cbdisagg_bench.profile_live import APART_S, measure_live
from cbdisagg_bench.service import ServiceFailed
from msgspec.structs import replace
from rich.progress import Progress

from cbdisagg.config import Config, Http, Kv, Model, Policy, Workers
from cbdisagg.core.cost import CostModel
from cbdisagg.core.profile import Host
from cbdisagg.sim import workload

pytestmark = pytest.mark.e2e

NO_TIME = CostModel(0.0, 0.0, ((1, 0.0), (2, 0.0)), 0.0, 0.0, 0.0, 0.0, 1e9)


async def test_a_service_adds_to_the_first_token_and_takes_time_of_cores_for_each_request(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, less in {"PROMPTS": 6, "APART_S": 0.05, "IDLE_S": 1.0, "ONE": (1, 400), "FEW": (8, 400)}.items():
        monkeypatch.setattr(profile_live, name, less)
    config = Config(
        model=Model(path=str(tiny_model), dtype="float32", max_len=128),
        kv=Kv(pages=256),
        policy=Policy(pin_prefill=1),  # of two workers, and there is one
        http=Http(api_key="secret"),
    )
    live = await measure_live(config, Workers(threads=1), NO_TIME, Host(), Progress(disable=True))
    assert live.first_s > 0
    assert live.message_s + live.token_s > 0
    assert min(live.message_s, live.token_s, live.request_s) >= 0


async def test_single_prompts_come_further_apart_than_each_takes(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would wait for each other, and that would be taken for the service's own time."""
    gaps: list[float] = []

    def prompts(count: int, apart_s: float, outputs: int) -> list[workload.Ask]:
        gaps.append(apart_s)
        return [workload.Ask(0.0, outputs, 4)] * count

    monkeypatch.setattr(profile_live, "_prompts", prompts)
    for name, less in {"PROMPTS": 2, "IDLE_S": 0.1, "ONE": (1, 20), "FEW": (2, 20)}.items():
        monkeypatch.setattr(profile_live, name, less)
    config = Config(model=Model(path=str(tiny_model), dtype="float32", max_len=128), kv=Kv(pages=256))
    for cost in (NO_TIME, replace(NO_TIME, h=2.0)):
        await measure_live(config, Workers(threads=1), cost, Host(), Progress(disable=True))
    assert gaps[1::2] == [APART_S, pytest.approx(6.0)]


async def test_a_service_that_does_not_start_is_named(tmp_path: Path) -> None:
    config = Config(model=Model(path=str(tmp_path)))
    with pytest.raises(ServiceFailed, match="did not get ready"):
        await measure_live(config, Workers(), NO_TIME, Host(), Progress(disable=True))
