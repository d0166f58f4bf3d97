"""The step trace: the same from a journal as from the run itself, in the figures and in Chrome's format."""

from __future__ import annotations

import json
import sys
from collections import deque
from pathlib import Path

import pytest
from cbdisagg_bench.batching_burst import API, COORDINATOR, ME, PricedRunner, worker_info
from cbdisagg_bench.batching_lengths import burst
from cbdisagg_bench.batching_scales import SCALES
from cbdisagg_bench.batching_systems import SYSTEMS
from cbdisagg_bench.trace import Trace, chrome_events, mean_batch, trace_journal
from cbdisagg_bench.trace_journal import figures

from cbdisagg import cli
from cbdisagg.actors.journal import Journal
from cbdisagg.config import Config
from cbdisagg.core.effects import RunStep
from cbdisagg.core.events import FromWorkerInbox, StepDone, WorkerEvent
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import (
    Address,
    Generate,
    Members,
    RequestId,
    Route,
    Sampling,
    StepPlan,
    Submit,
    Targets,
    pack,
)

SCALE = SCALES["cpu"]


def recorded(folder: Path, system: str) -> tuple[Trace, Path]:
    """A worker that serves a few requests: its trace as it ran, and its journal."""
    requests = burst(8, SCALE.prompt, SCALE.mean, 64, SCALE.vocab)
    config = SYSTEMS[system].config(SCALE, 64, max(request.output for request in requests))
    core = WorkerCore(worker_info(config), config)
    trace, journal = Trace.of(core), Journal(folder, core.info, config)
    plans: deque[StepPlan] = deque()
    now = 0.0

    def feed(event: WorkerEvent) -> None:
        effects = core.handle(event, now)
        journal.append(now, event, effects)
        trace.observe(core, now, event, effects)
        plans.extend(effect.plan for effect in effects if isinstance(effect, RunStep))

    feed(FromWorkerInbox(COORDINATOR, Members(0, (API,), (core.info,), (), ())))
    for n, request in enumerate(requests):
        sampling = Sampling(max_tokens=request.output, temperature=0.0)
        spec = Generate(
            RequestId(API.incarnation, n), 0, pack(request.prompt), b"", b"", b"", sampling, Targets(1, 1), 0.0
        )
        feed(FromWorkerInbox(COORDINATOR, Submit(spec, Route(ME, ME), 0)))
    runner = PricedRunner(SCALE.profile.cost)
    while plans:
        result = runner.run(plans.popleft(), lambda layer, push: None)
        now += result.seconds
        feed(StepDone(result))
    journal.close()
    (path,) = folder.glob("*.0000.journal")
    return trace, path


@pytest.mark.parametrize("system", ["S1", "S2c", "S3"])
def test_a_journal_gives_the_trace_of_the_run(system: str, tmp_path: Path) -> None:
    trace, path = recorded(tmp_path, system)
    assert trace.steps and trace_journal(path).steps == trace.steps


def test_tokens_of_a_trace_add_up(tmp_path: Path) -> None:
    trace, path = recorded(tmp_path, "S3")
    found = figures(trace_journal(path))
    outputs = sum(request.output for request in burst(8, SCALE.prompt, SCALE.mean, 64, SCALE.vocab))
    assert found["prefill_tokens"] == 8 * SCALE.prompt
    assert found["decode_tokens"] == outputs - 8  # the first of each comes of its prompt
    assert found["wasted_tokens"] == 0
    assert found["kv_filled"] + found["kv_promised"] + found["kv_internal"] + found["kv_external"] == pytest.approx(1)
    assert found["mean_batch"] == mean_batch(trace.steps) > 1


def test_chrome_events_have_a_row_for_each_slot(tmp_path: Path) -> None:
    trace, _ = recorded(tmp_path, "S1")
    events = chrome_events(trace, "a worker")["traceEvents"]
    cells = [event for event in events if event["ph"] == "X"]
    assert len(cells) == sum(len(step.cells) for step in trace.steps)
    assert {event["cat"] for event in cells} == {"prefill", "decode", "end", "wasted"}
    assert all(event["dur"] > 0 and event["ts"] >= 0 for event in cells)
    (name,) = (event for event in events if event["ph"] == "M")
    assert name["args"] == {"name": "a worker"}


def command_line(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["cbdisagg", "bench", "trace", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


def test_the_command_shows_a_live_workers_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, path = recorded(tmp_path / "journal", "S3")
    chrome, pictures = tmp_path / "trace.json", tmp_path / "pictures"
    assert command_line([str(path), "--chrome", str(chrome), "--pictures", str(pictures)], monkeypatch) == 0
    shown = capsys.readouterr().out
    assert "steps 0 to 35" in shown and "cells used" in shown and "mean_batch" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert json.loads(chrome.read_text())["traceEvents"]
    assert {file.name for file in pictures.iterdir()} == {"slots.png", "slots.svg", "memory.png", "memory.svg"}
    assert command_line([str(path), "--json"], monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["prefill_tokens"] == 8 * SCALE.prompt


def test_the_command_refuses_what_is_no_workers_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal(tmp_path, Address("coordinator", 3, ""), Config()).close()
    (path,) = tmp_path.glob("*.journal")
    assert command_line([str(path)], monkeypatch) == 1
    assert "the coordinator's journal" in capsys.readouterr().err
    _, path = recorded(tmp_path / "worker", "S3")
    assert command_line([str(path), "--first", "1000000"], monkeypatch) == 1
    assert "--first 1000000" in capsys.readouterr().err
    for option in ("--chrome", "--pictures"):
        assert command_line([str(path), option, str(path / "there")], monkeypatch) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert option in line and str(path) in line
