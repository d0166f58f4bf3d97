"""Server-sent events over one response: frames, back-pressure, keep-alives, and how a stream breaks.

Knows bytes and the connection; nothing of what the events say. Life cycle: the headers go out with the first event, so
that a request refused before it still gets a status; then `send`, or `put` while the connection flows; then the handler
returns (end) or `fail` (the connection breaks without the end of the body, so that no client takes half an answer for a
whole one).
"""

from __future__ import annotations

import asyncio
import time

from aiohttp import HttpVersion11, web

DONE = b"data: [DONE]\n\n"
KEEP_ALIVE = b": waiting\n\n"
LAG_BYTES = 16 * 1024
"""A connection with more than this unsent has a reader that lags."""


class ReaderStalled(Exception):
    """The client has not read for too long."""


class EventStream:
    """`stalled_s`: how long a client may leave its connection full before it is given up."""

    def __init__(self, request: web.Request, *, stalled_s: float, keep_alive_s: float = 15.0) -> None:
        self.response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        )
        self._chunked = request.version >= HttpVersion11
        if self._chunked:
            self.response.enable_chunked_encoding()
        self._request = request
        self._stalled_s = stalled_s
        self._keep_alive_s = keep_alive_s
        self._sent_s = time.monotonic()
        self._sending = 0  # writes that wait for the client

    @property
    def begun(self) -> bool:
        return self.response.prepared

    @property
    def lagging(self) -> bool:
        transport = self._request.transport
        return transport is not None and transport.get_write_buffer_size() > LAG_BYTES

    @property
    def flows(self) -> bool:
        """Events have been sent, and no client's slowness holds the next ones back."""
        transport = self._request.transport
        return (
            self.response.prepared
            and not self._sending
            and transport is not None
            and not transport.is_closing()
            and transport.get_write_buffer_size() <= LAG_BYTES
        )

    def put(self, events: bytes) -> None:
        """`send` for a connection that `flows`: nothing waits, so the bytes go to the transport as one chunk.

        That is what aiohttp's writer would do with them, at several times the cost, for every token of every stream.
        """
        transport = self._request.transport
        assert transport is not None
        transport.write(b"%x\r\n%b\r\n" % (len(events), events) if self._chunked else events)
        self._sent_s = time.monotonic()

    async def send(self, events: bytes) -> None:
        """Whole events, each ended by an empty line. Waits while the client does not read."""
        if not self.response.prepared:
            await self.response.prepare(self._request)
        self._sending += 1
        try:
            await self.response.write(events)
        finally:
            self._sending -= 1
            self._sent_s = time.monotonic()

    async def watch(self) -> None:
        """Comments while nothing else is sent, so that no proxy gives up. Never returns. Raises ReaderStalled."""
        period = min(self._keep_alive_s, self._stalled_s)
        while True:
            idle = time.monotonic() - self._sent_s
            if self._sending:
                if idle >= self._stalled_s:
                    raise ReaderStalled(f"the client has read nothing for {idle:.0f} s")
            elif idle >= self._keep_alive_s:
                await self.send(KEEP_ALIVE)
            await asyncio.sleep(period)

    async def fail(self, error: bytes) -> None:
        """A last event with the error, then the connection closes without the body's end."""
        await self.send(b"data: %b\n\n" % error)
        if self._request.transport is not None:
            self._request.transport.close()  # what is written goes out first

    def drop(self) -> None:
        """Close the connection at once, with what is unsent."""
        if self._request.transport is not None:
            self._request.transport.abort()
