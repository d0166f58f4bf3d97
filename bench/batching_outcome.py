"""Everything that one command of the experiment found, and who made it. Tables and JSON; no pictures here."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from cbdisagg_bench.batching_checks import Check
from cbdisagg_bench.batching_factors import Factor
from cbdisagg_bench.batching_latency import Latencies, Tail
from cbdisagg_bench.batching_run import Results
from cbdisagg_bench.batching_tables import (
    Rows,
    as_json,
    factor_rows,
    latency_rows,
    system_rows,
    tail_rows,
    throughput_rows,
)
from cbdisagg_bench.machine import processor

from cbdisagg.core.profile import Profile


@dataclass(slots=True)
class Report:
    """Everything that one command found. `origin`: command, seed, machine, versions, and what was left out."""

    results: Results
    checks: list[Check]
    factors: list[Factor]
    latencies: list[Latencies]
    tails: list[Tail]
    load: float
    origin: dict[str, Any] = field(default_factory=dict)

    @property
    def tables(self) -> list[Rows]:
        latency = [one.system for one in self.latencies]
        named = dict.fromkeys([*self.results.systems, *latency, *(point.system for point in self.tails)])
        found = [system_rows(list(named)), *throughput_rows(self.results)]
        if self.factors:
            found.append(factor_rows(self.factors))
        if self.latencies:
            found.append(latency_rows(self.latencies, self.results.scale))
        if self.tails:
            found.append(tail_rows(self.tails, self.load))
        return found

    def as_json(self) -> dict[str, Any]:
        checked = [{"holds": check.holds, "text": check.text} for check in self.checks]
        tables = [{"title": rows.title, "columns": rows.columns, "rows": rows.rows} for rows in self.tables]
        return {**self.origin, **as_json(self.results), "tables": tables, "checks": checked}


def origin(command: Sequence[str], seed: int, profile: Profile) -> dict[str, Any]:
    """Who made this, by which costs: nothing that names a folder or a user of the machine."""
    return {
        "command": " ".join(["cbdisagg", "bench", *_without_folder(command)]),
        "seed": seed,
        "machine": f"{processor()}, {len(os.sched_getaffinity(0))} cores used",
        "versions": {
            "python": platform.python_version(),
            **{name: version(name) for name in ("cbdisagg", "numpy", "torch")},
        },
        "model": f"{profile.model}, {profile.machine}: {profile.note}",
        "dtype": profile.dtype,
    }


def _without_folder(command: Sequence[str]) -> list[str]:
    """Where a report was written, and where a model lies, is nobody's affair."""
    words = list(command)
    if "--out" in words:
        del words[words.index("--out") : words.index("--out") + 2]
    return [Path(word).name if Path(word).is_absolute() else word for word in words if not word.startswith("--out=")]
