"""What a benchmark says about the machine that it ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path


def processor() -> str:
    """Its name where Linux tells it, else its kind."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()


def machine_name() -> str:
    """The processor, and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0))
    return f"{processor()}, {cores} core{'s' if cores > 1 else ''}"
