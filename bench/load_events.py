"""What a streaming server sends: the payloads of server-sent events, and what matters in one of them.

Knows the format of events and of OpenAI's chunks, as far as a stopwatch needs it; nothing of connections or clocks.
Fields that are not looked at may be missing or anything, so servers with and without extensions are read alike.
"""

from __future__ import annotations

import re

import msgspec
from msgspec import Struct

DONE = b"[DONE]"
_END = re.compile(rb"\r?\n\r?\n")


class Events:
    """Cuts a body into events as it comes; a part of one waits for the rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The payloads of the events that are complete now, without comments."""
        *whole, self._rest = _END.split(self._rest + data)
        return [payload for event in whole if (payload := _payload(event))]


def _payload(event: bytes) -> bytes:
    lines = (line.partition(b":") for line in event.splitlines())
    return b"\n".join(value.removeprefix(b" ") for name, _, value in lines if name == b"data")


class Usage(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class ChunkChoice(Struct):
    text: str | None = None
    finish_reason: str | None = None


class Chunk(Struct):
    """One event: tokens, the usage at the end, or an error instead."""

    choices: tuple[ChunkChoice, ...] = ()
    usage: Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(Chunk).decode


def read_chunk(payload: bytes) -> Chunk:
    """Raises ValueError for what is no such event."""
    try:
        return _decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"an event that cannot be read: {error}: {payload[:120]!r}") from None
