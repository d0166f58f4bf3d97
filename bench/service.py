"""A service that a benchmark starts for itself: its process, its address, and what it says when it cannot start.

Knows one command line and one process; nothing of what the service does. Life cycle: started -> ready (it has printed
its address) -> used -> SIGTERM -> gone, whatever the benchmark ends with; on Linux also if that is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from cbdisagg.actors.life import die_with
from cbdisagg.load import environment

START_S = 180.0


class ServiceFailed(Exception):
    """A service did not start, or did not answer; one line for whoever measures."""


@dataclass(frozen=True, slots=True)
class Service:
    """A running one: its base address without /v1, and its supervisor's process id."""

    url: str
    pid: int


@asynccontextmanager
async def running(
    name: str, options: Sequence[str], errors: Path, temporary: Path | None = None, port: int = 0
) -> AsyncIterator[Service]:
    """`cbdisagg serve` with these options; its stderr goes to the file `errors`.

    `temporary`: where it makes its temporary files, if not where everybody does. `port` 0: any that is free.

    Raises ServiceFailed with the last line on its stderr if it does not get ready within START_S.
    """
    with errors.open("wb") as stderr:  # a file and not a pipe: nobody reads while the service runs
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "cbdisagg", "serve", "--port", str(port), *options),
            stdout=asyncio.subprocess.PIPE,
            stderr=stderr,
            env=environment(TMPDIR=str(temporary)) if temporary is not None else None,
            preexec_fn=partial(die_with, os.getpid(), signal.SIGTERM) if sys.platform == "linux" else None,
        )
    try:
        url = await _address(process)
        if not url:
            raise ServiceFailed(f"the service {name} did not get ready: {_last_line(errors)}")
        yield Service(url, process.pid)
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        await process.wait()


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where the service listens; empty if it ended or took too long, and then it has said why."""
    assert process.stdout is not None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(START_S):
            async for line in process.stdout:
                found = re.search(rb"http://\S+/v1", line)
                if found:
                    return found.group().decode().removesuffix("/v1")
            await process.wait()
    return ""


def _last_line(file: Path) -> str:
    lines = [line.strip() for line in file.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing on stderr"
