"""The load generator's HTTP: every framing, however the bytes are cut, and everything that can break."""

from __future__ import annotations

import asyncio

import pytest
from cbdisagg_bench.load_http import Exchange, post

OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n6;ext=1\r\n world\r\n0\r\n\r\n"
COUNTED = OK + b"content-length: 11\r\n\r\nhello world"
UNTIL_END = b"HTTP/1.0 200 OK\r\nServer: old\r\n\r\nhello world"
CONTINUED = b"HTTP/1.1 100 Continue\r\n\r\n" + COUNTED


class Body:
    def __init__(self) -> None:
        self.data, self.parts = b"", 0

    def __call__(self, status: int, data: bytes) -> None:
        assert status == 200
        self.data += data
        self.parts += 1


@pytest.mark.parametrize("size", [1, 3, 20, 10_000])
@pytest.mark.parametrize("answer", [CHUNKED, COUNTED, UNTIL_END, CONTINUED])
async def test_a_body_is_whole_however_it_comes(answer: bytes, size: int) -> None:
    body = Body()
    exchange = Exchange(body)
    for first in range(0, len(answer), size):
        exchange.data_received(answer[first : first + size])  # a last line feed may come after the end
    exchange.connection_lost(None)
    assert exchange.ended.result() == 200 and body.data == b"hello world"


async def test_a_part_goes_on_when_it_is_there() -> None:
    body = Body()
    exchange = Exchange(body)
    exchange.data_received(CHUNKED[: CHUNKED.index(b"6;")])
    assert (body.data, body.parts) == (b"hello", 1)
    exchange.ended.cancel()


@pytest.mark.parametrize("answer", [CHUNKED[:-7], COUNTED[:-1], OK, b""])
async def test_a_connection_that_breaks_before_the_end_is_an_error(answer: bytes) -> None:
    exchange = Exchange(Body())
    exchange.data_received(answer)
    exchange.connection_lost(None)
    with pytest.raises(OSError, match="broke"):
        exchange.ended.result()


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-x\r\n\r\n", OK + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n", b"x" * 70_000]
)
async def test_what_is_no_http_is_an_error(answer: bytes) -> None:
    exchange = Exchange(Body())
    exchange.data_received(answer)
    with pytest.raises(ValueError):
        exchange.ended.result()


async def test_what_the_reader_raises_ends_the_request_and_the_connection() -> None:
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n{}")
        writer.write(CHUNKED[:-5])
        assert await reader.read() == b""
        writer.close()
        closed.set()

    def broken(status: int, data: bytes) -> None:
        raise ZeroDivisionError

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    with pytest.raises(ZeroDivisionError):
        await post(f"http://{host}:{port}/v1/completions", {"A": "b"}, b"{}", broken)
    await closed.wait()
    server.close()
    await server.wait_closed()
