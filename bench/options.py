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

ENORMOUS = 1e12
"""More than any option can sensibly be."""
MANY_WORKERS = 2_000
"""Where all reach each other, time and memory of a start grow with their square: 37 s and 0.6 GB for 1,000."""


def at_least(low: float, most: float = ENORMOUS) -> Callable[[float | list[int] | None], float | list[int] | None]:
    """A callback for a number, or for each of a repeated option; typer's own `min` does not name the value."""
    right = _right(low, most)

    def check(value: float | list[int] | None) -> float | list[int] | None:
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        for number in numbers:
            if not low <= number <= most:
                raise typer.BadParameter(f"{number} is not a number {right}")
        return value

    return check


def numbers(option: str, text: str, most: float = ENORMOUS) -> list[int]:
    """Comma-separated numbers from 1 up."""
    parts = [part.strip() for part in text.split(",")]
    right = _right(1, most)
    for part in parts:
        if not (part.isascii() and part.isdigit() and 1 <= int(part) <= most):
            raise typer.BadParameter(
                f"{part!r} in {text!r} is not a number {right}; separate with commas: 1,8", param_hint=f"'{option}'"
            )
    return [int(part) for part in parts]


def _right(low: float, most: float) -> str:
    return f"from {low:,} up" if most == ENORMOUS else f"from {low:,} to {most:,}"


def amounts(option: str, text: str) -> list[float]:
    """Comma-separated numbers above 0, by size."""
    found = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d*\.?\d+", part, re.ASCII) and float(part) for part in found):
        raise typer.BadParameter(f"{text!r}: write numbers above 0, as 0.5,1", param_hint=f"'{option}'")
    return sorted({float(part) for part in found})


def pairs(option: str, text: str, between: str, example: str) -> list[tuple[int, int]]:
    """Comma-separated pairs of numbers from 1 up, with a sign `between` them."""
    number = r"([1-9]\d*)"
    found = [re.fullmatch(rf"\s*{number}{re.escape(between)}{number}\s*", part, re.ASCII) for part in text.split(",")]
    if not all(found):
        raise typer.BadParameter(f"{text!r}: write pairs of numbers from 1 up, as {example}", param_hint=f"'{option}'")
    return [(int(pair[1]), int(pair[2])) for pair in found if pair]


def lengths(option: str, text: str) -> Lengths:
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
