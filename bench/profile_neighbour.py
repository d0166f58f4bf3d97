"""A worker beside the one that is measured: a process that computes prompts all the time, and reads the same memory.

Life cycle of a `Neighbour`: started -> its model is loaded -> `busy` and `idle`, as often as wanted -> its input ends,
and so does it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

from cbdisagg_bench.profile_steps import Stepper, prefill

CHUNK = 256


class Neighbour:
    """A context; in it the other process is ready. Raises SystemExit if it has ended by itself."""

    def __init__(self, folder: Path, dtype: str, threads: int, page_size: int) -> None:
        self._command = [sys.executable, "-m", __name__, str(folder), dtype, str(threads), str(page_size)]

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


def _main(folder: Path, dtype: str, threads: int, page_size: int) -> None:
    case = prefill(0, CHUNK)
    stepper = Stepper(folder, dtype, threads, page_size, [case], seed=1)
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
    _main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
