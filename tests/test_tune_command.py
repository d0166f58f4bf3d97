"""`cbdisagg tune` as it is called: the config that it writes is one that serve loads, with a reason for each value."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cbdisagg_bench.tune import tune
from typer import BadParameter, Typer

from cbdisagg.config import ConfigError
from cbdisagg.load import load_config
from cbdisagg.sim.tune import KNOBS

ROOT = Path(__file__).parents[1]
PROFILE = str(ROOT / "configs" / "profiles" / "h200-llama3.1-8b.json")
GIVEN = ("--ttft-ms", "300", "--tpot-ms", "20", "--profile", PROFILE)
SMALL = ("--requests", "40", "--prompts", "exponential:300:900", "--outputs", "4", "--workers", "2", "--turns", "3")


def call(*arguments: str) -> None:
    app = Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(tune)
    app(list(arguments), standalone_mode=False)


def test_what_it_writes_is_what_it_found_and_serve_loads_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "tuned.toml"
    call("made", *GIVEN, *SMALL, "--set", "kv.memory_mb=2048", "--out", str(out), "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["starts"].keys() == {"policy", "aggregate", "1P:1D"}
    assert told["sustained"] >= told["baseline"] > 0 and len(told["trials"]) <= told["runs"]
    config = load_config(out)
    for key, value in told["best"].items():
        section, name = key.split(".")
        assert getattr(getattr(config, section), name) == value
    assert (config.targets.ttft_ms, config.targets.tpot_ms, config.kv.memory_mb) == (300, 20, 2048)
    assert sum(group.count for group in config.workers) == 2 and config.policy.queue_limit == 256
    text = out.read_text()
    for knob in KNOBS:
        (line,) = [line for line in text.splitlines() if line.startswith(knob.key.split(".")[1] + " =")]
        assert f"# {knob.meaning}: " in line
    assert "keeps up with" in text and "40 requests of" in text


def test_workers_stay_on_their_devices(tmp_path: Path) -> None:
    out = tmp_path / "tuned.toml"
    given = ("--config", str(ROOT / "configs" / "gpu-2p2d.toml"), "--set", "kv.memory_mb=2048", "--workers", "5")
    call("made", *GIVEN, *SMALL, "--turns", "0", *given, "--out", str(out), "--json")
    devices = [(group.device, group.count) for group in load_config(out).workers]
    assert devices == [("cuda:0", 2), ("cuda:1", 1), ("cuda:2", 1), ("cuda:3", 1)]


def test_who_may_not_refuse_does_not(capsys: pytest.CaptureFixture[str]) -> None:
    call("made", *GIVEN, *SMALL, "--turns", "30", "--no-refuse", "--json")
    told = json.loads(capsys.readouterr().out)
    assert told["trials"] and not any("policy.admission" in trial["what"] for trial in told["trials"])
    assert "policy.admission" not in told["best"]


def test_it_says_what_it_tried_and_gained(capsys: pytest.CaptureFixture[str]) -> None:
    call("made", *GIVEN, *SMALL)
    said = capsys.readouterr().out
    assert "aggregate" in said and "over the better baseline" in said and "simulations in" in said


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("made", *GIVEN, "--part", "1"), "1.0 is not between 0 and 1"),
        (("made", "--ttft-ms", "0", "--tpot-ms", "9", "--profile", PROFILE), "0.0 is not a number from 0.1 up"),
        (("made", "--ttft-ms", "9", "--tpot-ms", "9"), "measure this machine: cbdisagg profile"),
        (("nowhere.csv", *GIVEN), "nowhere.csv: cannot be read: No such file"),
        (("made", *GIVEN, "--out", "/nowhere/tuned.toml"), "there is no folder /nowhere"),
        (("made", *GIVEN, "--outputs", "few"), "write a number"),
        (("made", "--ttft-ms", "0.1", "--tpot-ms", "0.1", "--profile", PROFILE, *SMALL), "no setting serves 90%"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_a_line(arguments: tuple[str, ...], problem: str) -> None:
    with pytest.raises((BadParameter, ConfigError)) as refused:
        call(*arguments)
    said = refused.value.format_message() if isinstance(refused.value, BadParameter) else str(refused.value)
    assert problem in said and "\n" not in said


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "tuned").glob("*.toml")), ids=lambda path: path.stem)
def test_the_tuned_configs_that_come_along_load_and_say_how_they_were_made(path: Path) -> None:
    config = load_config(path)
    assert config.policy.mode in ("auto", "aggregate") and sum(group.count for group in config.workers) == 2
    command = path.read_text().splitlines()[1]
    assert f"--ttft-ms {config.targets.ttft_ms:g}" in command and command.endswith(f"--out configs/tuned/{path.name}")
