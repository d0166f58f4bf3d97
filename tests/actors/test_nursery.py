"""Workers that are forked: they are the supervisor's children in all respects, and the nursery's end is not theirs."""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from cbdisagg.actors import forks
from cbdisagg.actors.forks import Forked, NotForked, Nursery, available, reap_strays

FAKE = (sys.executable, str(Path(__file__).parent / "fake_nursery.py"))
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="workers are forked on Linux only")


@asynccontextmanager
async def running(command: tuple[str, ...] = FAKE) -> AsyncIterator[Nursery]:
    """A nursery whose workers end with the test; they are this process's children."""
    assert available()
    lifeline, life = os.pipe()
    try:
        async with asyncio.TaskGroup() as group:
            nursery = Nursery(command)
            task = group.create_task(nursery.run(lifeline))
            try:
                yield nursery
            finally:
                task.cancel()
    finally:
        for child in psutil.Process().children():
            if "worker" in _words(child):
                with suppress(psutil.NoSuchProcess):
                    child.kill()
                    child.wait(10)
        os.close(lifeline)
        os.close(life)
        assert ctypes.CDLL(None).prctl(forks.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0) == 0


def _words(process: psutil.Process) -> list[str]:
    with suppress(psutil.NoSuchProcess):
        return process.cmdline()
    return []


def order(folder: Path, name: str, words: str) -> Path:
    file = folder / f"{name}.json"
    file.write_text(words)
    return file


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  # of other processes, which tell nobody
            await asyncio.sleep(0.01)


async def told(file: Path) -> dict[str, int]:
    """What the worker of this file has written down."""
    await until(file.with_suffix(".me").exists)
    return dict(json.loads(file.with_suffix(".me").read_text()))


async def test_a_worker_is_our_child_as_if_we_had_executed_it(tmp_path: Path) -> None:
    async with running() as nursery:
        file = order(tmp_path, "decode-0.7", "wait")
        worker = await nursery.fork(file)
        me = await told(file)
        assert me["parent"] == os.getpid()
        assert me["session"] == worker.pid, "a terminal's signals do not reach it"
        assert me["descriptors"] == 4, "stdin, stdout, stderr and the folder that is being listed: nothing of ours"
        assert psutil.Process(worker.pid).cmdline()[-3:] == ["worker", "--start", str(file)]
        assert psutil.Process(nursery.pid).children() == []
        worker.send_signal(signal.SIGTERM)
        assert await worker.wait() == worker.returncode == -signal.SIGTERM
        worker.send_signal(signal.SIGTERM)  # nobody is hit


@pytest.mark.parametrize(("words", "status"), [("exit 3", 3), ("exit 0", 0), ("raise", 1)])
async def test_how_a_worker_ends_is_seen(tmp_path: Path, words: str, status: int) -> None:
    async with running() as nursery:
        first = await nursery.fork(order(tmp_path, "a", words))
        assert await first.wait() == status
        second = await nursery.fork(order(tmp_path, "b", "exit 5"))
        assert await second.wait() == 5, "the nursery has not become that worker"


def test_without_setproctitle_workers_are_executed(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would all have the nursery's command line; nobody else needs it, the supervisor least of all."""
    monkeypatch.setitem(sys.modules, "setproctitle", None)
    assert not available()
    command = "import sys; sys.modules['setproctitle'] = None; import cbdisagg.actors.serve, cbdisagg.actors.worker"
    subprocess.run([sys.executable, "-c", command], check=True)


async def test_many_at_once(tmp_path: Path) -> None:
    async with running() as nursery:
        files = [order(tmp_path, f"w-{n}", f"exit {n}") for n in range(8)]
        workers = await asyncio.gather(*(nursery.fork(file) for file in files))
        assert [await worker.wait() for worker in workers] == list(range(8))


async def test_workers_outlive_the_nursery_and_the_next_one_forks(tmp_path: Path) -> None:
    async with running() as nursery:
        old = await nursery.fork(order(tmp_path, "a", "wait"))
        before = nursery.pid
        os.kill(before, signal.SIGKILL)
        await until(lambda: nursery.pid != before)
        new = await nursery.fork(order(tmp_path, "b", "exit 4"))
        assert await new.wait() == 4
        assert old.returncode is None
        old.send_signal(signal.SIGKILL)
        assert await old.wait() == -signal.SIGKILL


async def test_a_worker_that_nobody_waits_for_any_more_is_killed(tmp_path: Path) -> None:
    async with running() as nursery:
        assert await (await nursery.fork(order(tmp_path, "a", "exit 0"))).wait() == 0
        os.kill(nursery.pid, signal.SIGSTOP)
        file = order(tmp_path, "b", "wait")
        asked = asyncio.ensure_future(nursery.fork(file))
        await asyncio.sleep(0)  # the order is on its way
        asked.cancel()
        os.kill(nursery.pid, signal.SIGCONT)
        assert await (await nursery.fork(order(tmp_path, "c", "exit 3"))).wait() == 3, "the nursery goes on"
        await until(lambda: not any(str(file) in _words(child) for child in psutil.Process().children()))


async def test_a_nursery_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "ANSWER_S", 0.3)
    async with running() as nursery:
        assert await (await nursery.fork(order(tmp_path, "a", "exit 0"))).wait() == 0
        os.kill(nursery.pid, signal.SIGSTOP)
        with pytest.raises(NotForked):
            await nursery.fork(order(tmp_path, "b", "exit 0"))
        monkeypatch.undo()
        assert await (await nursery.fork(order(tmp_path, "c", "exit 6"))).wait() == 6


async def test_a_nursery_that_cannot_start_says_so(tmp_path: Path) -> None:
    async with running((sys.executable, "-c", "import sys; sys.exit(9)")) as nursery:
        with pytest.raises(NotForked, match="exit status 9"):
            await nursery.fork(order(tmp_path, "a", "wait"))


async def test_the_end_of_the_channel_is_the_nurserys_and_no_workers(tmp_path: Path) -> None:
    async with running() as nursery:
        worker = await nursery.fork(order(tmp_path, "a", "wait"))
        process = psutil.Process(nursery.pid)
    assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert isinstance(worker, Forked)


async def test_what_a_killed_child_had_started_is_reaped_and_nobody_else() -> None:
    async with running():
        stray, ours = await asyncio.to_thread(_leave_behind)
        await until(lambda: _is_zombie(stray) and _is_zombie(ours.pid))
        reap_strays()
        assert not psutil.pid_exists(stray)
        assert ours.wait() == 7


def _leave_behind() -> tuple[int, subprocess.Popen[bytes]]:
    """What a child of ours had started, and one that we have started: both have ended."""
    stray = "import os, sys, time\nwhile os.getppid() == int(sys.argv[1]): time.sleep(0.01)"
    start = f"subprocess.Popen([sys.executable, '-c', {stray!r}, str(os.getpid())])"
    middle = f"import os, subprocess, sys; print({start}.pid, flush=True)"
    made = subprocess.run([sys.executable, "-c", middle], stdout=subprocess.PIPE, check=True)
    return int(made.stdout), subprocess.Popen([sys.executable, "-c", "import sys; sys.exit(7)"], start_new_session=True)


def _is_zombie(pid: int) -> bool:
    return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
