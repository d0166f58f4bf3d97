"""The part of `cbdisagg bench gpu` that kills workers of a tiny model's service under load, each as often as another.

Knows `bench faults`, which makes the kills and compares every answer with the undisturbed one. A worker takes some
seconds to be there again (a process, torch, a context on the GPU, graphs), so there are several of each role, and one
is killed as soon as another of its role is there. What the time does not suffice for is not made, and is said.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from cbdisagg_bench.gpu_models import TINY, write_folder
from cbdisagg_bench.gpu_rows import Row, Setting, at_least, at_most
from cbdisagg_bench.gpu_services import config_text

PART = "kills"
KILLS, PLACES = 20, 4
"""Of each role: kills, and workers; so many that the supervisor has no reason yet to wait long between restarts."""
REQUESTS = 16
FINISH_S = 15.0
"""What is left for after the last kill: workers come back, all is asked once more, and compared."""


def run(setting: Setting) -> Iterator[Row]:
    count, places = setting.size(KILLS, 2), setting.size(PLACES, 1)
    roles = {"prefill": places, "decode": places}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "model").mkdir()
        write_folder(folder / "model", TINY)
        config = config_text(setting, roles, "float32", max_len=1024, memory_mb=512, batch=8, budget=256)
        (folder / "service.toml").write_text(config)
        limit_s = max(1.0, setting.until - time.monotonic() - FINISH_S)
        command = [
            *(sys.executable, "-m", "cbdisagg", "bench", "faults", "--dtype", "float32", "--json"),
            *("--config", str(folder / "service.toml"), "--model", str(folder / "model")),
            *("--each", str(count), "--limit-s", f"{limit_s:g}", "--requests", str(REQUESTS)),
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.lstrip().startswith("{"):  # it has said on stderr what is wrong, which is in the log
        raise RuntimeError(f"bench faults ended with status {done.returncode} and no report")
    report = json.loads(done.stdout)
    for role in roles:
        made = report["faults"].get(f"kill {role}", 0)
        yield at_least(PART, f"kills of {role} workers within the time", float(made), "kills", count)
    yield at_most(PART, "answers lost, altered or repeated", float(len(report["findings"])), "answers", 0)
    yield at_most(PART, "things not given back", float(len(report["leaked"])), "", 0)
    yield at_most(PART, "processes that ended by themselves", float(len(report["crashed"])), "", 0)
