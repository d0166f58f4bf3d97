"""HTTP/1.1 for a load generator: one request on a connection of its own, the body handed on as it comes.

Knows framing (headers, chunks, a length, or until the end) and connections; nothing of what is sent. A client library
wakes a task for every chunk: on a machine that it shares with the server, that is taken from the server for each token.
Life cycle: `post` connects and sends -> headers -> parts of the body go to `on_body` -> the end, or an OSError or
ValueError.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

HEADER_BYTES = 1 << 16
_BLANK, _LINE = b"\r\n\r\n", b"\r\n"

OnBody = Callable[[int, bytes], None]
"""Gets the status and the next bytes of the body."""


async def post(url: str, headers: Mapping[str, str], body: bytes, on_body: OnBody) -> int:
    """POST `body` to `url` (http or https); the status, once all of the answer has come.

    What `on_body` raises ends the request and is raised. Raises OSError when the connection cannot be had or breaks
    before the end, ValueError for what is no HTTP.
    """
    parts = urlsplit(url)
    assert parts.hostname is not None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    transport, exchange = await loop.create_connection(
        lambda: Exchange(on_body), parts.hostname, port, ssl=parts.scheme == "https" or None
    )
    try:
        lines = [f"POST {parts.path or '/'} HTTP/1.1", f"Host: {parts.netloc}", f"Content-Length: {len(body)}"]
        lines += [*(f"{name}: {value}" for name, value in headers.items()), "Connection: close"]
        transport.write("\r\n".join(lines).encode() + _BLANK + body)
        return await exchange.ended
    finally:
        transport.abort()


class Exchange(asyncio.Protocol):
    """The receiving side of one connection. `ended` gives the status, or raises what went wrong."""

    def __init__(self, on_body: OnBody) -> None:
        self.ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._on_body = on_body
        self._status = 0
        self._rest = b""
        self._take: Callable[[bytes], None] = self._head
        self._left = 0  # bytes of the body, if it has a length

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            self._take(self._rest + data if self._rest else data)
        except Exception as error:  # the edge of the loop: it is raised where the answer is waited for
            self.ended.set_exception(error)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is None and self._take == self._until_end:
            self.ended.set_result(self._status)
        else:
            self.ended.set_exception(ConnectionResetError(f"the connection broke: {error or 'it was closed'}"))

    def _head(self, data: bytes) -> None:
        head, blank, body = data.partition(_BLANK)
        if not blank:
            if len(data) > HEADER_BYTES:
                raise ValueError("headers without an end")
            self._rest = data
            return
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ValueError(f"no HTTP: {first[:80]!r}")
        fields = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        self._rest, self._status = b"", int(status[:3])
        if self._status == 100:  # the answer follows
            self._take(body)
        elif fields.get("transfer-encoding", "").lower() == "chunked":
            self._begin(self._chunks, body)
        elif "content-length" in fields:
            self._left = int(fields["content-length"])
            self._begin(self._counted, body)
        else:
            self._begin(self._until_end, body)

    def _begin(self, take: Callable[[bytes], None], body: bytes) -> None:
        self._take = take
        take(body)

    def _chunks(self, data: bytes) -> None:
        start = 0
        while (line := data.find(_LINE, start)) >= 0:
            size = int(data[start:line].partition(b";")[0], 16)
            if not size:
                self.ended.set_result(self._status)
                return
            end = line + 2 + size
            if len(data) < end + 2:
                break
            self._on_body(self._status, data[line + 2 : end])
            start = end + 2
        self._rest = data[start:]

    def _counted(self, data: bytes) -> None:
        self._left -= len(data)
        self._until_end(data)
        if self._left <= 0:
            self.ended.set_result(self._status)

    def _until_end(self, data: bytes) -> None:
        if data:
            self._on_body(self._status, data)
