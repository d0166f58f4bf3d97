"""Tuning while serving (`policy.tuner`): the coordinator's requests go to a search in a process of its own.

Knows the child process and when to ask it; what to make of its answer is sim/online.py's. Life of a question: enough
requests have ended -> a child of the lowest priority -> its answer, or a line in the log if there is none -> perhaps a
Steer -> wait for the next requests. Off the path of any request: without an answer the service goes on as it is.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from cbdisagg.actors.life import PR_SET_PDEATHSIG
from cbdisagg.actors.mailbox import Post
from cbdisagg.config import Config, ConfigError
from cbdisagg.core.knobs import configured
from cbdisagg.core.profile import Profile, parse_profile
from cbdisagg.messages import Address, Knobs, Message, Steer
from cbdisagg.sim.online import Answer, History, Question, Steering, answer

log = logging.getLogger(__name__)

LOWEST_PRIORITY = 19


class Tuner:
    """`steer` tells the core. Loop only."""

    def __init__(self, config: Config, profile: Profile, steer: Callable[[Steer], None], history: History) -> None:
        self._config, self._profile, self._steer = config, profile, steer
        self._history = history
        self._steering = Steering(configured(config))
        self._full = asyncio.Event()

    def hear(self, message: object) -> None:
        """All that the coordinator is told, and all that it tells: refusals are its own."""
        self._history.hear(time.monotonic(), message)
        if self._history.full:
            self._full.set()

    async def run(self) -> None:
        """Until it is cancelled."""
        while True:
            await self._full.wait()
            self._full.clear()
            asks, in_time = self._history.take()
            back = self._steering.judge(in_time)
            if back is not None:
                self._turn(back, f"{in_time:.0%} of the last {len(asks)} requests in time: back to what was better")
                continue
            question = Question(self._config, self._profile, tuple(asks), self._steering.now)
            found = await ask(question)
            if found is not None and (knobs := self._steering.adopt(found, in_time)) is not None:
                self._turn(knobs, f"predicted to keep up with {found.gain:.0%} more, by the last {len(asks)} requests")

    def _turn(self, knobs: Knobs, reason: str) -> None:
        log.info("tuned: %s: %s", knobs, reason)
        self._steer(Steer(knobs, reason))
        self._history.begin_anew()  # what has ended meanwhile, under other knobs, says nothing about these
        self._full.clear()


class Heard:
    """A mailbox whose outgoing messages somebody hears."""

    def __init__(self, post: Post, hear: Callable[[object], None]) -> None:
        self._post, self._hear = post, hear

    def tell(self, to: Address, message: Message) -> None:
        self._hear(message)
        self._post.tell(to, message)


def make_tuner(config: Config, steer: Callable[[Steer], None]) -> Tuner | None:
    """None, and a line in the log, if it cannot be known what steps cost. Nothing is wrong then but the wish."""
    path = Path(config.profile.path).expanduser()
    if not config.profile.path:
        log.warning("[policy] tuner = true has no effect without [profile] path: measure one with cbdisagg profile")
        return None
    try:
        profile = parse_profile(path.read_bytes(), str(path))
    except (OSError, ConfigError) as error:
        log.warning("[policy] tuner = true has no effect: %s", error)
        return None
    return Tuner(config, profile, steer, History(page_size=config.kv.page_size))


async def ask(question: Question) -> Answer | None:
    """None if the child has failed: that is a bug of the search, and no reason to stop serving."""
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", __name__),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        said, complaint = await child.communicate(msgspec.json.encode(question))
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()
    if child.returncode:
        lines = complaint.decode(errors="replace").strip().splitlines()
        log.warning("tuning failed with status %d: %s", child.returncode, lines[-1] if lines else "it said nothing")
        return None
    return msgspec.json.decode(said, type=Answer)


def _main() -> None:
    os.nice(LOWEST_PRIORITY)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)  # nobody else waits for an answer
    question = msgspec.json.decode(sys.stdin.buffer.read(), type=Question)
    try:
        found = answer(question)
    except ConfigError as error:
        sys.exit(str(error))
    sys.stdout.buffer.write(msgspec.json.encode(found))


if __name__ == "__main__":
    _main()
