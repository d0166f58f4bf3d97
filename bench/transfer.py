"""`cbdisagg bench transfer`: what it costs to hand KV pages from one process to another.

Two real processes with pools of SmolLM2-135M's geometry (30 layers; 12,288 bytes per page and layer: bfloat16, 16
tokens; `cbdisagg profile` asks for that of its model), joined by the same code that workers use, self-test included.
One hand-over is timed from its first `push` until its last byte is in the receiver's pool; both processes read the same
monotonic clock. A copy of as many bytes inside one process, in the same run, is the yardstick.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from statistics import median, quantiles
from typing import Annotated, TypedDict

import msgspec
import numpy as np
import typer
import zmq
from cbdisagg_bench.options import at_least, chosen
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cbdisagg.config import Transfer as Settings
from cbdisagg.messages import Address, AttemptId, Probe, Push, RequestId, WorkerInfo
from cbdisagg.transfer.base import LandedCallback, PushDoneCallback, Transfer
from cbdisagg.transfer.pool import MappedPool, create_pool
from cbdisagg.transfer.select import make_transfer

KINDS = ("shm", "zmq")


class Geometry(msgspec.Struct, frozen=True):
    """Of a pool: `page_bytes` in one layer, `page_size` in tokens."""

    layers: int
    page_bytes: int
    page_size: int


SMOLLM2 = Geometry(30, 12_288, 16)


class Row(TypedDict):
    """One kind and size. Milliseconds but for the names that say otherwise; p10 and p90 bound the spread."""

    kind: str
    tokens: int
    mib: float
    first_ms: float
    median_ms: float
    p10_ms: float
    p90_ms: float
    gb_per_s: float
    runner_ms: float
    memcpy_ms: float
    memcpy_gb_per_s: float


LONGEST = 131_072
"""Tokens of one hand-over: 3 GB of them in each of the two pools."""


def transfer(
    tokens: Annotated[
        list[int] | None, typer.Option(callback=at_least(1, LONGEST), help="Tokens of one hand-over; may be repeated.")
    ] = None,
    kind: Annotated[list[str] | None, typer.Option(help="shm or zmq; may be repeated.")] = None,
    repeats: Annotated[int, typer.Option(callback=at_least(3), help="Hand-overs of each size.")] = 50,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Measure hand-overs of KV pages between two processes, against a plain copy.

    Example: cbdisagg bench transfer --tokens 512 --tokens 2048 --kind shm --repeats 100
    """
    sizes, kinds = tokens or [128, 512, 2048], chosen("--kind", kind or KINDS, KINDS)
    rows, tests = [], {}
    for name in kinds:
        with Pair(name, sum(-(-size // SMOLLM2.page_size) for size in sizes)) as pair:
            tests[name] = pair.bytes_per_s
            for size in sizes:
                rows.append(pair.measure(size, repeats, quiet=as_json))
    report = {
        "command": "cbdisagg bench transfer",
        "repeats": repeats,
        "geometry": msgspec.to_builtins(SMOLLM2),
        "machine": {"cpus": len(os.sched_getaffinity(0)), "arch": platform.machine(), "kernel": platform.release()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "zmq": zmq.zmq_version()},
        "self_test_gb_per_s": {name: round(speed / 1e9, 2) for name, speed in tests.items()},
        "rows": rows,
    }
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(rows, tests)


def _print_table(rows: list[Row], tests: dict[str, float]) -> None:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 0, 0, 1), show_edge=False)  # fits 80 columns
    for name in ("kind", "tokens", "MiB", "first", "median", "p10-p90", "GB/s", "runner", "memcpy", "GB/s"):
        table.add_column(name, justify="left" if name == "kind" else "right")
    for row in rows:
        table.add_row(
            row["kind"],
            str(row["tokens"]),
            f"{row['mib']:.1f}",
            f"{row['first_ms']:.2f}",
            f"{row['median_ms']:.2f}",
            f"{row['p10_ms']:.3g}-{row['p90_ms']:.3g}",
            f"{row['gb_per_s']:.1f}",
            f"{row['runner_ms']:.2f}",
            f"{row['memcpy_ms']:.2f}",
            f"{row['memcpy_gb_per_s']:.1f}",
        )
    console = Console()
    console.print(table)
    console.print("Milliseconds. first: into memory not touched before. memcpy: one process.")
    console.print("runner: what it cost the thread that computes.")
    console.print("self-test: " + ", ".join(f"{name} {speed / 1e9:.1f} GB/s" for name, speed in tests.items()))


class Receiver(msgspec.Struct, frozen=True):
    """What the child is to be. `cores`: those that it is pinned to; empty: those of its parent."""

    folder: str
    kind: str
    pages: int
    geometry: Geometry
    cores: tuple[int, ...]


class Pair:
    """This process as prefill worker, a child as decode worker, joined by one kind of transport."""

    def __init__(self, kind: str, pages: int, geometry: Geometry = SMOLLM2, cores: Collection[int] = ()) -> None:
        """`pages` of each pool; `cores`: those of the child, empty: of this process."""
        self._kind, self._pages, self._geometry = kind, pages, geometry
        self._cores = tuple(sorted(cores))
        self._next_page, self._serial = 0, 0
        self._seconds = 0.0  # of the latest push, in this thread

    def __enter__(self) -> Pair:
        """Both processes, joined. Whatever ends this early, Ctrl-C too, ends the child and leaves nothing behind."""
        with contextlib.ExitStack() as undo:
            self._join(undo)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _join(self, undo: contextlib.ExitStack) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="cbdisagg-bench-")
        undo.callback(self._folder.cleanup)
        told = Receiver(self._folder.name, self._kind, self._pages, self._geometry, self._cores)
        self._child = subprocess.Popen(
            [sys.executable, "-m", "cbdisagg_bench.transfer", msgspec.json.encode(told).decode()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            process_group=0,  # Ctrl-C is for this process; the child ends with its stdin
        )
        undo.callback(self._end_child)
        self._me = Address("prefill", time.time_ns(), f"ipc://{self._folder.name}/prefill")
        self._pool = create_pool(self._me, self._geometry.layers, self._pages, self._geometry.page_bytes)
        undo.callback(self._pool.close)
        self._pool.pages[:] = np.random.default_rng(0).integers(0, 256, self._pool.pages.shape, np.uint8)
        self._transfer = _make(self._kind, self._me, self._pool, self._done, lambda _: None)
        undo.callback(self._transfer.close)
        peer = msgspec.json.decode(self._read(), type=WorkerInfo)
        self._peer = peer.address
        opened = self._transfer.connect(peer)
        if not opened.kind:
            raise SystemExit(f"{self._kind}: {opened.note}")
        probe = Probe(opened.kind, opened.nbytes, opened.checksum, opened.seconds, opened.note)
        self.bytes_per_s = float(self._ask({"sender": self._me, "probe": msgspec.to_builtins(probe)}))

    def _end_child(self) -> None:
        assert self._child.stdin is not None and self._child.stdout is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already
            self._child.stdin.close()
        self._child.wait()
        self._child.stdout.close()

    def measure(self, tokens: int, repeats: int, quiet: bool) -> Row:
        pages = -(-tokens // self._geometry.page_size)
        target = tuple(range(self._next_page, self._next_page + pages))
        self._next_page += pages
        nbytes = self._geometry.layers * pages * self._geometry.page_bytes
        source, copy = np.ones(nbytes, np.uint8), np.zeros(nbytes, np.uint8)
        total, runner, plain = [], [], []
        for _ in track(range(repeats + 1), f"{self._kind} {tokens} tokens", disable=quiet, transient=True):
            total.append(self.hand_over(target))
            runner.append(self._seconds)
            start = time.perf_counter()
            copy[:] = source
            plain.append(time.perf_counter() - start)
        tenths = quantiles(total[1:], n=10)
        return Row(
            kind=self._kind,
            tokens=tokens,
            mib=nbytes / 2**20,
            first_ms=total[0] * 1e3,
            median_ms=median(total[1:]) * 1e3,
            p10_ms=tenths[0] * 1e3,
            p90_ms=tenths[-1] * 1e3,
            gb_per_s=nbytes / median(total[1:]) / 1e9,
            runner_ms=median(runner[1:]) * 1e3,
            memcpy_ms=median(plain) * 1e3,
            memcpy_gb_per_s=nbytes / median(plain) / 1e9,
        )

    def hand_over(self, pages: tuple[int, ...]) -> float:
        """Seconds from the first byte sent to the last byte landed."""
        self._serial += 1
        attempt = AttemptId(self._peer.incarnation, RequestId(0, self._serial), 0)
        self._ask({"attempt": attempt, "source": self._me, "pages": pages})
        push = Push(self._serial, attempt, self._peer, pages, pages, True)
        start = time.monotonic()
        for layer in range(self._geometry.layers):
            self._transfer.push(layer, push)
        self._transfer.end(push)
        end = time.monotonic() if self._kind == "shm" else float(self._read())
        return end - start

    def _done(self, serial: int, kind: str, nbytes: int, seconds: float) -> None:
        assert kind == self._kind, f"push {serial} of {nbytes} bytes went by {kind or 'nothing'}"
        self._seconds = seconds

    def _ask(self, question: object) -> str:
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(question) + "\n")
        self._child.stdin.flush()
        return self._read()

    def _read(self) -> str:
        assert self._child.stdout is not None
        line = self._child.stdout.readline()
        if not line:
            raise SystemExit(f"the receiving process ended with status {self._child.wait()}")
        return line


def receive(told: Receiver) -> None:
    """The child: a decode worker that expects what it is told to, and says when it has landed."""
    if told.cores:
        os.sched_setaffinity(0, told.cores)
    size = told.geometry
    me = Address("decode", time.time_ns(), f"ipc://{told.folder}/decode")
    pool = create_pool(me, size.layers, told.pages, size.page_bytes)
    transfer = _make(told.kind, me, pool, lambda *_: None, lambda _: print(time.monotonic(), flush=True))
    info = WorkerInfo(me, "decode", platform.node(), "", transfer.info, size.page_size, 1, told.pages * size.page_size)
    print(msgspec.json.encode(info).decode(), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if "probe" in order:
            seen = transfer.verify(msgspec.convert(order["sender"], Address), msgspec.convert(order["probe"], Probe))
            assert seen.kind, seen.note
            print(seen.bytes_per_s, flush=True)
        else:
            attempt = msgspec.convert(order["attempt"], AttemptId)
            transfer.expect(attempt, msgspec.convert(order["source"], Address), tuple(order["pages"]))
            print("expecting", flush=True)
    transfer.close()
    pool.close()


def _make(
    kind: str, me: Address, pool: MappedPool, on_push_done: PushDoneCallback, on_landed: LandedCallback
) -> Transfer:
    settings = msgspec.convert({"kind": kind}, Settings)
    return make_transfer(settings, pool, me, platform.node(), on_push_done, on_landed, on_broken=_broken)


def _broken(peer: Address, reason: str) -> None:
    raise SystemExit(f"{peer.name}: {reason}")


if __name__ == "__main__":
    receive(msgspec.json.decode(sys.argv[1], type=Receiver))
