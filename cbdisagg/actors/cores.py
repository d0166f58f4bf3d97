"""Which cores this process may run on, and how many of them it may keep busy: affinity mask and cgroup quota.

A container that was given two CPUs of sixty-four usually sees all sixty-four and a quota: threads beyond it only take
turns, and each is stopped for the rest of a period once the quota is used up. Linux, cgroup versions 1 and 2; elsewhere
there is no quota.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MEMBERSHIP, MOUNT = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


@dataclass(frozen=True, slots=True)
class Cores:
    """`numbers`, ascending, of which `at_once` may be busy; fewer than there are: others use these cores too."""

    numbers: tuple[int, ...]
    at_once: int

    @property
    def are_ours(self) -> bool:
        return self.at_once == len(self.numbers)


def usable_cores() -> Cores:
    numbers = tuple(sorted(os.sched_getaffinity(0)))
    return Cores(numbers, int(max(1, min(len(numbers), cpu_quota()))))


def cpu_quota(membership: Path = MEMBERSHIP, mount: Path = MOUNT) -> float:
    """CPU seconds per second that this process's cgroup and those around it may use; infinite without a limit."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return math.inf
    quota = math.inf
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            roots = [mount, mount / "unified"]
        elif "cpu" in controllers.split(","):
            roots = [mount / controllers, mount / "cpu"]
        else:
            continue
        for root in roots:
            for folder in _and_around(root, path):
                quota = min(quota, _quota_of(folder))
    return quota


def _and_around(root: Path, path: str) -> Iterator[Path]:
    """The cgroup's folder and those above it, up to the root; inside a container some of the path may not be there."""
    parts = [part for part in path.split("/") if part and part != ".."]
    for depth in range(len(parts), -1, -1):
        yield root.joinpath(*parts[:depth])


def _quota_of(folder: Path) -> float:
    """Of one folder: `cpu.max` ("max 100000" or "150000 100000"), or the two files of version 1 (-1: no limit)."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text().strip() for name in ("quota", "period"))
        return math.inf if quota in ("max", "-1") else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return math.inf
