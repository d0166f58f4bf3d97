"""The wall clock's half with a tiny random model in float32: every system gives the same tokens, in the same steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cbdisagg_bench.batching_checks import checks
from cbdisagg_bench.batching_models import model_folder
from cbdisagg_bench.batching_run import Results, run_virtual, run_wall, workloads
from cbdisagg_bench.batching_scales import SCALES, Scale
from cbdisagg_bench.batching_systems import ALONE
from cbdisagg_bench.batching_wall import Lab, calibration

SCALE = replace(SCALES["cpu"], prompt=16, mean=6.0, caps=(4, 24), pool=160, chunk=16, vocab=128, quick=12)


def test_systems_take_turns_and_give_the_same_tokens(folder: Path) -> None:
    results = Results(SCALE, "wall", SCALE.profile, workloads(SCALE, SCALE.caps, SCALE.quick, 128, 7))
    run_virtual(results, ALONE, lambda text: None)
    told: list[float] = []
    run_wall(results, Lab(folder, "float32", 1, SCALE), lambda text, done: told.append(done))
    made = checks(results, exact_tokens=True)
    logical = [check for check in made if "S3 >=" not in check.text and "/S1" not in check.text]  # no times here
    assert [check.text for check in logical if not check.holds] == []
    assert any("12 of 12 answers have identical tokens in all 7 systems" in check.text for check in logical)
    assert any("iterations equal the virtual clock's in 14 of 14 runs" in check.text for check in logical)
    assert told == sorted(told)
    assert told[-1] == pytest.approx(sum(run.virtual.seconds for run in results.runs.values()))
    assert all(run.wall is not None and run.wall.seconds > 0 for run in results.runs.values())


def test_calibration_gives_a_cost_for_every_step(folder: Path) -> None:
    lab = Lab(folder, "float32", 1, SCALE)
    seen: list[tuple[int, int]] = []
    cost = lab.calibrate(lambda done, of: seen.append((done, of)), rounds=1)
    assert seen[-1] == (len(calibration(SCALE)), len(calibration(SCALE)))
    assert all(cost.step_s(case.work) > 0 for case in calibration(SCALE))


@pytest.mark.parametrize("scale", SCALES.values(), ids=SCALES)
def test_calibration_stays_within_the_pool(scale: Scale) -> None:
    for case in calibration(scale):
        assert sum(part.start + part.tokens for part in case.work) <= scale.pool


def test_a_model_with_random_weights_is_made_where_it_runs_and_leaves_nothing() -> None:
    """The GPU scale's way, at a size for a CPU."""
    size = replace(SCALES["gpu"], caps=(4,), pool=1200)
    with model_folder("opt-tiny", "bfloat16") as folder:
        lab = Lab(folder, "bfloat16", 1, size)
        assert (lab.info.family, lab.info.layers, lab.info.vocab) == ("opt", 2, 50_272)
        results = Results(size, "wall", size.profile, workloads(size, size.caps, 3, lab.info.vocab, 7))
        run_virtual(results, ("S1", "S3"), lambda text: None)
        run_wall(results, lab, lambda text, done: None)
    assert not folder.exists()
    s1, s3 = (results.runs[4, name].wall for name in ("S1", "S3"))
    assert s1 is not None and s3 is not None and s1.outputs == s3.outputs
    assert len({token for ids in s1.outputs for token in ids}) > 1
