"""The journal: every event of one core in the order handled, so that what happened can be run again.

A file is a msgpack stream of byte strings, each a msgpack value: first a `Header`, then records
`(seq, now, actor, event, digest)`. `digest` is a CRC-32 of the effects that the core returned, None if it raised: a
replay that returns others shows that the core depends on something besides its events. After PART_BYTES the stream
goes on in the next part; replay needs all parts, so none is deleted.
"""

from __future__ import annotations

import struct
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import msgspec
from msgspec import Struct

from cbdisagg.config import Config, ConfigError, Debug
from cbdisagg.core.effects import Effect
from cbdisagg.core.events import CoordinatorEvent, WorkerEvent
from cbdisagg.messages import PROTOCOL_VERSION, Address, WorkerInfo

PART_BYTES = 64 << 20
_FRAME = struct.Struct(">BI")  # msgpack's bin 32: the type byte 0xc6, then the length
_BIN32 = 0xC6

Event: TypeAlias = WorkerEvent | CoordinatorEvent
Record: TypeAlias = tuple[int, float, str, Event, int | None]


class JournalError(Exception):
    """A journal that cannot be read: one line that says which file and why."""


def journal_folder(debug: Debug) -> Path:
    return Path(debug.journal).expanduser()


def try_folder(folder: Path) -> None:
    """Make the folder and a file in it that passes. Raises ConfigError, one line, if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ConfigError(f'[debug] journal = "{folder}": cannot be written: {error.strerror or error}') from None


class Header(Struct, frozen=True):
    """Opens each part; enough to build the core anew. Without `worker` it is the coordinator's."""

    protocol: int
    part: int
    address: Address
    worker: WorkerInfo | None
    config: Config
    config_hash: int


class Journal:
    """Appends; one write per event, nothing buffered, so a crash keeps all of it. Raises OSError if it cannot write."""

    def __init__(self, folder: Path, me: WorkerInfo | Address, config: Config, part_bytes: int = PART_BYTES) -> None:
        address = me.address if isinstance(me, WorkerInfo) else me
        self._stem = folder / f"{address.name}.{address.incarnation}"
        self._header = Header(
            PROTOCOL_VERSION,
            0,
            address,
            me if isinstance(me, WorkerInfo) else None,
            config,
            zlib.crc32(msgspec.msgpack.encode(config)),
        )
        self._actor = address.name
        self._part_bytes = part_bytes
        self._encoder = msgspec.msgpack.Encoder()
        self._seq = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._open(0)

    def append(self, now: float, event: Event, effects: list[Effect] | None) -> None:
        if self._file.tell() > self._part_bytes:
            self._file.close()
            self._open(self._header.part + 1)
        self._write((self._seq, now, self._actor, event, None if effects is None else digest(effects)))
        self._seq += 1

    def close(self) -> None:
        self._file.close()

    def _open(self, part: int) -> None:
        self._file = part_path(self._stem, part).open("ab", buffering=0)
        self._header = msgspec.structs.replace(self._header, part=part)
        self._write(self._header)

    def _write(self, value: Header | Record) -> None:
        data = self._encoder.encode(value)
        self._file.write(_FRAME.pack(_BIN32, len(data)) + data)


def part_path(stem: Path, part: int) -> Path:
    return stem.with_name(f"{stem.name}.{part:04}.journal")


def digest(effects: list[Effect]) -> int:
    return zlib.crc32(msgspec.msgpack.encode(effects))


def read_journal(first: Path) -> tuple[Header, Iterator[Record]]:
    """The header and, part after part, the records. A record cut short by a crash ends the stream.

    Raises JournalError: not a journal, not its first part, or of another protocol version.
    """
    header = _header(first)
    if header.part != 0:
        raise JournalError(f"{first} is part {header.part} of a journal; replay starts at part 0000")
    return header, _records(first)


def _records(first: Path) -> Iterator[Record]:
    decoder: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(tuple[int, float, str, Event, int | None])
    path, part = first, 0
    stem = first.with_name(first.name.removesuffix(".0000.journal"))
    while path.exists():
        frames = _frames(path)
        next(frames, None)  # the header; a part that a crash left empty has none
        for number, data in enumerate(frames, 1):
            try:
                yield decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise JournalError(f"{path}: record {number} of this part is none of this version ({error})") from error
        part += 1
        path = part_path(stem, part)


def _header(path: Path) -> Header:
    try:
        header = msgspec.msgpack.decode(next(_frames(path)), type=Header)
    except OSError as error:
        raise JournalError(f"{path} is not a journal: it cannot be read: {error.strerror or error}") from error
    except StopIteration:
        raise JournalError(f"{path} is not a journal: it is empty, or cut short in its header") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise JournalError(f"{path} is not a journal: it does not begin with a header of one ({error})") from error
    if header.protocol != PROTOCOL_VERSION:
        raise JournalError(f"{path} is of protocol version {header.protocol}; this is version {PROTOCOL_VERSION}")
    return header


def _frames(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while len(head := file.read(_FRAME.size)) == _FRAME.size:
            kind, length = _FRAME.unpack(head)
            if kind != _BIN32:
                raise JournalError(f"{path} is not a journal: byte {file.tell() - _FRAME.size} is {kind:#x}")
            data = file.read(length)
            if len(data) < length:
                return
            yield data
