"""What goes wrong when, by script: one line `at_s kind target [factor]` for each fault.

Kinds: `kill` a worker or the coordinator (its supervisor starts it anew), `leave` (a worker is asked to end: its
requests move), `slow` (a worker computes `factor` times as slowly from then on; 1 ends it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from cbdisagg.config import ConfigError
from cbdisagg.sim.workload import LONGEST_S

Kind: TypeAlias = Literal["kill", "leave", "slow"]
COORDINATOR = "coordinator"
FACTORS = (0.001, 1_000.0)


@dataclass(frozen=True, slots=True)
class Fault:
    """`target` is a name, as "decode-0": whoever bears it at `at_s`. Nobody: nothing happens."""

    at_s: float
    kind: Kind
    target: str
    factor: float = 1.0


def parse_faults(text: str, source: str) -> list[Fault]:
    """The faults in the file `source`. Empty lines, and those that begin with #, say nothing. Raises ConfigError."""
    faults = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split("#", 1)[0].split()
        if not words:
            continue
        try:
            faults.append(_fault(words))
        except ValueError as error:
            raise ConfigError(f"{source}: line {number}: {error}; write: 12.5 kill decode-0") from None
    return faults


def _fault(words: list[str]) -> Fault:
    if len(words) not in (3, 4):
        raise ValueError(f"{len(words)} words, {' '.join(words)!r}; a time, a kind and a target are needed")
    at_s, kind, target = _number(words[0], "at_s", 0.0, LONGEST_S), words[1], words[2]
    factor = _number(words[3], "factor", *FACTORS) if len(words) == 4 else 1.0
    if kind not in get_args(Kind):
        raise ValueError(f"kind = {kind!r}: must be one of {', '.join(get_args(Kind))}")
    if (kind == "slow") != (len(words) == 4):
        raise ValueError(f"{' '.join(words)!r}: slow, and nothing else, has a factor, as in 12.5 slow decode-0 2")
    if kind != "kill" and target == COORDINATOR:
        raise ValueError(f"{' '.join(words)!r}: the coordinator can only be killed")
    return Fault(at_s, kind, target, factor)  # type: ignore[arg-type]  # one of the kinds: looked up above


def _number(text: str, name: str, low: float, most: float) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not low <= value <= most:
        raise ValueError(f"{name} = {text!r}: must be a number from {low:g} to {most:,.10g}")
    return value
