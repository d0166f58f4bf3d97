"""How much of the machine others used while something was measured: it belongs to every wall-clock result."""

from __future__ import annotations

import os

import psutil

QUIET = 0.1
"""Up to this part of the cores in others' hands, measured times are taken for the machine's own."""


class Company:
    """From its making to its end. `others`: the part of all cores' time that other processes had."""

    def __init__(self) -> None:
        self._busy, self._all, self._own = _times()
        self.others = 0.0

    def end(self) -> None:
        busy, all_, own = _times()
        spent = all_ - self._all
        self.others = max(0.0, (busy - self._busy) - (own - self._own)) / spent if spent else 0.0


def _times() -> tuple[float, float, float]:
    """Seconds of all cores: at work, in all; and those of this process and its ended children."""
    cpu, own = psutil.cpu_times(), os.times()
    all_ = sum(getattr(cpu, name) for name in ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal"))
    return all_ - cpu.idle - cpu.iowait, all_, own.user + own.system + own.children_user + own.children_system
