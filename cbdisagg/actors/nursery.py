"""The nursery: a process that has imported what every worker needs, and forks one whenever it is told to.

Importing torch costs one and a half seconds of a core and 150 MiB. Done once on a host, it costs no time when a worker
is started again beside others that compute, and all workers share the pages.

A worker is forked twice, and the process between ends at once: so the worker becomes the child of the supervisor, the
reaper of orphans (actors/forks.py), and what happens to the nursery later does not concern it. It waits for that, since
it is to die with its parent. Nothing here may start a thread: the worker would have only half of what it guards.

Over the channel, lines: READY when all is imported; then, for each path of a start file, the worker's process id, or 0
if there was none to be had. The end of the channel is the nursery's.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from cbdisagg.actors.life import die_with, leave

log = logging.getLogger(__name__)

READY = b"ready\n"


def main() -> NoReturn:
    """`python -m cbdisagg.actors.nursery --channel N --supervisor-pid N`, as forks.Nursery starts it."""
    import setproctitle  # noqa: F401  # as the next two: all that a worker needs, torch above all

    import cbdisagg.actors.worker
    import cbdisagg.engine.build  # noqa: F401
    from cbdisagg.actors.part import run_part

    _, _, channel, _, supervisor_pid = sys.argv
    run_nursery(int(channel), int(supervisor_pid), lambda file: run_part("worker", file))


def run_nursery(channel: int, supervisor_pid: int, become: Callable[[Path], object]) -> NoReturn:
    """`channel`: descriptor of a connected socket. `become` is the worker that a start file tells of; it may return."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with(supervisor_pid, signal.SIGKILL)
    gc.collect()
    gc.freeze()  # else the first collection of each worker would touch, and so copy, every shared page
    with socket.socket(fileno=channel) as line:
        line.sendall(READY)
        with line.makefile("r") as orders:
            for order in orders:
                line.sendall(b"%d\n" % _fork(Path(order.rstrip("\n")), line, become))
    leave(0)


def _fork(file: Path, channel: socket.socket, become: Callable[[Path], object]) -> int:
    """The process id of the worker, 0 if the system has none left."""
    heard, told = os.pipe()
    go, say_go = os.pipe()
    try:
        between = os.fork()
        if not between:
            try:
                worker = os.fork()
                if worker:
                    os.write(told, b"%d" % worker)
                else:
                    for descriptor in (heard, told, say_go):
                        os.close(descriptor)
                    if os.read(go, 1):  # the process between has ended, and its parent has seen that
                        os.close(go)
                        os.close(channel.fileno())
                        _begin(file, become)
            finally:
                os._exit(0)
        os.waitpid(between, 0)
        os.set_blocking(heard, False)
        with contextlib.suppress(BlockingIOError):
            pid = int(os.read(heard, 20))
            with contextlib.suppress(BrokenPipeError):  # it has been killed already; the supervisor will see
                os.write(say_go, b"!")
            return pid
        return 0
    except OSError as error:
        log.error("cannot fork: %s", error)
        return 0
    finally:
        for descriptor in (heard, told, go, say_go):
            os.close(descriptor)


def _begin(file: Path, become: Callable[[Path], object]) -> NoReturn:
    """In the worker: a session and a title as if it had been executed."""
    from setproctitle import setproctitle, setthreadtitle

    os.setsid()
    setproctitle(f"{sys.executable} -m cbdisagg.actors.part worker --start {file}")
    setthreadtitle(file.name.partition(".")[0])  # "decode-0", in top
    try:
        become(file)
    except SystemExit as end:
        leave(end.code if isinstance(end.code, int) else 1)
    except BaseException:
        # The edge of a process: whatever it was must not come back into the nursery's code.
        log.critical("%s: the worker could not begin", file, exc_info=True)
        leave(1)
    leave(0)


if __name__ == "__main__":
    main()
