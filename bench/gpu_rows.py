"""What the parts of `cbdisagg bench gpu` have in common: the device, how large everything is, and rows of results."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cbdisagg.engine.device import Device, HostDevice, open_device


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. `aim`: what it should be, as text; `holds`: whether it is; None where there is no aim."""

    part: str
    what: str
    value: float
    unit: str
    aim: str = ""
    holds: bool | None = None


@dataclass(frozen=True, slots=True)
class Setting:
    """`name`: cuda:N, or cpu: then kernels run in Triton's interpreter, and all is tiny: it tries the way only.

    `until`: when the part has to be done, of the monotonic clock.
    """

    name: str
    device: Device
    until: float

    @property
    def tiny(self) -> bool:
        return self.name == "cpu"

    @property
    def torch_device(self) -> torch.device:
        return self.device.torch_device

    def size(self, whole: int, tiny: int) -> int:
        return tiny if self.tiny else whole


def setting(name: str, limit_s: float = math.inf) -> Setting:
    """Raises ConfigError if there is no such device."""
    until = time.monotonic() + limit_s
    return Setting(name, HostDevice() if name == "cpu" else open_device(name), until)


BUSY_CYCLES = 2_000_000
"""About a millisecond of a GPU."""


def seconds(setting: Setting, call: Callable[[], object], repeat: int = 20) -> float:
    """The median time of a call on the device, after two that warm up. Each is timed by itself, between events.

    The device is kept busy while the call is queued: else what is timed of a short kernel is how Python launches it.
    """
    repeat = setting.size(repeat, 2)
    if setting.tiny:
        call()
        return statistics.median(_host_seconds(call) for _ in range(repeat))
    times = []
    with setting.device.queueing():
        for n in range(2 + repeat):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            begin.record()
            call()
            end.record()
            end.synchronize()
            if n >= 2:
                times.append(begin.elapsed_time(end) / 1e3)
    return statistics.median(times)


def _host_seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def copy_bytes_per_s(setting: Setting) -> float:
    """Bytes read and written by a copy within the device's memory, more than its caches hold."""
    source = torch.ones(setting.size(1 << 30, 1 << 16), dtype=torch.uint8, device=setting.torch_device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / seconds(setting, lambda: target.copy_(source))


def at_least(part: str, what: str, value: float, unit: str, least: float) -> Row:
    return Row(part, what, value, unit, f">= {least:g}", value >= least)


def at_most(part: str, what: str, value: float, unit: str, most: float) -> Row:
    return Row(part, what, value, unit, f"<= {most:g}", value <= most)
