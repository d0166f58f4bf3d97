"""The file of a profile: what reads, what is refused, and that it gives the cost model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cbdisagg.config import ConfigError
from cbdisagg.core.cost import Work
from cbdisagg.core.profile import format_profile, parse_profile

GIVEN: dict[str, Any] = {
    "h": 0.1,
    "h_mix": 0.0,
    "L": [[1, 0.0], [10, 0.9]],
    "a": 0.0,
    "d": 0.0,
    "t0": 0.0,
    "t_d": 0.0,
    "B": 1e9,
    "s": 0.5,
    "layers": 2,
    "kv_bytes": 8,
    "context": 100,
    "model": "m",
    "dtype": "float32",
    "machine": "x",
}


def test_a_profile_reads_as_it_was_written_and_predicts() -> None:
    profile = parse_profile(json.dumps(GIVEN).encode(), "p.json")
    assert parse_profile(format_profile(profile), "p.json") == profile
    assert profile.cost.step_s([Work(3, 1, True)]) == pytest.approx(0.1 + 0.5)
    assert profile.cost.step_s([Work(0, 10, False)]) == pytest.approx(0.1 + 0.9)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"a": -1.0}, "a = -1.0: must be a number from 0 up"),
        ({"B": 0.0}, "B = 0.0: must be a number of bytes per second above 0"),
        ({"L": []}, "L: must hold"),
        ({"L": [[5, 0.1], [5, 0.2]]}, "L: must hold"),
        ({"L": [[5, -0.1]]}, "L: the seconds must be"),
        ({"layers": 0}, "layers, kv_bytes and context"),
        ({"memory": {"total": 10, "weights": 20, "vocab": 1}}, "memory: the weights must be above 0 and fit"),
        ({"colour": "red"}, "not a profile: Object contains unknown field `colour`"),
        ({"h": "much"}, "not a profile: Expected `float`, got `str` - at `$.h`"),
    ],
)
def test_what_cannot_be_is_refused(changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_profile(json.dumps(GIVEN | changes).encode(), "p.json")
    assert str(refused.value).startswith(f"p.json: {problem}")


PROFILES = sorted((Path(__file__).parents[2] / "configs" / "profiles").glob("*.json"))


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_the_profiles_that_come_along_read_and_name_their_source(path: Path) -> None:
    profile = parse_profile(path.read_bytes(), path.name)
    measured = "cbdisagg profile" in profile.note and profile.errors["all"].p90 < 0.12
    assert measured or ("aiconfigurator" in profile.note and "Assumed" in profile.note)
    one, many = ([Work(1000, 1, True)] * batch for batch in (1, 128))
    assert 0 < profile.cost.step_s(one) < profile.cost.step_s(many) < 128 * profile.cost.step_s(one)


@pytest.mark.parametrize(
    ("layers", "kv_bytes", "on_gpu", "said"),
    [
        (2, 8, False, ""),
        (3, 8, False, "m in float32: 2 layers and 8 bytes of KV a token, here 3 and 8"),
        (2, 4, False, "m in float32: 2 layers and 8 bytes of KV a token, here 2 and 4"),
        (2, 8, True, "x, and this is a GPU"),
    ],
)
def test_what_was_measured_elsewhere_is_seen(layers: int, kv_bytes: int, on_gpu: bool, said: str) -> None:
    assert parse_profile(json.dumps(GIVEN).encode(), "p.json").foreign(layers, kv_bytes, on_gpu) == said


def test_a_gpu_s_profile_is_foreign_to_a_cpu() -> None:
    on_gpu = GIVEN | {"memory": {"total": 10**10, "weights": 10**9, "vocab": 1}}
    assert "this is no GPU" in parse_profile(json.dumps(on_gpu).encode(), "p.json").foreign(2, 8, on_gpu=False)
