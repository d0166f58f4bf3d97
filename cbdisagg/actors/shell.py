"""The shell: performs a core's effects and brings it events. The only place where a core meets a clock.

Knows the mailbox, timers, the log and the journal; what needs an engine goes to `hands`. One event is handled at a
time, on the loop; threads put theirs in by `from_thread`. Nothing is caught here: an exception reaches the loop, which
ends the process (life.py).
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeAlias, TypeVar, assert_never, cast

from cbdisagg.actors.journal import Event, Journal
from cbdisagg.actors.lane import Tray
from cbdisagg.actors.mailbox import Post
from cbdisagg.core.effects import (
    Check,
    Connect,
    Disconnect,
    Effect,
    Expect,
    Forget,
    Note,
    Retire,
    RunStep,
    Tell,
    Verify,
    Wake,
)
from cbdisagg.core.events import Tick

log = logging.getLogger("cbdisagg.core")

E = TypeVar("E")
E_contra = TypeVar("E_contra", contravariant=True)
Deed: TypeAlias = RunStep | Connect | Disconnect | Verify | Expect | Forget | Check
"""The effects that need an engine or a transport."""


class Core(Protocol[E_contra]):
    def handle(self, event: E_contra, now: float) -> list[Effect]: ...


class Hands(Protocol):
    """Performs deeds; their events come back through `Shell.from_thread`."""

    def perform(self, deed: Deed) -> None: ...


class Shell(Generic[E]):
    """Around one core. `check` is called after every event (debug.invariants); without `hands` a deed is a bug.

    `on_retire` is called when the core has nothing left to do; what it has told by then is still to be sent.
    """

    def __init__(
        self,
        core: Core[E],
        post: Post,
        hands: Hands | None = None,
        *,
        on_retire: Callable[[], None] | None = None,
        check: Callable[[], None] | None = None,
        journal: Journal | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._core, self._post, self._hands = core, post, hands
        self._on_retire, self._check, self._journal = on_retire, check, journal
        self._clock = clock  # not loop.time(): uvloop's has steps of a millisecond and stands still within a turn
        self._loop = asyncio.get_running_loop()
        self._tray: Tray[E] = Tray(self._loop, self.handle)
        self._timer: asyncio.TimerHandle | None = None
        self._wake_at = 0.0

    def handle(self, event: E) -> None:
        """Loop only."""
        now = self._clock()
        effects: list[Effect] | None = None
        try:
            effects = self._core.handle(event, now)
        finally:
            if self._journal is not None:
                self._journal.append(now, cast(Event, event), effects)
        for effect in effects:
            self._perform(effect)
        if self._check is not None:
            self._check()

    def from_thread(self, event: E) -> None:
        """Any thread: the loop handles it soon, and is woken once for all that wait."""
        self._tray.put(event)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._journal is not None:
            self._journal.close()

    def _perform(self, effect: Effect) -> None:
        match effect:
            case Tell(to, message):
                self._post.tell(to, message)
            case Wake(at):
                self._wake(at)
            case Note(level, text):
                log.log(logging.getLevelNamesMapping()[level.upper()], "%s", text)
            case Retire():
                if self._on_retire is None:
                    raise TypeError(f"{effect!r} from a core that nobody asked to leave")
                self._on_retire()
            case RunStep() | Connect() | Disconnect() | Verify() | Expect() | Forget() | Check():
                if self._hands is None:
                    raise TypeError(f"{effect!r} from a core without an engine")
                self._hands.perform(effect)
            case _:
                assert_never(effect)

    def _wake(self, at: float) -> None:
        if self._timer is not None:
            if at == self._wake_at:
                return
            self._timer.cancel()
        self._wake_at = at
        self._timer = self._loop.call_later(max(0.0, at - self._clock()), self._ring)

    def _ring(self) -> None:
        self._timer = None
        early = self._wake_at - self._clock()
        if early > 0:  # timers count whole milliseconds, the core counts on `now >= at`
            self._timer = self._loop.call_later(max(early, 0.001), self._ring)
        else:
            self.handle(cast(E, Tick()))
