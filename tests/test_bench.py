"""The benchmarks: what a command line is refused for, what the tables show."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import get_type_hints

import pytest
from cbdisagg_bench import (
    batching,
    decision,
    faults,
    goodput,
    handover,
    kernels,
    load,
    overhead,
    peers,
    profile,
    quality,
    service_memory,
    simulate,
    step,
    trace_journal,
    transfer,
    tune,
    validity,
)
from cbdisagg_bench.progress import EVERY_S, progress_bar
from cbdisagg_bench.service import ServiceFailed
from rich.console import Console
from rich.progress import BarColumn, TextColumn

from cbdisagg import cli

CONFIG = Path(__file__).parents[1] / "configs" / "1p1d.toml"


def command_line(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of `cbdisagg bench` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["cbdisagg", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("step --batches a,b", "from 1 up"),
        ("step --batches 0", "from 1 up"),
        ("step --contexts 128,,512", "from 1 up"),
        ("step --contexts -1", "from 1 up"),
        ("step --dtypes float64", "bfloat16, float32"),
        ("step --repeat 1", "from 2 up"),
        ("step --repeat 4 --contexts 8192", "at the last step 8193 tokens, and the model sees 8192"),
        ("handover --repeat 0", "from 2 up"),
        ("handover --repeat 1", "from 2 up"),
        ("handover --dtype foo", "bfloat16, float32"),
        ("transfer --tokens 0", "from 1 up"),
        ("transfer --kind foo", "shm, zmq"),
        ("transfer --repeats 2", "from 3 up"),
        ("serve http://127.0.0.1:9 --requests 0", "from 1 up"),
        ("serve http://127.0.0.1:9 --concurrency 0", "from 1 up"),
        ("serve http://127.0.0.1:9 --rate -1", "from 0 up"),
    ],
)
def test_refusal_is_one_line_with_option_value_and_what_is_right(
    arguments: str, right: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("work has begun")

    for module, name in ((step, "machine"), (handover, "measure"), (transfer, "Pair"), (load, "find")):
        monkeypatch.setattr(module, name, too_late)
    words = arguments.split()
    assert command_line(words, monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    *_, option, value = words
    assert f"'{option}'" in line and right in line
    assert all(part in line for part in value.split(","))


COMMANDS = {
    "simulate": (simulate.simulate, ["config.toml", "made"]),
    "tune": (tune.tune, ["made", "--ttft-ms", "100", "--tpot-ms", "10"]),
    "profile": (profile.profile, []),
    "bench batching": (batching.batching, []),
    "bench decision": (decision.decision, []),
    "bench faults": (faults.faults, []),
    "bench goodput": (goodput.goodput, []),
    "bench handover": (handover.handover, []),
    "bench kernels": (kernels.kernels, []),
    "bench memory": (service_memory.memory, ["config.toml"]),
    "bench overhead": (overhead.overhead, ["config.toml"]),
    "bench peers": (peers.peers, ["static", "."]),
    "bench quality": (quality.quality, []),
    "bench serve": (load.load, ["http://127.0.0.1:9"]),
    "bench step": (step.step, []),
    "bench trace": (trace_journal.trace, ["x.journal"]),
    "bench transfer": (transfer.transfer, []),
    "bench validity": (validity.validity, [str(CONFIG), "--profile", str(CONFIG)]),
}
"""What takes numbers, with arguments that it cannot do without."""


def numeric(command: Callable[..., None]) -> list[str]:
    """Its options that take a number."""
    kinds = get_type_hints(command)
    numbers = (int, float, int | None, list[int] | None)
    return [f"--{name.replace('_', '-')}" for name, kind in kinds.items() if kind in numbers]


@pytest.mark.parametrize("name", COMMANDS)
def test_no_number_of_any_command_may_be_anything(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither text, nor what is no finite number, nor one that is beyond all measure. All are looked at before work."""
    command, needed = COMMANDS[name]
    options = numeric(command)
    assert options
    for option in options:
        for value in ("text", "nan", "inf", "-1", "1e308", "9" * 30):
            monkeypatch.setattr(sys, "argv", ["cbdisagg", *name.split(), *needed, option, value])
            with pytest.raises(SystemExit) as ended:
                cli.main()
            (line,) = capsys.readouterr().err.splitlines()
            assert ended.value.code == 1 and f"'{option}'" in line and ("number" in line or "integer" in line)
            assert value in line or str(float(value)) in line


def test_where_there_is_no_terminal_a_line_tells_now_and_then_how_far_it_is() -> None:
    clock, said = [0.0], io.StringIO()
    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[runs]} runs"))
    with progress_bar(*columns, console=Console(file=said), now=lambda: clock[0]) as bar:
        task, other = bar.add_task("cells", total=8, runs=0), bar.add_task("others", total=None, runs=1)
        bar.advance(task)
        assert said.getvalue() == ""
        clock[0] = EVERY_S
        bar.update(task, advance=1, description="chat, tight", runs=9)
        bar.update(task, runs=10)
        clock[0] = 2 * EVERY_S
        bar.advance(other, 3)
    assert said.getvalue().splitlines() == ["chat, tight, 9 runs, 2 of 8", "others, 1 runs, 3"]


def test_on_a_terminal_it_is_a_bar() -> None:
    said = io.StringIO()
    with progress_bar(console=Console(file=said, force_terminal=True, width=80)) as bar:
        bar.advance(bar.add_task("cells", total=8))
        bar.refresh()
    assert "cells" in said.getvalue() and "━" in said.getvalue()


async def test_a_service_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceFailed, match=r"the service pair did not get ready: cbdisagg: .*nonsense"):
        async with handover.service("pair", "nonsense = 1\n", "float32"):
            pass


# ---------------------------------------------------------------------------------------------------------- tables


def shown(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    return text.getvalue()


def test_steps_table_fits_a_terminal_of_80_columns() -> None:
    row = step.Row(
        "prefill", "native", "bfloat16", 32, 1024, 1148.43, 112.31, 12345.0, 65.0, 1114.0, 0.87, 0.58, 9999.0, 1.24
    )
    text = shown(step._table([row], 2))
    assert "…" not in text
    for word in ("prefill", "native", "bf16", "1148", "112", "12345", "spread", "87%", "0.58", "124%"):
        assert word in text


def test_transfers_table_fits_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = transfer.Row(
        kind="shm",
        tokens=2048,
        mib=45.0,
        first_ms=123.45,
        median_ms=112.34,
        p10_ms=101.2,
        p90_ms=123.4,
        gb_per_s=10.1,
        runner_ms=111.11,
        memcpy_ms=11.22,
        memcpy_gb_per_s=9.9,
    )
    transfer._print_table([row], {"shm": 1e9})
    text = capsys.readouterr().out
    for word in ("2048", "123.45", "112.34", "101-123", "10.1", "111.11", "11.22", "9.9", "memcpy"):
        assert word in text
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


def test_a_pair_that_is_interrupted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the processes are being joined: the child has ended, the folder is gone."""

    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    pair = transfer.Pair("zmq", 1)
    monkeypatch.setattr(transfer.Pair, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.__enter__()
    assert pair._child.returncode == 0
    assert not Path(pair._folder.name).exists()
