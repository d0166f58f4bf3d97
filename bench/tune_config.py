"""A tuned config as a TOML file: every value with the reason why it is that one.

Knows a config, what the tuner tried and what came of it; the text loads to exactly that config (load.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from cbdisagg.config import Config
from cbdisagg.sim.tune import KNOBS, POLICY, SET_BY_MODE, Trial, Tuned
from cbdisagg.sim.variants import value_of
from cbdisagg.validate import show

PINS = {
    "policy.pin_prefill": "workers that only prefill",
    "policy.pin_decode": "workers that only decode",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """How it came about: the command, and what was known of the workers and the requests."""

    command: str
    lines: Sequence[str]


def as_toml(config: Config, found: Tuned, origin: Origin) -> str:
    """The settings that differ from their defaults, and all that were tuned; then the baselines, for comparison."""
    reasons = dict(_reasons(config, found))
    default = Config()
    parts = [*(f"# {line}".rstrip() for line in _head(found, origin)), ""]
    for section in config.__struct_fields__:
        if section == "workers":
            parts += _workers(config)
            continue
        values, usual = getattr(config, section), getattr(default, section)
        lines = [
            f"{name} = {show(value)}".ljust(26) + f" # {reasons.get(f'{section}.{name}', 'as given')}"
            for name, value in msgspec.structs.asdict(values).items()
            if f"{section}.{name}" in reasons or value != getattr(usual, name)
        ]
        if lines:
            parts += [f"[{section}]", *lines, ""]
    return "\n".join(parts)


def _head(found: Tuned, origin: Origin) -> Iterator[str]:
    yield "Tuned in the simulator by:"
    yield f"  {origin.command}"
    yield from origin.lines
    rates = sorted(found.starts.items(), key=lambda item: -item[1])
    yield f"It keeps up with {found.sustained:.3g} requests/s; as they come: " + ", ".join(
        f"{name} {rate:.3g}" for name, rate in rates
    )


def _workers(config: Config) -> list[str]:
    lines = []
    for group in config.workers:
        lines += ["[[workers]]", f'role = "{group.role}"'.ljust(27) + "# what a worker may do is set by the pins below"]
        lines += [f"count = {group.count}".ljust(27) + "# as given"]
        if group.device != "cpu":
            lines += [f'device = "{group.device}"'.ljust(27) + "# as given"]
        lines += [""]
    return lines


def _reasons(config: Config, found: Tuned) -> Iterator[tuple[str, str]]:
    """(dotted key, comment) of all that was tuned, and of the targets."""
    yield "profile.path", "what steps cost where it was tuned, from here: measure your own with cbdisagg profile"
    yield "targets.ttft_ms", "time to first token, in ms: the goal"
    yield "targets.tpot_ms", "time per output token, in ms: the goal"
    mode = value_of(config, "policy.mode")
    start = max(found.starts, key=lambda name: found.starts[name], default=POLICY)
    yield "policy.mode", f"the search began with {start}" + (", and nothing else was better" if mode != "auto" else "")
    for key, meaning in PINS.items():
        yield key, f"{meaning}: {_why('pins', key, config, found.trials)}"
    for knob in KNOBS:
        yield knob.key, f"{knob.meaning}: {_why(knob.key, knob.key, config, found.trials)}"


def _why(what: str, key: str, config: Config, trials: Sequence[Trial]) -> str:
    """What turning it gained, or what was tried in vain."""
    if key in SET_BY_MODE and value_of(config, "policy.mode") != "auto":
        return "set by the mode, so this value has no effect"
    tried = [trial for trial in trials if trial.what == what]
    kept = [trial for trial in tried if trial.kept]
    if kept and kept[-1].price and kept[-1].raised <= 0:
        return f"{kept[-1].gain}: who is let in then is served in time"
    if kept:
        first = [] if kept[0].best else [kept[0].gain]
        gained = sum(trial.raised for trial in kept)
        return ", then ".join([*first, *([f"+{gained:.1%} requests/s over what it was"] if gained else [])])
    others = dict.fromkeys(show(trial.values[key]) for trial in tried)
    others.pop(show(value_of(config, key)), None)
    return f"{', '.join(others)}: no better" if others else "not tried"
