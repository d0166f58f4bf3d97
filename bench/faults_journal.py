"""What happens inside the service, as its journals tell it: which event has just been handled, and where, by whom.

Reads the files that `[debug] journal` makes while they grow; knows their format (actors/journal.py) and the messages,
nothing of processes. Each process's journal is opened when it appears, read to the end of what is there at each look,
and closed when a later incarnation of the same process has begun one.
"""

from __future__ import annotations

import asyncio
import re
import struct
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from cbdisagg_bench.faults_load import FIRST_SEED

from cbdisagg.actors.journal import Event
from cbdisagg.core.events import FromCoordinatorInbox, FromWorkerInbox
from cbdisagg.messages import PeerDown, Prefill, RequestId, Submit

LOOK_S = 0.01
"""Between two looks: files tell nobody that they grow. A hand-over takes longer."""
FOLDER_S = 0.1
_FRAME = struct.Struct(">BI")  # msgpack's bin 32: the type byte, then the length
_NAME = re.compile(r"(.+)\.(\d+)\.(\d{4})\.journal")


@dataclass(frozen=True, slots=True)
class Seen:
    """An event that a process has handled: a message by its name, or what its hands told. `sender`: of a message."""

    name: str
    actor: str
    sender: str


@dataclass(frozen=True, slots=True)
class Visit:
    """A sequence of a request has come to a worker at this time, to be decoded or only to be prefilled."""

    at: float
    sequence: RequestId
    incarnation: int
    decodes: bool


@dataclass(slots=True)
class _Tail:
    """One file and how far it has been read. `rest` is the beginning of a record that was being written."""

    actor: str
    incarnation: int
    file: BinaryIO
    rest: bytes = b""
    header_read: bool = False


@dataclass
class Journals:
    """`living`: the newest incarnation of each process that has a core. `visits`: by the number of the request.

    `causes`: how incarnations ended, as the supervisor has told the coordinator.
    """

    folder: Path
    living: dict[str, int] = field(default_factory=dict)
    visits: defaultdict[int, list[Visit]] = field(default_factory=lambda: defaultdict(list))
    names: dict[int, str] = field(default_factory=dict)
    causes: dict[int, str] = field(default_factory=dict)
    _tails: dict[str, _Tail] = field(default_factory=dict)
    _waiting: list[tuple[str, asyncio.Future[Seen]]] = field(default_factory=list)
    _decoder: msgspec.msgpack.Decoder[Any] = field(
        default_factory=lambda: msgspec.msgpack.Decoder(tuple[int, float, str, Event, int | None])
    )

    async def follow(self) -> None:
        """Until cancelled."""
        look_for_files = 0.0
        while True:
            if time.monotonic() >= look_for_files:
                self._open_new()
                look_for_files = time.monotonic() + FOLDER_S
            for tail in self._tails.values():
                self._read(tail)
            await asyncio.sleep(LOOK_S)

    async def next(self, name: str, patience_s: float) -> Seen | None:
        """The next event of this name, anywhere; None if there was none in time."""
        waiter: asyncio.Future[Seen] = asyncio.get_running_loop().create_future()
        self._waiting.append((name, waiter))
        try:
            async with asyncio.timeout(patience_s):
                return await waiter
        except TimeoutError:
            return None
        finally:
            self._waiting.remove((name, waiter))

    def first_part(self, incarnation: int) -> Path:
        """What `cbdisagg check` wants to be given."""
        return self.folder / f"{self.names[incarnation]}.{incarnation}.0000.journal"

    def close(self) -> None:
        for tail in self._tails.values():
            tail.file.close()
        self._tails.clear()

    def _open_new(self) -> None:
        known = {tail.file.name for tail in self._tails.values()}
        for path in sorted(self.folder.glob("*.journal")):
            found = _NAME.fullmatch(path.name)
            if found is None or str(path) in known:
                continue
            actor, incarnation, part = found[1], int(found[2]), int(found[3])
            tail = self._tails.get(actor)
            if tail is not None:
                if (incarnation, part) < (tail.incarnation, _part(tail)):
                    continue
                self._read(tail)
                tail.file.close()
            self._tails[actor] = _Tail(actor, incarnation, path.open("rb"))
            self.living[actor], self.names[incarnation] = incarnation, actor

    def _read(self, tail: _Tail) -> None:
        data = tail.rest + tail.file.read()
        at = 0
        while len(data) - at >= _FRAME.size:
            end = at + _FRAME.size + _FRAME.unpack_from(data, at)[1]
            if end > len(data):
                break
            if tail.header_read:
                _, now, _, event, _ = self._decoder.decode(data[at + _FRAME.size : end])
                self._see(tail, now, event)
            tail.header_read = True
            at = end
        tail.rest = data[at:]

    def _see(self, tail: _Tail, now: float, event: Event) -> None:
        seen = Seen(type(event).__name__, tail.actor, "")
        if isinstance(event, FromWorkerInbox | FromCoordinatorInbox):
            message = event.message
            seen = Seen(type(message).__name__, tail.actor, event.sender.name)
            if isinstance(message, Submit | Prefill):
                request = message.request
                visit = Visit(now, request.id, tail.incarnation, isinstance(message, Submit))
                self.visits[request.sampling.seed - FIRST_SEED].append(visit)
            elif isinstance(message, PeerDown):
                self.causes[message.incarnation] = message.cause
        for name, waiter in self._waiting:
            if name == seen.name and not waiter.done():
                waiter.set_result(seen)


def _part(tail: _Tail) -> int:
    found = _NAME.fullmatch(Path(tail.file.name).name)
    assert found is not None
    return int(found[3])
