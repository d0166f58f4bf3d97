"""`bench gpu`: parts in processes of their own, with limits; tried here through the interpreter, at tiny sizes."""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from cbdisagg_bench import gpu, gpu_ipc, gpu_kernels
from cbdisagg_bench.gpu_models import LLAMA_8B, TINY, write_folder
from cbdisagg_bench.gpu_part import PARTS
from cbdisagg_bench.gpu_rows import Row, Setting, at_least, at_most, seconds, setting
from rich.console import Console

from cbdisagg.engine.families import weights_of
from cbdisagg.engine.specs import read_spec
from cbdisagg.engine.weights import load
from cbdisagg.transfer.cuda_ipc import CudaIpcLink

ROOT = Path(__file__).parents[2]
ON_A_GPU_MACHINE = {
    *("torch", "triton", "transformers", "aiohttp", "uvloop", "jinja2", "prometheus_client"),
    *("numpy", "tokenizers", "safetensors", "huggingface_hub"),  # which come with transformers
}
BROUGHT_FOR_OTHERS = {"click", "shellingham", "markdown-it-py", "mdurl", "pygments"}
"""What typer and rich need; pip is told to resolve nothing."""


def test_what_is_brought_to_a_gpu_machine_is_all_that_it_lacks() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (command,) = re.findall(
        r"pip install --target gpu-site --no-deps --only(?:.*\\\n)+.*", (ROOT / "bench/README.md").read_text()
    )
    words = shlex.split(command)
    brought = {_name(word) for word in words[words.index("pyzmq") :]}
    needed = {_name(word) for word in project["dependencies"]}
    assert brought == needed - ON_A_GPU_MACHINE | BROUGHT_FOR_OTHERS


def _name(requirement: str) -> str:
    return re.split("[<>=;]", requirement)[0]


def test_limits_are_for_all_parts_and_keep_to_five_minutes() -> None:
    assert gpu.LIMITS_S.keys() == PARTS.keys()
    assert sum(gpu.LIMITS_S.values()) <= 300


