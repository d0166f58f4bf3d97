"""What the coordinator foretells of a first token when a request comes, against when it then comes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from msgspec.structs import replace
from numpy.typing import NDArray

from cbdisagg.config import Config, Debug, Kv, Targets, Workers
from cbdisagg.core.profile import Host, Profile, parse_profile
from cbdisagg.load import load_config
from cbdisagg.messages import Role
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.workload import Ask

Numbers = NDArray[np.float64]
ROOT = Path(__file__).parents[2]
FORETOLD = re.compile(r"request \d+\.(\d+): .*?: first token (\S+) s,")


def profile(name: str) -> Profile:
    return parse_profile((ROOT / "configs" / "profiles" / f"{name}.json").read_bytes(), name)


def off(config: Config, costs: Profile, asks: Sequence[Ask]) -> Numbers:
    """For each request by how much the first word on it was wrong, as a part of what it took."""
    outcome = simulate(replace(config, debug=Debug(trace=True)), costs, asks)
    foretold: dict[int, float] = {}
    for _, _, note in outcome.notes:
        if found := FORETOLD.match(note.text):
            foretold.setdefault(int(found[1]), float(found[2]))
    taken = [record.ttft_s for record in outcome.records]
    said = [seconds for _, seconds in sorted(foretold.items())]
    assert len(said) == len(taken) == len(asks)
    return np.abs(np.array(said) / np.array(taken) - 1)


def check(wrong: Numbers) -> None:
    assert np.median(wrong) < 0.03 and np.percentile(wrong, 90) < 0.15


@pytest.mark.parametrize(("workers", "rate"), [("1p1d", 1.0), ("1p1d", 3.0), ("colocated", 1.0), ("colocated", 2.0)])
def test_first_tokens_of_a_cpu_are_foretold(workers: str, rate: float) -> None:
    """Up to half of what saturates it: the fuller it is, the more often streams that come later slow it down."""
    asks = make_workload(300, rate, Lengths(128, "exponential", 512), Lengths(32, "exponential", 128), 7)
    check(off(load_config(ROOT / "configs" / f"{workers}.toml"), profile("cpu-smollm2-135m-1-thread"), asks))


@pytest.mark.parametrize(("roles", "rate"), [("aaa", 8.0), ("aaa", 16.0), ("pdd", 8.0)])
def test_first_tokens_of_a_gpu_are_foretold(roles: str, rate: float) -> None:
    """But for what the host adds, which is 2 ms of 10 for a short prompt and the same for all."""
    names: dict[str, Role] = {"a": "any", "p": "prefill", "d": "decode"}
    workers = tuple(Workers(role=names[role]) for role in roles)
    config = Config(workers=workers, kv=Kv(memory_mb=60_000), targets=Targets(ttft_ms=300, tpot_ms=15))
    costs = replace(profile("h200-llama3.1-8b"), host=Host())
    lengths = Lengths(755, "lognormal", 4096), Lengths(200, "lognormal", 1024)
    check(np.concatenate([off(config, costs, make_workload(250, rate, *lengths, seed)) for seed in range(7, 11)]))


@pytest.mark.parametrize("output", [2, 5, 10, 60])
def test_a_first_token_that_is_held_back_is_foretold(output: int) -> None:
    """A short prompt, while the decode worker computes a long one by itself."""
    asks = [Ask(0.0, 5, 360), Ask(0.05, output, 11)]
    wrong = off(load_config(ROOT / "configs" / "1p1d.toml"), profile("cpu-smollm2-135m-1-thread"), asks)
    assert max(wrong) < 0.1
