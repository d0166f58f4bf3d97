"""`cbdisagg simulate` as it is called: what it reads, prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from cbdisagg_bench.simulate import _workers, simulate
from typer import BadParameter, Typer

from cbdisagg.actors.journal import Journal
from cbdisagg.config import Config, ConfigError
from cbdisagg.messages import Address
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.fleet import Layout
from cbdisagg.sim.simulation import simulate as run
from cbdisagg.sim.workload import write_workload

ROOT = Path(__file__).parents[1]
CONFIG = str(ROOT / "configs" / "1p1d.toml")
PROFILE = str(ROOT / "configs" / "profiles" / "h200-llama3.1-8b.json")
SHM = str(ROOT / "configs" / "profiles" / "cpu-smollm2-135m-1-thread.json")


def call(*arguments: str) -> None:
    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(simulate)
    app([CONFIG, *arguments], standalone_mode=False)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    call(*arguments, "--json")
    return json.loads(capsys.readouterr().out)


def test_a_made_workload_gives_figures_that_only_the_seed_changes(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("made", "--profile", PROFILE, "--requests", "20", "--rate", "5", "--outputs", "8")
    first, second, other = (told(capsys, *given, "--seed", seed) for seed in ("0", "0", "1"))
    assert first["us_per_generated_token"] / first["us_per_token"] == pytest.approx((20 * 512 + 160) / 160)
    for name in ("took_s", "us_per_token", "us_per_generated_token"):
        del first[name], second[name]
    assert first == second and first["ttft_s"] != other["ttft_s"]
    assert (first["requests"], first["done"], first["generated_tokens"]) == (20, 20, 160)
    assert first["profile"]["machine"] == "NVIDIA H200"


def test_a_file_workers_and_faults(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload, script = tmp_path / "w.jsonl", tmp_path / "faults"
    workload.write_bytes(write_workload(make_workload(30, 20.0, Lengths(200), Lengths(100), 0)))
    script.write_text("0.7 kill decode-0\n")
    found = told(capsys, str(workload), "--profile", PROFILE, "--workers", "1P2D", "--faults", str(script))
    assert [use["worker"] for use in found["workers"]] == ["decode-0", "prefill-0", "decode-1"]
    assert found["done"] == 30 and found["resumed"] > 0
    call(str(workload), "--profile", PROFILE)
    assert "30 requests" in capsys.readouterr().out


def test_the_journal_of_a_coordinator_is_a_workload(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from cbdisagg.core.profile import parse_profile

    profile = parse_profile(Path(PROFILE).read_bytes(), PROFILE)
    journal = Journal(tmp_path, Address("coordinator", 5, ""), Config())

    def record(process: Any, now: float, event: Any, effects: Any) -> None:
        if process.address.name == "coordinator":
            journal.append(now, event, effects)

    asks = make_workload(10, 5.0, Lengths(100), Lengths(7), 0)
    run(Config(), profile, asks, Layout(), observer=record)
    journal.close()
    (path,) = tmp_path.glob("*.journal")
    found = told(capsys, str(path), "--profile", PROFILE)
    assert (found["requests"], found["prompt_tokens"], found["generated_tokens"]) == (10, 1000, 70)


def test_a_fault_for_nobody_is_no_proof_that_it_was_survived(tmp_path: Path) -> None:
    script = tmp_path / "faults"
    script.write_text("1 kill nobody-9\n")
    with pytest.raises(ConfigError, match="no 'nobody-9'; there are coordinator, prefill-0, decode-0"):
        call("made", "--profile", PROFILE, "--requests", "5", "--faults", str(script))


def test_who_refuses_everybody_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    call("made", "--profile", PROFILE, "--requests", "5", "--set", "policy.admission=early-reject",
         "--set", "targets.ttft_ms=1")  # fmt: skip
    said = capsys.readouterr().out
    assert "5 refused" in said and "the first that was refused: the first token would take" in said
    assert " 0.00" not in next(line for line in said.splitlines() if line.startswith("TTFT"))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("made",), "measure this machine: cbdisagg profile"),
        (("made", "--profile", PROFILE, "--workers", "2PD"), "as 2P3D or 4A"),
        (("made", "--profile", PROFILE, "--workers", "1900P200D"), "'1900P200D': at most 2,000 together"),
        (("made", "--profile", PROFILE, "--outputs", "some"), "Invalid value for '--outputs': 'some'"),
        (("made", "--profile", PROFILE, "--prompts", "uniform:9:8"), "Invalid value for '--prompts': 'uniform:9:8'"),
        (("made", "--profile", PROFILE, "--burst", "0"), "0.0 is not a number above 0"),
        (("made", "--profile", PROFILE, "--burst", "inf"), "inf is not a number above 0"),
        (("made", "--profile", PROFILE, "--rate", "-1"), "-1.0 is not a number from 0 up"),
        (("made", "--profile", PROFILE, "--rate", "nan"), "nan is not a number from 0 up"),
        (("made", "--profile", PROFILE, "--rate", "inf"), "inf is not a number from 0 up"),
        (("nowhere.jsonl", "--profile", PROFILE), "nowhere.jsonl: cannot be read: No such file"),
        (("made", "--profile", SHM, "--per-host", "1"), "say how fast they go between hosts"),
        (("made", "--profile", "nowhere.json"), "nowhere.json: cannot be read: No such file"),
        (("made", "--profile", CONFIG), "1p1d.toml: not a profile"),
        ((CONFIG, "--profile", PROFILE), "1p1d.toml: line 1: JSON is malformed"),
        (("made", "--profile", PROFILE, "--set", "kv.pages=1"), "[kv] pages = 1: at least 2 are needed"),
    ],
)
def test_what_cannot_be_simulated_is_refused_in_a_line(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises((BadParameter, ConfigError)) as refused:
        call(*arguments)
    said = refused.value.format_message() if isinstance(refused.value, BadParameter) else str(refused.value)
    assert problem in said and "\n" not in said


def test_slower_and_later_links_between_hosts_make_first_tokens_later(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("made", "--profile", PROFILE, "--requests", "20", "--rate", "5", "--prompts", "2000", "--outputs", "8")
    pushed = ("--set", "policy.mode=disaggregate", "--per-host", "1")
    fast, slow, late = (
        told(capsys, *given, *pushed, *links)["ttft_s"]["p50"]
        for links in ((), ("--link-gbps", "0.5"), ("--far-ms", "40"))
    )
    assert slow > fast + 0.4 and 0.1 < late - fast < 0.25  # 262 MB a prompt; four messages or pages on their way
    assert told(capsys, *given, "--far-ms", "40")["ttft_s"]["p50"] < fast  # all on one host


def test_workers_read_as_they_are_written() -> None:
    assert [(group.role, group.count) for group in _workers("2p10D1A")] == [("prefill", 2), ("decode", 10), ("any", 1)]


def test_a_run_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "run.svg"
    call("made", "--profile", PROFILE, "--requests", "10", "--outputs", "5", "--plot", str(picture))
    assert "time to first token" in picture.read_text() or picture.stat().st_size > 5000
    with pytest.raises(BadParameter, match=r"must end in \.png or \.svg"):
        call("made", "--profile", PROFILE, "--plot", str(tmp_path / "run.txt"))
