"""`bench quality` scores every token but the first of each window as transformers does, and compares by its words."""

from __future__ import annotations

import json
import math
import shutil
from typing import Any

import pytest
import torch
import typer
from cbdisagg_bench import quality as module
from cbdisagg_bench.quality import TEXT, Scores, compare, quality, score
from cbdisagg_kernels import ops
from tokenizers import Tokenizer, models, pre_tokenizers


def test_windows_and_chunks_are_scored_as_transformers_does(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK", 7)
    ids = [(37 * n + n // 3) % 200 for n in range(100)]
    steps = list(score(module._runner(llama.folder, "float32", 40, 1), ids, 40))
    assert sum(count for _, count in steps) == 100
    scores = [each for part, _ in steps for each in part]
    expected, best = [], []
    for window in (ids[:40], ids[40:80], ids[80:]):
        logits = llama.logits(window)[:-1].log_softmax(-1)
        expected += logits.gather(1, torch.tensor(window[1:])[:, None])[:, 0].tolist()
        best += logits.argmax(1).tolist()
    assert [each.logprob for each in scores] == pytest.approx(expected, abs=1e-3)
    assert [each.top_ids[0] for each in scores] == best


def test_figures_are_what_their_names_say() -> None:
    half, third = math.log(1 / 2), math.log(1 / 3)
    scores = {
        "float32": Scores([half, half, half, half], [1, 2, 3, 4]),
        "bfloat16": Scores([half, half, half, half], [1, 2, 3, 0]),
        "int8": Scores([half, third, half, third], [1, 0, 3, 0]),
    }
    reference, bfloat16, int8 = compare(scores)
    assert (reference.perplexity, reference.agreement) == (pytest.approx(2.0), 1.0)
    assert (bfloat16.over_bfloat16, bfloat16.error, bfloat16.agreement) == (0.0, 0.0, 0.75)
    assert int8.over_bfloat16 == pytest.approx(math.sqrt(6) / 2 - 1)
    assert int8.error == pytest.approx(math.sqrt(6) / 2 * math.log(3 / 2) / 2 / 2)
    assert int8.agreement == 0.5
    assert compare({"float32": scores["float32"]})[0].over_bfloat16 is None


def test_the_command(llama: Any, tmp_path: Any, capsys: pytest.CaptureFixture[str]) -> None:
    words = {f"w{n}": n for n in range(200)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = shutil.copytree(llama.folder, tmp_path / "model")
    tokenizer.save(str(folder / "tokenizer.json"))
    text = tmp_path / "text"
    text.write_text(" ".join(f"w{n % 199}" for n in range(120)))
    quality(str(folder), text, "bfloat16", window=500, threads=1, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["window"] == 96, "the model sees no more"
    assert [(row["kind"], row["tokens"]) for row in report["rows"]] == [("float32", 118), ("bfloat16", 118)]
    quality(str(folder), text, "bfloat16", window=500, threads=1)
    assert "118 tokens" in capsys.readouterr().out
    text.write_text("w1")
    with pytest.raises(typer.BadParameter, match="nothing to predict"):
        quality(str(folder), text, window=500, threads=1)


def test_int8_is_not_offered_where_it_cannot_be_had(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "native", lambda: None)
    monkeypatch.setattr(ops, "native", lambda: None)
    with pytest.raises(typer.BadParameter, match="'int8' is not one of float32, bfloat16"):
        quality(str(llama.folder), None, "int8")


def test_the_text_is_there_and_long_enough_to_tell() -> None:
    assert len(TEXT.read_text(encoding="utf-8").split()) > 1000
