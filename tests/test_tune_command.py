"""`cbdisagg tune` as it is called: the config that it writes is one that serve loads, with a reason for each value."""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path

import msgspec
import pytest
from cbdisagg_bench import tune as command
from cbdisagg_bench.tune import tune
from cbdisagg_bench.tune_config import Origin, as_toml
from rich.progress import Progress
from typer import BadParameter, Typer

from cbdisagg.config import Config, ConfigError, Policy, ProfileFile
from cbdisagg.core.profile import parse_profile
from cbdisagg.load import load_config
from cbdisagg.sim.tune import KNOBS, Trial, Tuned

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
    assert config.profile.path == PROFILE
    text = out.read_text()
    assert f'path = "{os.path.relpath(PROFILE, tmp_path)}"' in text  # it counts from the file's folder
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


def test_it_says_all_that_it_tried_and_what_that_gained(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("made", *GIVEN, *SMALL, "--turns", "12")
    call(*given)
    said = capsys.readouterr().out
    assert "aggregate" in said and "over the better baseline" in said and "simulations in" in said
    call(*given, "--json")
    tried = json.loads(capsys.readouterr().out)["trials"]
    shown = [line.strip() for line in said.splitlines() if " in time for " in line]
    assert len(shown) == len(tried) > 3
    for line, trial in zip(shown, tried, strict=True):
        assert line.startswith(trial["what"]) and ("no better" in line) == (not trial["kept"])


def test_its_bar_knows_how_many_simulations_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    totals: list[float | None] = []

    class Watched(Progress):
        def __exit__(self, *exit_: object) -> None:
            totals.append(self.tasks[0].total)
            totals.append(self.tasks[0].completed)
            super().__exit__(None, None, None)

    monkeypatch.setattr(command, "Progress", Watched)
    call("made", *GIVEN, *SMALL, "--json")
    total, completed = totals
    assert total is not None and 3 < total <= (completed or 0) + 3


def test_what_the_mode_sets_is_not_said_to_have_been_left_untried() -> None:
    config = Config(policy=Policy(mode="aggregate"), profile=ProfileFile(path="p.json"))
    kept = Trial("policy.gamma", {"policy.gamma": 0.9}, 2.0, 0.9, 0.8, 0.0, 1.5)
    vain = Trial("scheduler.token_budget", {"scheduler.token_budget": 1024}, 2.0, 0.8, 0.9, 1.5, None)
    text = as_toml(config, Tuned({}, 1.5, {"aggregate": 1.5}, [kept, vain]), Origin("x", ()))
    lines = {line.split(" =")[0]: line.split("# ", 1)[1] for line in text.splitlines() if " = " in line}
    assert lines["rho"].endswith("set by the mode, so this value has no effect") and lines["eta"].endswith("no effect")
    assert lines["gamma"].endswith(": the first that keeps up") and lines["token_budget"].endswith("1024: no better")
    free = as_toml(msgspec.structs.replace(config, policy=Policy()), Tuned({}, 1.5), Origin("x", ()))
    assert "no effect" not in free and "not tried" in free


def test_refusing_for_an_overload_is_given_as_the_reason() -> None:
    config = Config(policy=Policy(admission="early-reject"), profile=ProfileFile(path="p.json"))
    taken = Trial("policy.admission", {"policy.admission": "early-reject"}, 2.0, 0.8, 0.8, 2.0, 1.99, price=0.02)
    text = as_toml(config, Tuned({}, 1.99, {"policy": 2.0}, [taken]), Origin("x", ()))
    assert "-0.5% requests/s, for an overload: who is let in then is served in time" in text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("made", *GIVEN, "--part", "1"), "1.0 is not between 0 and 1"),
        (("made", "--ttft-ms", "0", "--tpot-ms", "9", "--profile", PROFILE), "0.0 is not a number from 0.1 up"),
        (("made", "--ttft-ms", "9", "--tpot-ms", "9"), "measure this machine: cbdisagg profile"),
        (("nowhere.csv", *GIVEN), "nowhere.csv: cannot be read: No such file"),
        (("made", *GIVEN, "--out", "/nowhere/tuned.toml"), "there is no folder /nowhere"),
        (("made", *GIVEN, "--outputs", "few"), "write a number"),
        (("made", *GIVEN, "--workers", "2001"), "2001 is not a number from 0 to 2,000"),
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
    costs = parse_profile(Path(config.profile.path).read_bytes(), config.profile.path)
    (most, _) = costs.L[-1]
    assert max(config.scheduler.token_budget, config.scheduler.max_batch) <= most  # as far as was measured
    command = path.read_text().splitlines()[1]
    assert f"--ttft-ms {config.targets.ttft_ms:g}" in command and command.endswith(f"--out configs/tuned/{path.name}")


@pytest.mark.slow  # as long as it took to tune them
@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "tuned").glob("*.toml")), ids=lambda path: path.stem)
def test_the_command_in_its_head_gives_a_tuned_config(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "configs" / "tuned").mkdir(parents=True)
    (tmp_path / "configs" / "profiles").symlink_to(ROOT / "configs" / "profiles")
    monkeypatch.chdir(tmp_path)
    words = shlex.split(path.read_text().splitlines()[1].removeprefix("#"))
    monkeypatch.setattr(sys, "argv", words)
    call(*words[2:])
    made, kept = ((folder / path.relative_to(ROOT)).read_text() for folder in (tmp_path, ROOT))
    assert _values(made) == _values(kept)


def _values(text: str) -> list[str]:
    """All lines but where the profile lies: its folder is a link here."""
    return [line for line in text.splitlines() if not line.startswith("path =")]
