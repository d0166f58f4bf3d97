"""`bench step` runs on every path, counts what it says, and compares by the rule."""

from __future__ import annotations

import json
from typing import Any

import pytest
import typer
from cbdisagg_bench import step as module
from cbdisagg_bench.step import Bench, Row, random_tensors, smollm2_spec, step, with_goal
from cbdisagg_kernels.native import native

from cbdisagg.engine.families import weights_of


class HalfTheReference:
    def bytes_per_s(self) -> float:
        return 32.5e9

    def operations_per_s(self, number: int) -> float:
        return 557e9


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "machine", lambda threads: HalfTheReference())
    monkeypatch.setattr(module, "PREFILL", 40)


def test_json(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    paths = "native,torch" if native() else "torch"
    step(str(llama.folder), 1, paths, dtypes="float32", batches="1,3", contexts="24", repeat=4, as_json=True)
    rows = json.loads(capsys.readouterr().out)["rows"]
    cases = [("decode", 1), ("decode", 3), ("prefill", 1)]
    expected = [(phase, path, batch) for phase, batch in cases for path in paths.split(",")]
    assert [(row["phase"], row["path"], row["batch"]) for row in rows] == expected
    for row in rows:
        tokens = 40 if row["phase"] == "prefill" else row["batch"]
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms"])
        assert 0.0 < row["limit"] < 1.0
        assert (row["dram"], row["peak"]) == (32.5, 557.0)


def test_a_case_smaller_than_the_prefill(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    step(str(llama.folder), 1, "", dtypes="float32", batches="1", contexts="8", repeat=2, as_json=True)
    assert [row["phase"] for row in json.loads(capsys.readouterr().out)["rows"]] == ["decode", "prefill"]


@pytest.mark.skipif(native() is None, reason="no native kernels here")
def test_int8_is_native(llama: Any, capsys: pytest.CaptureFixture[str]) -> None:
    step(str(llama.folder), 1, "native", dtypes="int8", batches="2", contexts="8", repeat=2, as_json=True)
    assert {row["dtype"] for row in json.loads(capsys.readouterr().out)["rows"]} == {"int8"}
    with pytest.raises(typer.BadParameter, match="native"):
        step(str(llama.folder), 1, "torch", dtypes="int8", batches="2", contexts="8", repeat=2)


def test_tokens_are_drawn_as_asked(llama: Any, capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    drawn = []
    admit = module.Admit
    monkeypatch.setattr(module, "Admit", lambda *fields: drawn.append(fields[-1]) or admit(*fields))
    how = {"temperature": 0.7, "top_k": 5, "top_p": 0.9}
    step(str(llama.folder), 1, "", "float32", batches="2", contexts="8", repeat=2, as_json=True, **how)
    assert json.loads(capsys.readouterr().out)["draw"] == how
    assert {(each.temperature, each.top_k, each.top_p) for each in drawn} == {tuple(how.values())}


def test_what_a_step_has_to_do(llama: Any) -> None:
    """By hand, for 3 layers of 64 wide, 4 heads and 2 KV heads of 16, 96 inside, 200 words, 10 tokens each."""
    bench = Bench(llama.folder, "torch", "float32", 1, 100, 0)
    weights = 3 * (128 * 64 + 64 * 64 + 192 * 64 + 64 * 96) + 200 * 64
    work = bench.work(context=10, batch=2)
    assert work.nbytes == 4 * (weights + 2 * 3 * 32 * 10 * 2)
    assert work.operations == 2 * (2 * weights + 4 * 3 * 64 * 10)
    assert bench.prefill_work().operations == 40 * (2 * (weights - 200 * 64) + 4 * 3 * 64 * 20) + 2 * 200 * 64


def test_a_goal_is_scaled_by_what_bounds_the_step() -> None:
    def row(batch: int, tokens_per_s: float, context: int = 512) -> Row:
        return Row("decode", "native", "bfloat16", batch, context, 1.0, 0.0, tokens_per_s, 32.5, 1114.0 / 4, 0.5)

    small, large = with_goal(row(16, 485.0), 2), with_goal(row(32, 550.0), 2)
    assert (small.goal, small.reached) == (pytest.approx(485.0), pytest.approx(1.0))
    assert (large.goal, large.reached) == (pytest.approx(275.0), pytest.approx(2.0))
    assert with_goal(row(16, 485.0, context=128), 2).goal is None
    assert with_goal(row(4, 485.0), 2).goal is None


def test_random_weights_have_the_models_shape() -> None:
    spec = smollm2_spec()
    tensors = random_tensors(spec, inner=1536)
    assert sum(tensor.numel() for tensor in tensors.values()) == 134_515_008
    assert weights_of(spec, tensors).head.parts[0] is tensors["model.embed_tokens.weight"]
