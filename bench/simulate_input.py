"""What a simulation is given on a command line: requests from a file or made up, and the profile of the workers.

Knows files and the options' names for refusals; simulates nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import typer
from cbdisagg_bench.options import ENORMOUS, lengths

from cbdisagg.actors.journal import JournalError, read_journal
from cbdisagg.config import Config, ConfigError
from cbdisagg.core.events import CoordinatorEvent
from cbdisagg.core.profile import Profile, parse_profile
from cbdisagg.sim.arrivals import make_workload, rearrive, resample
from cbdisagg.sim.traces import read_recorded, read_requests
from cbdisagg.sim.workload import Ask

MADE = "made"
PROFILE = Path(__file__).resolve().parents[1] / "configs" / "profiles" / "h200-llama3.1-8b.json"
"""Where none is asked for."""


def read_bytes(path: Path) -> bytes:
    """Raises ConfigError: one line that names the file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None


def read_profile(config: Config, given: Path | None) -> Profile:
    """The one given, else that of the config."""
    path = given or (Path(config.profile.path).expanduser() if config.profile.path else None)
    if path is None:
        raise typer.BadParameter(
            "name one, as configs/profiles/h200-llama3.1-8b.json, or measure this machine: cbdisagg profile",
            param_hint="'--profile'",
        )
    return parse_profile(read_bytes(path), str(path))


def read_asks(source: Path, count: int, rate: float, burst: float, prompts: str, outputs: str, seed: int) -> list[Ask]:
    """`count` 0: all of a file, or 100 made ones. `rate` 0: as the file has them, made ones all at once."""
    if not 0 < burst < ENORMOUS:
        raise typer.BadParameter(f"{burst} is not a number above 0", param_hint="'--burst'")
    if str(source) == MADE:
        both = lengths("--prompts", prompts), lengths("--outputs", outputs)
        return make_workload(count or 100, rate, *both, seed, burst)
    asks = _recorded(source) if source.suffix == ".journal" else read_requests(read_bytes(source), str(source))
    if count > len(asks) and not rate:
        raise typer.BadParameter(
            f"{source} has {len(asks)} requests; more can be drawn from its lengths at a --rate (cbdisagg simulate)",
            param_hint="'--requests'",
        )
    if count:
        asks = asks[:count] if count <= len(asks) else resample(asks, count, seed)
    return rearrive(asks, rate, seed, burst) if rate else asks


def _recorded(source: Path) -> list[Ask]:
    """What a live server's coordinator was asked."""
    try:
        header, records = read_journal(source)
        if header.worker is not None:
            raise ConfigError(f"{source} is the journal of {header.address.name}; take the coordinator's")
        return read_recorded(_events(records), str(source))
    except JournalError as error:
        raise ConfigError(str(error)) from None


def _events(records: Iterable[tuple[int, float, str, object, int | None]]) -> Iterable[tuple[float, CoordinatorEvent]]:
    for _, now, _, event, _ in records:
        yield now, event  # type: ignore[misc]  # a coordinator's journal holds a coordinator's events
