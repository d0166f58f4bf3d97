"""`bench peers`: engines without a server get the work of `bench serve`, and what they generate is counted as there."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from cbdisagg_bench import peers
from cbdisagg_bench.load import _requests
from cbdisagg_bench.load_asks import VOCAB, Ask, fill
from transformers import LlamaForCausalLM
from typer import BadParameter


def test_the_requests_are_those_that_serve_sends() -> None:
    served = fill(_requests(None, None, 0.0, 1.0, peers.PROMPTS, peers.OUTPUTS, 3), VOCAB, 3)
    assert peers.requests(3) == served != peers.requests(4)
    assert len(served) == 64 and {ask.prompt_ids for ask in served} == {128}


def test_tokens_that_were_asked_for_over_the_time_after_the_warm_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    clock, answered = [0.0], list[int]()

    def generate(asks: Sequence[Ask]) -> None:
        answered.append(len(asks))
        clock[0] += len(asks) / 16

    monkeypatch.setattr(peers, "static", lambda folder, dtype, threads: generate)
    monkeypatch.setattr(peers.time, "perf_counter", lambda: clock[0])
    peers.peers("static", tmp_path, as_json=True)
    told = json.loads(capsys.readouterr().out)
    wanted = sum(ask.output_tokens for ask in peers.requests(0))
    assert answered == [16, 64]
    assert (told["generated_tokens"], told["seconds"]) == (wanted, 4.0)
    assert told["generated_per_s"] == pytest.approx(wanted / 4, abs=0.1)


def test_static_batches_run_to_their_longest_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes, generate = list[tuple[int, ...]](), LlamaForCausalLM.generate

    def noting(self: LlamaForCausalLM, ids: torch.Tensor, **how: Any) -> torch.Tensor:
        found = generate(self, ids, **how)
        shapes.append(tuple(found.shape))
        return found

    monkeypatch.setattr(LlamaForCausalLM, "generate", noting)
    peers.static(folder, "float32", 0)([Ask(0.0, [n + 1, 2, 3], 1 + n % 5 if n < 16 else 2) for n in range(20)])
    assert shapes == [(16, 3 + 5), (4, 3 + 2)]


def test_without_openvino(tmp_path: Path) -> None:
    with pytest.raises(BadParameter, match="pip install openvino-genai"):
        peers.openvino(tmp_path, 0)
