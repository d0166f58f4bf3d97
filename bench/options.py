"""What the options of the benchmarks accept. A refusal names the option, the value and what would be right."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Collection, Mapping
from importlib.util import find_spec
from pathlib import Path

import typer

from cbdisagg.sim.arrivals import Lengths, parse_lengths
from cbdisagg.validate import RANGES

MANY = 1_000_000
"""More of anything than that is a mistake: it would run for weeks, or not fit in memory."""
MANY_WORKERS = 2_000
"""Where all reach each other, time and memory of a start grow with their square: 37 s and 0.6 GB for 1,000."""
ROUNDS = 1_000
THREADS = 1_024
TOKENS = 1 << 24
"""Of a sequence: as `[model] max_len`."""
SEEDS = (1 << 32) - 1
BURSTS = (0.01, 10_000)
PORTS = RANGES["http.port"]
LINKS_GBPS = RANGES["transfer.floor_gbps"]
TTFTS_MS, TPOTS_MS = RANGES["targets.ttft_ms"], RANGES["targets.tpot_ms"]
"""From and to: those of a config are right here too."""


def at_least(low: float, most: float = MANY) -> Callable[[float | list[int] | None], float | list[int] | None]:
    """A callback for a number, or for each of a repeated option; typer's own `min` does not name the value."""

    def check(value: float | list[int] | None) -> float | list[int] | None:
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        for number in numbers:
            if not low <= number <= most:  # so written, NaN is refused too
                raise typer.BadParameter(f"{number} is not a number from {low} up to {most:,}")
        return value

    return check


def numbers(option: str, text: str, most: int = MANY) -> list[int]:
    """Comma-separated numbers from 1 up to `most`."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not _is_count(part, most):
            raise typer.BadParameter(
                f"{part!r} in {text!r} is not a number from 1 up to {most:,}; separate with commas: 1,8",
                param_hint=f"'{option}'",
            )
    return [int(part) for part in parts]


def amounts(option: str, text: str) -> list[float]:
    """Comma-separated numbers above 0, by size."""
    found = set()
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = 0.0
        if not 0 < value <= MANY:
            raise typer.BadParameter(
                f"{part.strip()!r} in {text!r} is not a number above 0 and up to {MANY:,}; separate with commas: 0.5,1",
                param_hint=f"'{option}'",
            )
        found.add(value)
    return sorted(found)


def pairs(option: str, text: str, between: str, example: str) -> list[tuple[int, int]]:
    """Comma-separated pairs of numbers from 1 up, with a sign `between` them."""
    found = [[number.strip() for number in pair.split(between)] for pair in text.split(",")]
    if not all(len(pair) == 2 and all(_is_count(number, MANY) for number in pair) for pair in found):
        raise typer.BadParameter(
            f"{text!r}: write pairs of numbers from 1 up to {MANY:,}, as {example}", param_hint=f"'{option}'"
        )
    return [(int(first), int(second)) for first, second in found]


def _is_count(text: str, most: int) -> bool:
    """From 1 up to `most`; no sign, no leading 0."""
    return bool(re.fullmatch(r"[1-9]\d{0,17}", text, re.ASCII)) and int(text) <= most


def lengths(option: str, text: str) -> Lengths:
    """Tokens of made-up prompts or answers."""
    try:
        return parse_lengths(text)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=f"'{option}'") from None


def chosen(option: str, names: Collection[str], choices: Collection[str]) -> list[str]:
    """The names, each one of the choices."""
    for name in names:
        if name not in choices:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(choices)}", param_hint=f"'{option}'")
    return list(names)


def check_place(path: Path | None, option: str, endings: tuple[str, ...] = ()) -> None:
    """Before anything runs: may a file be written there? `endings`: those of its name, if not all will do."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise typer.BadParameter(f"{path}: there is no folder {path.parent}", param_hint=f"'{option}'")
    if path.is_dir():
        raise typer.BadParameter(f"{path}: that is a folder", param_hint=f"'{option}'")
    if endings and path.suffix not in endings:
        raise typer.BadParameter(f"{path}: the name must end in {' or '.join(endings)}", param_hint=f"'{option}'")


def make_folder(path: Path | None, option: str) -> None:
    """Before anything runs: the folder that files are to be written to."""
    if path is None:
        return
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint=f"'{option}'") from None


def command() -> str:
    """The command line of this process, as one would have to type it to the shell again."""
    return shlex.join(["cbdisagg", *sys.argv[1:]])


def refuse_unused(context: typer.Context, unused: Mapping[str, str]) -> None:
    """An option that was given and would change nothing. `unused`: parameter -> why it has no effect now."""
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        given = source is not None and source.name == "COMMANDLINE"
        if given and (why := unused.get(parameter.name or "")):
            raise typer.BadParameter(f"has no effect {why}", param_hint=f"'{parameter.opts[0]}'")


def check_picture(path: Path | None, endings: tuple[str, ...] = (".png", ".svg")) -> None:
    """The same of `--plot`, which needs matplotlib."""
    check_place(path, "--plot", endings)
    if path is not None and find_spec("matplotlib") is None:
        raise typer.BadParameter("needs matplotlib: pip install 'cbdisagg[bench]'", param_hint="'--plot'")
