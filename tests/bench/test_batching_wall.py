"""The wall clock's half with a tiny random model in float32: every system gives the same tokens, in the same steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cbdisagg_bench.batching_checks import checks
from cbdisagg_bench.batching_run import Results, run_virtual, run_wall, workloads
from cbdisagg_bench.batching_scales import SCALES, Scale
from cbdisagg_bench.batching_systems import ALONE
from cbdisagg_bench.batching_wall import Lab, calibration
from transformers import LlamaConfig, LlamaForCausalLM

SCALE = replace(SCALES["cpu"], prompt=16, mean=6.0, caps=(4, 24), pool=160, chunk=16, vocab=128, quick=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.3,
    )
    path = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(path)
    return path


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
