"""The supervisor's side of the nursery: keeps one running, has workers forked by it, and reaps what it has forked.

Linux alone can do this: a process that asks for it becomes the parent of its descendants' orphans, and a descriptor
tells the end of a process of any kind. Elsewhere, where a sandbox forbids it, and without setproctitle, by which a
worker gets a command line of its own, workers are executed (`available`).
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import signal
import socket
import sys
from asyncio import StreamReader, StreamWriter
from asyncio.subprocess import Process
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import psutil

from cbdisagg.actors.backoff import BackOff, cause
from cbdisagg.actors.nursery import READY

log = logging.getLogger(__name__)

PR_SET_CHILD_SUBREAPER = 36
START_S, ANSWER_S = 120.0, 5.0
"""A nursery that imports longer than the first, or takes longer than the second to fork, which is a thing of
milliseconds, is killed."""
LIBRARIES = {
    # By default a waiting thread spins, and takes the core from the one that it waits for: 20 ms instead of 13 us for a
    # parallel region on a busy machine of two cores.
    "OMP_WAIT_POLICY": "PASSIVE",
    # oneDNN keeps code for each shape that it has seen, 1,024 by default and up to a MiB each.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
}


def computing(threads: int) -> dict[str, str]:
    """The environment of a process that computes; what ours says of LIBRARIES goes before."""
    return LIBRARIES | os.environ | {"OMP_NUM_THREADS": str(threads)}


class NotForked(Exception):
    """There is no worker: one line, why."""


def available() -> bool:
    """Whether this process can be the parent of what another forks; it is, from then on.

    Not without setproctitle: workers of the nursery's command line would be told apart by nobody, neither operators nor
    `bench faults`.
    """
    if sys.platform != "linux" or find_spec("setproctitle") is None:
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return bool(libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0)


def reap_strays() -> None:
    """What a killed child had started comes to us. Ours lead sessions of their own, strays do not."""
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError, ChildProcessError):
            if child.status() == psutil.STATUS_ZOMBIE and os.getsid(child.pid) != child.pid:
                os.waitpid(child.pid, os.WNOHANG)


class Forked:
    """A child that we have not started: what asyncio's Process is for those that we have."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._descriptor = os.pidfd_open(pid)  # ours until we reap it, so it is this process and no other
        self._loop.add_reader(self._descriptor, self._reap)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def send_signal(self, number: signal.Signals) -> None:
        if self.returncode is None:
            signal.pidfd_send_signal(self._descriptor, number)

    def _reap(self) -> None:
        self._loop.remove_reader(self._descriptor)
        os.close(self._descriptor)
        _, status = os.waitpid(self.pid, 0)
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set_result(self.returncode)


class Nursery:
    """One nursery process after the other; `command` starts it, given the options --channel and --supervisor-pid."""

    def __init__(self, command: Sequence[str]) -> None:
        self.pid = 0
        self._command = command
        self._was_ready = False
        self._orders: asyncio.Queue[tuple[Path, asyncio.Future[Forked]]] = asyncio.Queue()

    async def fork(self, file: Path) -> Forked:
        """A worker for this start file. Raises NotForked; then there is no process."""
        answer: asyncio.Future[Forked] = asyncio.get_running_loop().create_future()
        self._orders.put_nowait((file, answer))
        return await answer

    async def run(self, lifeline: int) -> None:
        """Until cancelled. `lifeline`: as for every child, the read end of a pipe that only this process holds open."""
        backoff, loop = BackOff(), asyncio.get_running_loop()
        while True:
            began = loop.time()
            why = await self._live(lifeline)
            log.warning("the nursery (pid %d) ended: %s; it is started again", self.pid, why)
            while not self._was_ready and not self._orders.empty():  # the next one may be no better
                _, answer = self._orders.get_nowait()
                _refuse(answer, f"the nursery ended: {why}")
            reap_strays()
            await asyncio.sleep(backoff.after(loop.time() - began))

    async def _live(self, lifeline: int) -> str:
        """From its start to its end; how that came."""
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=ours)
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                *("--channel", str(theirs.fileno()), "--supervisor-pid", str(os.getpid())),
                stdin=lifeline,
                pass_fds=(theirs.fileno(),),
                env=computing(1),  # a worker's steps set their own number
                start_new_session=True,
            )
        self.pid, self._was_ready = process.pid, False
        try:
            async with asyncio.TaskGroup() as group:
                orders = group.create_task(self._take_orders(process, reader, writer))
                status = await process.wait()
                orders.cancel()
        finally:
            writer.close()
            _kill(process)
            await process.wait()
        return cause(status)

    async def _take_orders(self, process: Process, reader: StreamReader, writer: StreamWriter) -> None:
        try:
            async with asyncio.timeout(START_S):
                if await reader.readline() != READY:
                    return
            self._was_ready = True
            while True:
                file, answer = await self._orders.get()
                try:
                    writer.write(f"{file}\n".encode())
                    async with asyncio.timeout(ANSWER_S):
                        line = await reader.readline()
                    if not line:
                        return
                    if int(line):
                        _give(answer, Forked(int(line)))
                finally:
                    _refuse(answer, "the nursery has forked nothing")
        except (OSError, TimeoutError):
            _kill(process)


def _give(answer: asyncio.Future[Forked], worker: Forked) -> None:
    if answer.done():  # whoever had asked is ending, and would never know of it
        worker.send_signal(signal.SIGKILL)
    else:
        answer.set_result(worker)


def _refuse(answer: asyncio.Future[Forked], why: str) -> None:
    if not answer.done():
        answer.set_exception(NotForked(why))


def _kill(process: Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
