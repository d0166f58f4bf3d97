"""What the options of the benchmarks accept. A refusal names the option, the value and what would be right."""

from __future__ import annotations

from collections.abc import Callable, Collection

import typer


def at_least(low: int) -> Callable[[float | list[int] | None], float | list[int] | None]:
    """A callback for a number, or for each of a repeated option; typer's own `min` does not name the value."""

    def check(value: float | list[int] | None) -> float | list[int] | None:
        numbers = value if isinstance(value, list) else [] if value is None else [value]
        for number in numbers:
            if not number >= low:
                raise typer.BadParameter(f"{number} is not a number from {low} up")
        return value

    return check


def numbers(option: str, text: str) -> list[int]:
    """Comma-separated numbers from 1 up."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and int(part)):
            raise typer.BadParameter(
                f"{part!r} in {text!r} is not a number from 1 up; separate with commas: 1,8", param_hint=f"'{option}'"
            )
    return [int(part) for part in parts]


def chosen(option: str, names: Collection[str], choices: Collection[str]) -> list[str]:
    """The names, each one of the choices."""
    for name in names:
        if name not in choices:
            raise typer.BadParameter(f"{name!r} is not one of {', '.join(choices)}", param_hint=f"'{option}'")
    return list(names)
