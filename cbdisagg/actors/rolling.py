"""A rolling restart: processes are started anew one after the other, each when all the others are there.

Knows children and turns; what a process does when it is asked to leave is its own business, and that it is started
again its keeper's. Nobody is asked while somebody else is away, whatever the reason: so a service with two of a kind
always has one, and one that cannot start (a config that was no good) stops the round instead of the service.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable, Iterable

from cbdisagg.actors.children import Child

log = logging.getLogger(__name__)


class Rolling:
    """`is_whole`: everyone is there. `look` is to be called when that, or a child's incarnation, may have changed."""

    def __init__(self, is_whole: Callable[[], bool]) -> None:
        self._is_whole = is_whole
        self._queue: dict[str, tuple[Child, float]] = {}  # in the order asked for
        self._changed = asyncio.Event()

    def add(self, children: Iterable[Child], drain_s: float) -> None:
        """Start these anew; each has `drain_s` to leave before it is killed. Who waits already waits once."""
        for child in children:
            self._queue[child.name] = (child, drain_s)
        self.look()

    def look(self) -> None:
        self._changed.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            await self._until(lambda: bool(self._queue) and self._is_whole())
            child, drain_s = self._next()
            old = child.incarnation
            log.info("%s (pid %d) is asked to leave", child.name, child.pid)
            child.ask()
            await _gone(child, drain_s)
            await self._until(lambda child=child, old=old: child.incarnation != old)  # type: ignore[misc]

    def _next(self) -> tuple[Child, float]:
        """The coordinator last: it need not learn twice who is there."""
        name = min(self._queue, key=lambda name: self._queue[name][0].kind == "coordinator")
        return self._queue.pop(name)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()


async def _gone(child: Child, drain_s: float) -> None:
    assert child.process is not None
    try:
        async with asyncio.timeout(drain_s):
            await child.process.wait()
    except TimeoutError:
        log.warning("%s (pid %d) has not left in %g s and is killed", child.name, child.pid, drain_s)
        child.send(signal.SIGKILL)
        await child.process.wait()
