"""Configs that differ from another in a few keys: what a search tries, and what it is compared with.

Knows dotted keys outside [[workers]] and `workers`, the number of equal ones. The two baselines are settings of the
same policy: aggregation, and x workers that only prefill with y that only decode.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TypeAlias

from msgspec.structs import replace

from cbdisagg.config import Config, Workers

Values: TypeAlias = Mapping[str, object]
"""Dotted key -> value, as `--set` has them."""

AGGREGATE: Values = MappingProxyType({"policy.mode": "aggregate", "policy.pin_prefill": 0, "policy.pin_decode": 0})
FREE: Values = MappingProxyType({"policy.mode": "auto", "policy.pin_prefill": 0, "policy.pin_decode": 0})


def disaggregate(prefills: int, decodes: int) -> Values:
    return {"policy.mode": "disaggregate", "policy.pin_prefill": prefills, "policy.pin_decode": decodes}


def splits(workers: int) -> Iterator[tuple[int, int]]:
    """All ways to share workers between the phases."""
    return ((prefills, workers - prefills) for prefills in range(1, workers))


def equal_workers(config: Config, count: int) -> Config:
    """With `count` workers that do both, on the devices of the config's; threads, cores and memory shared out anew."""
    theirs = [group.device for group in config.workers for _ in range(group.count)]
    each = Counter(theirs[n % len(theirs)] for n in range(count))
    return replace(config, workers=tuple(Workers(role="any", count=n, device=device) for device, n in each.items()))


def changed(config: Config, values: Values) -> Config:
    sections: dict[str, dict[str, object]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        sections.setdefault(section, {})[name] = value
    return replace(config, **{name: replace(getattr(config, name), **new) for name, new in sections.items()})


def value_of(config: Config, key: str) -> object:
    section, name = key.split(".")
    value: object = getattr(getattr(config, section), name)
    return value
