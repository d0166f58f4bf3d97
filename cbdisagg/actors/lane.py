"""Threads beside the loop: a lane does jobs one after the other, a tray brings what threads have to say to the loop."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

T = TypeVar("T")


class Lane:
    """One thread that does jobs in the order given. A job that raises is the last one: `on_error` gets the exception.

    The thread is a daemon: a process that leaves does not wait for it.
    """

    def __init__(self, name: str, on_error: Callable[[BaseException], None]) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._on_error = on_error
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def do(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def _work(self) -> None:
        try:
            while True:
                self._jobs.get()()
        except BaseException as error:
            # The edge of the thread: nobody above would see it.
            self._on_error(error)


class Tray(Generic[T]):
    """Things put in by any thread, taken out in order on the loop, which is woken once for all that lie there."""

    def __init__(self, loop: asyncio.AbstractEventLoop, take: Callable[[T], None]) -> None:
        self._loop, self._take = loop, take
        self._things: deque[T] = deque()
        self._woken = False
        self._lock = threading.Lock()

    def put(self, thing: T) -> None:
        with self._lock:
            self._things.append(thing)
            if self._woken:
                return
            self._woken = True
        self._loop.call_soon_threadsafe(self._empty)

    def _empty(self) -> None:
        while True:
            with self._lock:
                if not self._things:
                    self._woken = False
                    return
                thing = self._things.popleft()
            self._take(thing)
