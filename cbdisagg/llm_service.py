"""The processes behind the Python API: a supervisor as a child, and an api actor in a thread of this process.

Knows how to start and end them; what a request is, it leaves to llm.py. Life cycle: constructed -> `start` returns when
all is ready, or raises -> `run` coroutines on the actor's loop -> `close`. The service ends with this process, however
that ends: the supervisor watches the pipe on its stdin, whose other end is here. A supervisor that ends by itself ends
all streams with its last words.

The supervisor is a fresh interpreter with a session of its own, so a script needs no main guard and Ctrl-C in it
interrupts the script, not the service. Whatever the processes say goes to the logger of this module.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import msgspec
import uvloop

from cbdisagg.actors.inbox import Inbox
from cbdisagg.actors.launch import ServiceFailed
from cbdisagg.actors.mailbox import Place
from cbdisagg.actors.runfolder import RunFolder
from cbdisagg.api.client import Client
from cbdisagg.config import Config
from cbdisagg.load import print_config
from cbdisagg.messages import Address

log = logging.getLogger(__name__)

T = TypeVar("T")

ERROR_PREFIX = "cbdisagg: "
"""How the command line marks the one line that says why it could not run."""
PATIENCE_S = 15.0
"""How long an orderly end may take: the supervisor kills what does not end in time, so this is never reached."""


class Service:
    """One running service. `client`, `max_len` and `page_size` may be used once `start` has returned."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.max_len = 0
        self._folder: RunFolder | None = None
        self._supervisor: subprocess.Popen[str] | None = None
        self._actor: _Actor | None = None
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="cbdisagg", daemon=True)
        self._last_words: deque[str] = deque(maxlen=20)
        self._ended = threading.Event()
        self._closed = False

    @property
    def client(self) -> Client:
        """To be used on the actor's loop only."""
        assert self._actor is not None, "start() has not been called"
        return self._actor.client

    def start(self) -> None:
        """Blocks until requests can be served. Raises ServiceFailed with the reason, in one line, if they cannot."""
        self._thread.start()
        atexit.register(self.close)
        try:
            self._folder = RunFolder()
            self._actor = self.run(_Actor.open(self.config, self._folder)).result()
            self._supervisor = self._spawn(self._actor.address)
            for watch in (self._listen, self._wait):
                threading.Thread(target=watch, name=f"cbdisagg-{watch.__name__[1:]}", daemon=True).start()
            self.run(_until(self._actor.ready)).result()
            members = self._actor.client.members
            assert members is not None
            self.max_len = min(info.max_len for info in members.workers)
        except BaseException:
            self.close()
            raise

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the actor's loop."""
        if self._closed:
            work.close()
            raise ServiceFailed("the service has been closed")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """End all processes, in order, and leave nothing behind. Requests in progress fail. Closing twice is fine."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._supervisor is not None:
            assert self._supervisor.stdin is not None
            self._supervisor.stdin.close()
            self._end_supervisor(self._supervisor)
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        self._loop.close()
        if self._folder is not None:
            self._folder.remove()

    # -------------------------------------------------------------------------------------------- the supervisor

    def _spawn(self, address: Address) -> subprocess.Popen[str]:
        assert self._folder is not None
        settings = self._folder.path / "settings.toml"
        settings.touch(mode=0o600)
        settings.write_text(print_config(self.config), encoding="utf-8")
        client = msgspec.json.encode(address._asdict()).decode()
        command = [
            sys.executable,
            "-m",
            "cbdisagg",
            "serve",
            "--no-http",
            "--client",
            client,
            "--config",
            str(settings),
        ]
        return subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def _listen(self) -> None:
        """Thread: pass on what the processes say, until none of them is left."""
        assert self._supervisor is not None and self._supervisor.stderr is not None
        with self._supervisor.stderr as lines:
            for line in lines:
                self._last_words.append(line.rstrip())
                log.info("%s", line.rstrip())
        self._ended.set()

    def _wait(self) -> None:
        """Thread: the end of the supervisor is the end of all streams."""
        assert self._supervisor is not None and self._actor is not None
        status = self._supervisor.wait()
        self._ended.wait()  # all has been said
        if not self._closed:
            log.debug("the supervisor has ended with status %d", status)
            self._loop.call_soon_threadsafe(self._actor.end, self._reason(status))

    def _reason(self, status: int) -> str:
        lines = [line for line in self._last_words if line]
        marked = [line.removeprefix(ERROR_PREFIX) for line in lines if line.startswith(ERROR_PREFIX)]
        if marked:
            return marked[-1]
        said = f"; the last it said: {lines[-1]}" if lines else ""
        return f"the service has ended with status {status}{said}"

    def _end_supervisor(self, supervisor: subprocess.Popen[str]) -> None:
        try:
            supervisor.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            log.warning("the supervisor (pid %d) did not end in %.0f s and is killed", supervisor.pid, PATIENCE_S)
            supervisor.kill()
            supervisor.wait()

    async def _shut(self) -> None:
        if self._actor is not None:
            self._actor.end("the service has been closed")
            self._actor.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)  # the streams have ended, so their readers do


class _Actor:
    """The api actor. `ready` is done when requests can be served, or fails with the service."""

    def __init__(self, config: Config, folder: RunFolder) -> None:
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.ended = ""
        place = Place.of(config.cluster, folder.path)
        self._inbox = Inbox("python", time.time_ns(), place, config, self._look_whether_ready)

    @classmethod
    async def open(cls, config: Config, folder: RunFolder) -> _Actor:
        return cls(config, folder)

    @property
    def address(self) -> Address:
        return self._inbox.mailbox.address

    @property
    def client(self) -> Client:
        return self._inbox.client

    def close(self) -> None:
        self._inbox.close()

    def end(self, reason: str) -> None:
        """Nothing will be answered any more."""
        self.ended = self.ended or reason
        self.client.close(reason)
        if not self.ready.done():
            self.ready.set_exception(ServiceFailed(reason))
            self.ready.exception()  # whoever waits for it is told; if nobody does, that is no mistake

    def _look_whether_ready(self) -> None:
        if self.client.ready and not self.ready.done():
            self.ready.set_result(None)


async def _until(future: asyncio.Future[None]) -> None:
    await asyncio.shield(future)