def test_a_part_runs_by_itself_and_its_rows_are_kept(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("wb") as log:
        outcome = gpu.run_part("ipc", "cpu", log, 200)
    assert outcome.trouble == "", (tmp_path / "log.txt").read_text()
    rows = {row.what: row for row in outcome.rows}
    assert rows["layers of 2 that arrived damaged"].holds is True
    assert rows["self-test"].value > 0


def test_rows_of_processes_that_share_the_shapes_are_kept_when_some_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also of those that come later than the one that fails."""
    sharer, waits = tmp_path / "sharer", tmp_path / "waits"
    os.mkfifo(waits)
    sharer.write_text(
        f"#!/bin/sh\nif [ $4 = 0 ]; then echo first >{waits}; exit 1; fi\nread _ <{waits}\necho row of $4\n"
    )
    sharer.chmod(0o700)
    monkeypatch.setattr(gpu_kernels.sys, "executable", str(sharer))
    monkeypatch.setattr(gpu_kernels, "_small", lambda setting: iter([Row("kernels", "own", 0.0, "abs")]))
    monkeypatch.setattr(gpu_kernels, "_draws", lambda setting: iter(()))
    monkeypatch.setattr(Setting, "size", lambda setting, whole, tiny: 2)
    rows = gpu_kernels.run(setting("cpu"))
    assert next(rows).what == "own"
    with pytest.raises(RuntimeError, match="1 failed"):
        next(rows)
    assert capfd.readouterr().out == "row of 1\n"


def test_the_device_is_busy_while_what_is_timed_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    queued: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None: ...

        def record(self) -> None:
            queued.append("event")

        def synchronize(self) -> None: ...

        def elapsed_time(self, other: Event) -> float:
            return 3.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: queued.append("busy"))
    on_a_gpu = replace(setting("cpu"), name="cuda:0")
    assert seconds(on_a_gpu, lambda: queued.append("call"), repeat=1) == pytest.approx(3e-3)
    assert queued == 3 * ["busy", "event", "call", "event"]


def test_a_layer_that_does_not_arrive_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    push = CudaIpcLink.push
    monkeypatch.setattr(CudaIpcLink, "push", lambda link, layer, what: layer and push(link, layer, what))
    rows = {row.what: row for row in gpu_ipc.run(setting("cpu"))}
    assert rows["layers of 2 that arrived damaged"].value == 1


def test_a_part_that_fails_says_why_and_one_that_hangs_is_ended(tmp_path: Path) -> None:
    with (tmp_path / "log.txt").open("wb") as log:
        failed = gpu.run_part("ipc", "cuda:99", log, 200)
        hung = gpu.run_part("ipc", "cpu", log, limit_s=0.01)
    assert "status 1" in failed.trouble and "cuda:99" in failed.trouble
    assert hung.trouble == "not done after 0 s" and not hung.rows


def test_nobody_outlives_a_part_that_started_him(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A crash ends no service; what it holds of the GPU would be missing in the parts to come."""
    held, part = tmp_path / "held", tmp_path / "part"
    os.mkfifo(held)
    part.write_text(f"#!/bin/sh\nexec 3>{held}\nsleep 600 >/dev/null 2>&1 &\nexit 3\n")
    part.chmod(0o700)
    monkeypatch.setattr(gpu.sys, "executable", str(part))
    reader = os.open(held, os.O_RDONLY | os.O_NONBLOCK)
    with (tmp_path / "log.txt").open("wb") as log:
        assert gpu.run_part("ipc", "cpu", log, 200).trouble.startswith("status 3")
    ended, _, _ = select.select([reader], [], [], 10)
    os.close(reader)
    assert ended  # he who could write is gone


def test_one_bad_part_does_not_hide_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "kernels": gpu.Outcome("kernels", 1.0, "", [at_most("kernels", "attention", 1e-6, "abs", 1e-5)]),
        "rates": gpu.Outcome("rates", 1.0, "not done after 30 s", [Row("rates", "copy of memory", 4e3, "GB/s")]),
    }
    limits = []

    def run_part(name: str, device: str, log: Any, limit_s: float) -> gpu.Outcome:
        limits.append(limit_s)
        return found[name]

    monkeypatch.setattr(gpu, "run_part", run_part)
    with pytest.raises(typer.Exit):
        gpu.gpu(out=tmp_path / "out", device="cuda:0", parts="kernels,rates", as_json=True)
    assert limits == [gpu.LIMITS_S["kernels"], gpu.LIMITS_S["rates"] + gpu.LIMITS_S["kernels"] - 1.0]  # what was left
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"results.json", "table.txt", "log.txt"}
    report = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [part["trouble"] for part in report["parts"]] == ["", "not done after 30 s"]
    text = (tmp_path / "out" / "table.txt").read_text()
    assert "attention" in text and "copy of memory" in text and "not done after 30 s" in text


def test_services_load_a_model_that_takes_no_room(tmp_path: Path) -> None:
    """Its weights come to be where it runs: also those of 16 GB."""
    write_folder(tmp_path, LLAMA_8B)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 10 << 20
    spec = read_spec(tmp_path)
    weights = weights_of(spec, load(tmp_path, torch.device("meta")))
    assert weights.embed.shape == (128_256, 4096) and weights.embed is not weights.head.parts[0]
    assert {product.weight(torch.bfloat16).device.type for product in weights.products()} == {"meta"}
    write_folder(tmp_path, TINY)
    drawn = load(tmp_path)
    assert drawn["model.norm.weight"].eq(1).all() and drawn["lm_head.weight"].std() > 0.03


def test_a_missed_aim_is_shown() -> None:
    rows = [at_least("rates", "decode", 0.5, "x", 0.85), at_least("rates", "copies", 0.9, "x", 0.8)]
    console = Console(record=True, width=100)
    console.print(gpu.table([gpu.Outcome("rates", 1.0, "", rows)]))
    decode, copies = console.export_text().splitlines()[-2:]
    assert decode.split()[-1] == "NO" and copies.split()[-1] == "yes"


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("part", PARTS)
def test_every_part_comes_to_its_end(part: str, tmp_path: Path) -> None:
    """The way, not the speed."""
    with (tmp_path / "log.txt").open("wb") as log:
        outcome = gpu.run_part(part, "cpu", log, limit_s=600)
    assert outcome.trouble == "", (tmp_path / "log.txt").read_text()
    exact = [row for row in outcome.rows if row.unit in ("abs", "rel", "bytes", "layers", "answers", "tokens")]
    assert outcome.rows and all(row.holds is not False for row in exact)
