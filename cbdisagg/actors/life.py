"""The life of a child process: it starts with a `Start`, ends when told, when its supervisor is gone, or by a bug.

Knows signals, pipes and exit statuses; knows nothing of what the process does. A child ends
    by SIGTERM                      -> status 0: in its own time, if it has set `leave`; the second time, at once
    by SIGUSR2                      -> status 0, at once: the supervisor has nothing left that could be waited for
    at the end of the pipe on stdin -> status 0: the supervisor is gone, whichever way it went
    by the kernel (PDEATHSIG)       -> when the supervisor dies while this process does not look
    by an exception anywhere        -> status 1, traceback in the log: bugs are crashes, the supervisor restarts
SIGINT is the supervisor's business, which stops everyone in order: a child has a session of its own, and ignores it.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn

import uvloop

from cbdisagg.actors.runfolder import remove_folder
from cbdisagg.actors.start import Start

log = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
ORPHANED = signal.SIGUSR1
"""What the kernel sends to a coordinator whose supervisor has died."""
AT_ONCE = signal.SIGUSR2
"""SIGTERM without the leave-taking."""
LOG_FORMAT = "%(asctime)s {name:<13} %(levelname)-7s %(message)s"


class Life:
    """The end of a process, as something to wait for: `await life.ended` returns when told to stop, raises a bug.

    `leave`: what to do when the process is asked to end; it sees to it that `stop` follows. None: stop at once.
    """

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.leave: Callable[[], None] | None = None
        self.ended: asyncio.Future[None] = self.loop.create_future()
        self.orphaned = False

    def stop(self) -> None:
        if not self.ended.done():
            self.ended.set_result(None)

    def ask(self) -> None:
        """SIGTERM."""
        leave, self.leave = self.leave, None
        if leave is None:
            self.stop()
        else:
            leave()

    def orphan(self) -> None:
        """The supervisor is gone."""
        self.orphaned = True
        self.stop()

    def crash(self, error: BaseException) -> None:
        if not self.ended.done():
            self.ended.set_exception(error)
        else:
            log.error("a second failure on the way out", exc_info=error)

    def crash_from_thread(self, error: BaseException) -> None:
        self.loop.call_soon_threadsafe(self.crash, error)

    def on_loop_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """The loop's own handler would log a callback's exception and go on."""
        error = context.get("exception")
        if "transport" in context and isinstance(error, OSError):
            log.info("connection lost: %s", error)  # the network's failure, not ours
        else:
            self.crash(error if error is not None else RuntimeError(context["message"]))


def run_child(start: Start, main: Callable[[Life], Awaitable[None]]) -> NoReturn:
    """Run `main` on uvloop until the process's end, and exit. `main` returns when `life.ended` does, or raises."""
    set_up_logging(start.name)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if start.supervisor_pid:
        # The others are killed, which nothing can delay; the coordinator is told, for it removes the run folder.
        signal.signal(ORPHANED, lambda *_: None)  # until the loop takes over, the pipe will tell
        die_with(start.supervisor_pid, ORPHANED if start.kind == "coordinator" else signal.SIGKILL)
    status, orphaned = 0, False
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            orphaned = runner.run(_live(start, main))
    except BaseException:
        # The edge of the process: whatever it was, it goes to the log, and the supervisor sees the status.
        log.critical("%s has crashed", start.name, exc_info=True)
        status = 1
    if orphaned:
        remove_folder(Path(start.folder))  # the supervisor was killed; who is left tidies up
    leave(status)


def die_with(parent_pid: int, number: signal.Signals) -> None:
    """Get this signal when the parent dies; if it has died already, end."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        log.warning("prctl(PR_SET_PDEATHSIG) failed: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != parent_pid:  # it died before the line above
        leave(0)


def leave(status: int) -> NoReturn:
    """Exit now, even with threads deep in a step: nothing that this process holds outlives it."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def set_up_logging(name: str, level: int = logging.INFO) -> None:
    logging.basicConfig(level=level, format=LOG_FORMAT.format(name=name), stream=sys.stderr, datefmt="%H:%M:%S")


def watch_pipe(loop: asyncio.AbstractEventLoop, fd: int, on_end: Callable[[], None]) -> bool:
    """Call `on_end` when the other end of the pipe `fd` is closed; False if `fd` is no pipe."""
    mode = os.fstat(fd).st_mode
    if not (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)):
        return False

    def readable() -> None:
        if not os.read(fd, 4096):
            loop.remove_reader(fd)
            on_end()

    loop.add_reader(fd, readable)
    return True


async def _live(start: Start, main: Callable[[Life], Awaitable[None]]) -> bool:
    """Whether it ended because the supervisor was gone."""
    life = Life()
    life.loop.set_exception_handler(life.on_loop_error)
    life.loop.add_signal_handler(signal.SIGTERM, life.ask)
    life.loop.add_signal_handler(AT_ONCE, life.stop)
    if start.supervisor_pid:
        life.loop.add_signal_handler(ORPHANED, life.orphan)
        watch_pipe(life.loop, sys.stdin.fileno(), life.orphan)
    try:
        await main(life)
    finally:
        # The loop takes its handlers away when it closes; a signal from now on must not cut the tidying up short.
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM, AT_ONCE, ORPHANED])
    return life.orphaned
