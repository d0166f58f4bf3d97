"""`bench step` runs, counts what it says, and compares by the rule."""

from __future__ import annotations

import json
from typing import Any

import pytest
from cbdisagg_bench import step as module
from cbdisagg_bench.step import Limits, Row, random_tensors, smollm2_spec, step

from cbdisagg.engine.families import weights_of


def test_json(llama: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(module, "measure_limits", lambda: Limits(dram=32.5, peak=557.0))
    monkeypatch.setattr(module, "PREFILL", 40)
    step(model=llama.folder, threads=1, dtypes="float32", batches="1,3", contexts="24", repeat=4, as_json=True)
    report = json.loads(capsys.readouterr().out)
    rows = report["rows"]
    assert [(row["phase"], row["batch"]) for row in rows] == [("decode", 1), ("decode", 3), ("prefill", 1)]
    for row in rows:
        tokens = 40 if row["phase"] == "prefill" else row["batch"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms"])


def test_a_case_smaller_than_the_prefill(
    llama: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "measure_limits", lambda: Limits(dram=32.5, peak=557.0))
    monkeypatch.setattr(module, "PREFILL", 40)
    step(model=llama.folder, threads=1, dtypes="float32", batches="1", contexts="8", repeat=2, as_json=True)
    assert [row["phase"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["decode", "prefill"]


def test_reference_is_scaled_by_what_bounds_the_step() -> None:
    half = Limits(dram=32.5, peak=1114.0 / 4)
    small = module._compare(Row("decode", "bfloat16", 16, 512, 82.0, 0.0, 0.0), half)
    large = module._compare(Row("decode", "bfloat16", 32, 512, 340.0, 0.0, 0.0), half)
    assert (small.scale, small.ratio) == (0.5, pytest.approx(1.0))
    assert (large.scale, large.ratio) == (0.25, pytest.approx(1.0))
    assert module._compare(Row("decode", "float32", 16, 512, 82.0, 0.0, 0.0), half).ratio is None


def test_random_weights_have_the_models_shape() -> None:
    spec = smollm2_spec()
    tensors = random_tensors(spec, inner=1536)
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert weights_of(spec, tensors).head is tensors["model.embed_tokens.weight"]
