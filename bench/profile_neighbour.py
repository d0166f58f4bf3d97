"""A worker beside the one that is measured: a process that computes prompts all the time, and reads the same memory.

Life cycle of a `Neighbour`: started -> its model is loaded -> `busy` and `idle`, as often as wanted -> its input ends,
and so does it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Collection
from pathlib import Path

from cbdisagg_bench.profile_steps import Stepper, prefill

from cbdisagg.config import Model

CHUNK = 256


class Neighbour:
    """A context; in it the other process is ready, on these `cores`. Raises SystemExit if it has ended by itself."""

    def __init__(
        self, folder: Path, model: Model, threads: int, page_size: int, cores: Collection[int], cache: Path
    ) -> None:
        told = {
            "folder": str(folder),
            "dtype": model.dtype,
            "weights": model.weights,
            "threads": threads,
            "page_size": page_size,
            "cores": sorted(cores),
            "cache": str(cache),
        }
        self._command = [sys.executable, "-m", __name__, json.dumps(told)]

    def __enter__(self) -> Neighbour:
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for the parent; the child ends with its stdin
        )
        self._answer()
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def busy(self) -> None:
        """From now on it computes."""
        self._tell("busy")

    def idle(self) -> None:
        self._tell("idle")

    def _tell(self, what: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(what + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        if not self._process.stdout.readline():
            raise SystemExit(f"the neighbour ended with status {self._process.wait()}")


def _main(told: str) -> None:
    """`told`: a JSON object, as `Neighbour` writes it."""
    given = json.loads(told)
    os.sched_setaffinity(0, given["cores"])
    case = prefill(0, CHUNK)
    stepper = Stepper(
        Path(given["folder"]),
        given["dtype"],
        given["threads"],
        given["page_size"],
        [case],
        seed=1,
        weights=given["weights"],
        cache=Path(given["cache"]),
    )
    wanted, ended, idle = threading.Event(), threading.Event(), threading.Event()

    def listen() -> None:
        for line in sys.stdin:
            if line.strip() == "busy":
                idle.clear()
                wanted.set()
            else:
                wanted.clear()
                idle.wait()
            print("yes", flush=True)
        ended.set()
        wanted.set()

    threading.Thread(target=listen, daemon=True).start()
    print("ready", flush=True)
    while True:
        if not wanted.is_set():
            idle.set()
            wanted.wait()
        if ended.is_set():
            return
        for _ in stepper.measure([case], 1):
            pass


if __name__ == "__main__":
    _main(sys.argv[1])
