"""A worker beside the one that is measured: a process that computes prompts, or pushes pages to it, all the time.

Life cycle of a `Neighbour`: started -> its model is loaded, or its pair is joined -> `busy` and `idle`, as often as
wanted -> its input ends, and so does it.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
from cbdisagg_bench.profile_steps import Stepper, prefill
from cbdisagg_bench.transfer import Geometry, Pair
from msgspec import Struct

CHUNK = 256
PAGES = 32
"""Of a push: what a prompt of 512 tokens fills, in pages of 16."""


class Computes(Struct, frozen=True, tag=True):
    """It computes prompts, and reads the same memory. `cores`: its own."""

    folder: str
    dtype: str
    weights: str
    threads: int
    page_size: int
    cache: str
    cores: tuple[int, ...]


class Pushes(Struct, frozen=True, tag=True):
    """It pushes pages by one kind of transport, from its `cores` to a process on the cores `to`."""

    kind: str
    geometry: Geometry
    cores: tuple[int, ...]
    to: tuple[int, ...]


class Neighbour:
    """A context; in it the other process is ready. Raises SystemExit if it has ended by itself."""

    def __init__(self, task: Computes | Pushes) -> None:
        self._command = [sys.executable, "-m", __name__, msgspec.json.encode(task).decode()]

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
        """From now on it works."""
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


@contextmanager
def _turns(task: Computes | Pushes) -> Iterator[Callable[[], object]]:
    """What is done over and over."""
    if isinstance(task, Pushes):
        pages = tuple(range(PAGES))
        with Pair(task.kind, PAGES, task.geometry, task.to) as pair:
            yield lambda: pair.hand_over(pages)
        return
    case = prefill(0, CHUNK)
    stepper = Stepper(
        Path(task.folder),
        task.dtype,
        task.threads,
        task.page_size,
        [case],
        seed=1,
        weights=task.weights,
        cache=Path(task.cache),
    )
    yield lambda: list(stepper.measure([case], 1))


def _main(told: str) -> None:
    """`told`: a task, as `Neighbour` writes it."""
    task = msgspec.json.decode(told, type=Computes | Pushes)
    os.sched_setaffinity(0, task.cores)
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

    with _turns(task) as turn:
        threading.Thread(target=listen, daemon=True).start()
        print("ready", flush=True)
        while True:
            if not wanted.is_set():
                idle.set()
                wanted.wait()
            if ended.is_set():
                return
            turn()


if __name__ == "__main__":
    _main(sys.argv[1])
