"""`bench batching` from its command line: what it refuses, what it prints, what the report holds."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from cbdisagg_bench import batching
from cbdisagg_bench.batching_run import Results, run_virtual, workloads
from cbdisagg_bench.batching_scales import SCALES
from cbdisagg_bench.company import Company
from cbdisagg_bench.pictures.batch import draw_roofline
from msgspec import structs

from cbdisagg import cli

SMALL = ["--scale", "cpu", "--requests", "6", "--arrivals", "4", "--caps", "16,64"]


def command_line(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["cbdisagg", "bench", "batching", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("--clock sundial", "virtual, wall"),
        ("--scale huge", "a100, gpu, cpu"),
        ("--systems S1,S9", "S0, S1, S2"),
        ("--parts cooking", "throughput, latency, tails"),
        ("--caps 0", "from 1 up"),
        ("--caps 4,x", "from 1 up"),
        ("--qps 0", "a number above 0"),
        ("--qps 1,-2", "a number above 0"),
        ("--qps nan", "a number above 0"),
        ("--fractions a", "a number above 0"),
        ("--requests -1", "from 0 up"),
        ("--pool 100", "S0 needs at least 2048"),
        ("--systems S4 --pool 4000", "2000 for each of its 2 workers: S4 needs at least 2048"),
        ("--dtype float64", "bfloat16, float32"),
        ("--systems ,", "names none of S0"),
        ("--parts ,", "names none of throughput"),
        ("--caps 4000", "the scale's model sees 2048 tokens"),
        ("--systems S1 --pool 2048", "1024 for each of its 2 workers: S4r needs at least 2048"),  # for the tails
        ("--port 65536", "65536 is not a number from 0 up to 65,535"),
        ("--out /dev/null", "File exists"),
        ("--out /dev/null/report", "Not a directory"),
        ("--clock wall --scale a100", "has a virtual clock only"),
        ("--clock wall --scale gpu --device tpu", "is not cpu or cuda:N"),
        ("--clock wall --scale gpu --device cuda:0", "--device cpu --model opt-tiny"),
    ],
)
def test_refusal_is_one_line_before_anything_runs(
    arguments: str, right: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(batching, "measure", too_late)
    words = arguments.split()
    assert command_line(words, monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"'{words[-2]}'" in line and right in line


def test_json_has_every_run_and_every_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command_line([*SMALL, "--json", "--parts", "throughput"], monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert {(run["cap"], run["system"]) for run in found["runs"]} == {
        (cap, name) for cap in (16, 64) for name in ("S0", "S1", "S2", "S2b", "S2c", "S3", "S3c", "S4", "S4r")
    }
    assert found["checks"] and all(check["holds"] for check in found["checks"])
    assert (found["seed"], found["requests"], found["clock"]) == (0xCADE, 6, "virtual")
    assert found["command"].startswith("cbdisagg bench batching --scale cpu")
    assert {"cbdisagg", "numpy", "python", "torch"} == found["versions"].keys() and found["machine"]


def test_the_same_seed_gives_the_same_figures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outputs = []
    for _ in range(2):
        assert command_line([*SMALL, "--json", "--systems", "S1,S3,S4"], monkeypatch) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1]


def test_a_check_that_fails_is_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("cbdisagg_bench.batching_checks.static_steps", lambda requests, batch: 1)
    assert command_line([*SMALL, "--systems", "S1", "--parts", "throughput"], monkeypatch) == 1
    assert "FAILS cap 16: S1 takes 1 iterations by its formula" in capsys.readouterr().out


def test_the_report_is_one_page_with_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--systems", "S1,S2b,S3", "--qps", "4", "--fractions", "0.5"]
    assert command_line([*SMALL, *few, "--out", str(tmp_path)], monkeypatch) == 0
    page = (tmp_path / "report.html").read_text()
    for part in ("data:image/png;base64,", "What must hold", "holds: all pages", "not a fair one", "--qps 4", "S2b"):
        assert part in page
    assert "http://" not in page and "https://" not in page and str(tmp_path.parent.parent) not in page
    names = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    assert names == {path.stem for path in (tmp_path / "pictures").glob("*.svg")}
    assert names == {
        "throughput",
        "golden",
        "golden_iterations",
        "slots",
        "memory",
        "batch",
        "roofline",
        "latency_cdf",
        "latency_phases",
        "tails",
    }
    assert page.count("data:image/png;base64,") == len(names)
    assert json.loads((tmp_path / "results.json").read_text())["scale"] == "cpu"
    tables = (tmp_path / "tables.md").read_text()
    assert "### cap 64: " in tables and "| S1 | " in tables and "- holds: all pages are returned" in tables
    assert len({line.count("|") for line in tables.split("### cap 64")[1].splitlines()[2:6]}) == 1
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "C", "X"}
    shown = capsys.readouterr().out
    assert "p p p d d E . ." in shown and "26 of 32 cells used" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_a_part_can_be_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--parts", "latency", "--systems", "S3", "--qps", "4", "--fractions", "", "--out", str(tmp_path)]
    assert command_line([*SMALL, *few], monkeypatch) == 0
    names = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    assert names == {"golden", "golden_iterations", "latency_cdf", "latency_phases"}
    assert "latency of 4 requests" in capsys.readouterr().out
    found = json.loads((tmp_path / "results.json").read_text())
    assert (found["runs"], found["checks"]) == ([], [])  # nothing holds of what was not run


def test_answers_of_one_token_have_no_decodes_and_no_gaps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ["--scale", "cpu", "--caps", "1", "--requests", "3", "--arrivals", "2", "--systems", "S1,S3,S4,S4r"]
    assert command_line([*tiny, "--out", str(tmp_path)], monkeypatch) == 0
    names = {path.stem for path in (tmp_path / "pictures").glob("*.png")}
    assert "batch" in names and "tails" not in names


@pytest.mark.parametrize(("cap", "batch", "published"), [(32, 16, False), (1536, 4, True), (40, 0, False)])
def test_published_figures_stand_beside_the_same_cap_only(
    cap: int, batch: int, published: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    few = ["--caps", str(cap), "--requests", "12", "--arrivals", "2", "--systems", "S1,S2,S3", "--qps", "4", "--json"]
    assert command_line([*few, "--fractions", "", "--parts", "throughput,latency"], monkeypatch) == 0
    tables = {table["title"].partition(" ")[0]: table for table in json.loads(capsys.readouterr().out)["tables"]}
    assert ("published" in tables["latency"]["columns"]) == published
    assert ("where" in tables) == bool(batch)
    if batch:
        parts = {row[0]: row[2] for row in tables["where"]["rows"]}
        assert f"batches of {batch} end" in parts["baseline artefact"]
        assert "published" not in parts  # that is of 1000 requests


def test_only_memory_bounds_a_batch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """In a pool for more sequences than the scale runs at once, the formulas of static batching hold too."""
    large = ["--scale", "gpu", "--pool", "60000", "--caps", "4", "--requests", "200", "--systems", "S0,S1,S3"]
    assert command_line([*large, "--parts", "throughput", "--json"], monkeypatch) == 0
    found = json.loads(capsys.readouterr().out)
    assert {run["system"]: run["virtual"]["steps"] for run in found["runs"]}["S1"] == 2 * 4  # batches of 115


def test_a_roof_needs_no_cost_of_the_first_token(tmp_path: Path) -> None:
    """A fit may find all that a small step costs in the part that does not depend on tokens."""
    size = SCALES["cpu"]
    profile = structs.replace(size.profile, h=0.006, L=((1, 0.0), (8, 0.0005), (512, 0.28)))
    results = Results(size, "virtual", profile, workloads(size, (16,), 6, size.vocab, 1))
    run_virtual(results, ("S1", "S3"), lambda text: None)
    draw_roofline(tmp_path, results, 16)
    assert (tmp_path / "roofline.svg").stat().st_size > 0  # and no warning came, which is an error here


def test_company_is_a_part_of_all_cores() -> None:
    company = Company()
    sum(n * n for n in range(300_000))
    company.end()
    assert 0.0 <= company.others <= 1.0
