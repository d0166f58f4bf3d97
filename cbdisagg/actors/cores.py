"""Which cores this process may run on, how many of them it may keep busy (affinity mask and cgroup quota), and how a
thread that computes shares its own with those that wake for a message.

A container that was given two CPUs of sixty-four usually sees all sixty-four and a quota: threads beyond it only take
turns, and each is stopped for the rest of a period once the quota is used up. Linux, cgroup versions 1 and 2; elsewhere
there is no quota.
"""

from __future__ import annotations

import ctypes
import math
import os
import platform
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
ATTRIBUTES_BYTES, LONGEST_SLICE_NS = 48, 100_000_000
"""Of `struct sched_attr` (sched_setattr(2)): size, policy, flags, nice, priority, runtime (the slice), and two more."""
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


def yield_soon() -> None:
    """Let others interrupt this thread, and those that it starts, as soon as they wake; its share of the core stays.

    A thread that computes for long asks Linux (6.12 and later; elsewhere nothing happens) for the longest slices, so
    that one with shorter ones, which has waited for a message, need not wait for the end of the slice that runs.
    """
    number = SCHED_SETATTR.get(platform.machine())
    if sys.platform == "linux" and number is not None and os.sched_getscheduler(0) == os.SCHED_OTHER:
        nice = os.getpriority(os.PRIO_PROCESS, 0)
        attributes = struct.pack("=IIQiIQQQ", ATTRIBUTES_BYTES, os.SCHED_OTHER, 0, nice, 0, LONGEST_SLICE_NS, 0, 0)
        ctypes.CDLL(None).syscall(number, 0, attributes, 0)  # if it may not, or does not know how: no harm is done


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
