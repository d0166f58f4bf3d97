"""One part of `cbdisagg bench gpu`, in a process of its own: rows as JSON lines on stdout, as they are measured.

Usage: python -m cbdisagg_bench.gpu_part PART DEVICE LIMIT_S: how long it may take is told for those who can do less.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib import import_module

from cbdisagg_bench.gpu_rows import Row, Setting, setting

from cbdisagg.cli import fail
from cbdisagg.config import ConfigError

PARTS = {
    "kernels": ("gpu_kernels", "run"),
    "rates": ("gpu_rates", "run"),
    "steps": ("gpu_steps", "run"),
    "ipc": ("gpu_ipc", "run"),
    "pair": ("gpu_services", "pair"),
    "article": ("gpu_article", "alone"),
    "article-pair": ("gpu_article", "as_pair"),
    "kills": ("gpu_kills", "run"),
}
"""Module and function of each, in the order in which they run."""
SPEEDS = ("x", "steps")
"""Units of what the interpreter says nothing of."""


def main(part: str, device: str, limit_s: str) -> None:
    module, function = PARTS[part]
    try:
        run: Callable[[Setting], Iterator[Row]] = getattr(import_module(f"cbdisagg_bench.{module}"), function)
        where = setting(device, float(limit_s))
        for row in run(where):
            if where.tiny and row.unit in SPEEDS:
                row = replace(row, aim="", holds=None)
            print(json.dumps(asdict(row)), flush=True)
    except ConfigError as error:
        fail(str(error))


if __name__ == "__main__":
    main(*sys.argv[1:])
