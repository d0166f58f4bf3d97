"""The command line as a user meets it: one line for each mistake, help with examples, and nothing heavy in vain."""

from __future__ import annotations

import subprocess
import sys

import pytest

COMMANDS = ("serve", "worker", "coordinator", "api", "check", "bench")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "cbdisagg", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str) -> None:
    done = run(command, "--help")
    assert done.returncode == 0
    assert "Example:" in done.stdout
    assert f"cbdisagg {command}" in done.stdout.split("Example:")[1]


def test_without_a_command_the_help_is_shown() -> None:
    assert run().stdout == run("--help").stdout
    assert all(command in run().stdout for command in COMMANDS)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("serve", "--prt", "1"), "cbdisagg: No such option: --prt"),
        (("frobnicate",), "cbdisagg: No such command 'frobnicate'"),
        (("serve", "--port", "x"), "cbdisagg: Invalid value for '--port'"),
        (("serve", "--port", "70000"), "cbdisagg: --port: [http] port = 70000: must be from 0 to 65535"),
        (("serve", "--host", ""), 'cbdisagg: --host: [http] host = "": must be an address'),
        (("serve", "--model", ""), "cbdisagg: --model '': name a model folder"),
        (
            ("serve", "--model", "smollm2", "--set", "model.path=/tmp"),
            "cbdisagg: --model and --set model.path=/tmp exclude each other; keep one of the two",
        ),
        (
            ("serve", "--model", "/nowhere", "--port", "0"),  # any port: others may serve on this machine
            'cbdisagg: [model] path = "/nowhere": there is no such file or folder',
        ),
        (
            ("serve", "--set", "debug.journal=/proc/x"),
            'cbdisagg: [debug] journal = "/proc/x": cannot be written: No such file or directory',
        ),
        (("serve", "--no-http"), "cbdisagg: --no-http and --client go together"),
        (("serve", "--no-http", "--client", "{}"), "cbdisagg: --client {}: not the address of a client"),
        (("serve", "--config", "/nowhere.toml"), "cbdisagg: /nowhere.toml: cannot be read"),
        (("worker", "--start", "/nowhere.json"), "cbdisagg: cannot read the start file /nowhere.json"),
        (("serve", "--port", "x"), "cbdisagg: Invalid value for '--port': 'x': input should be a valid integer"),
        (("check", "/dev/null"), "cbdisagg: /dev/null is not a journal"),
    ],
)
def test_a_mistake_is_one_line_and_status_1(arguments: tuple[str, ...], line: str) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(line)


def test_a_mistake_in_a_command_points_to_the_help_of_that_command() -> None:
    assert run("serve", "--prt", "1").stderr.endswith("(see cbdisagg serve --help)\n")
    assert run("frobnicate").stderr.endswith("(see cbdisagg --help)\n")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("cbdisagg.cli", ("torch", "transformers", "numpy", "zmq", "msgspec", "rich", "aiohttp")),
        ("cbdisagg.actors.part", ("torch", "numpy", "typer", "rich", "aiohttp", "zmq")),
        ("cbdisagg.actors.api", ("torch", "transformers", "numpy")),
        ("cbdisagg.actors.coordinator", ("torch", "transformers", "numpy", "aiohttp")),
        ("cbdisagg.actors.serve", ("torch", "transformers", "numpy")),
        ("cbdisagg.actors.worker", ("torch", "transformers", "aiohttp")),
    ],
)
def test_a_process_imports_only_what_it_uses(module: str, absent: tuple[str, ...]) -> None:
    code = f"import sys, {module}; print(*(set({absent}) & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "\n"
