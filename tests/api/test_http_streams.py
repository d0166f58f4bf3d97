"""Streams that do not go their whole way: refusals, failures, departures, readers that lag or stall, long waits."""

from __future__ import annotations

import asyncio
import json
import socket

import aiohttp
import pytest
from aiohttp import web

from cbdisagg.api import sse
from cbdisagg.api.client import RequestRejected, StreamFailed
from cbdisagg.api.fake import FakeClient
from cbdisagg.config import Config, Limits
from cbdisagg.messages import Finish

PATH, CHAT = "/v1/completions", "/v1/chat/completions"
BODIES = [(PATH, {"prompt": "x"}), (CHAT, {"messages": [{"role": "user", "content": "x"}]})]


async def read_raw(http, path: str, body: dict) -> tuple[bytes, bool]:
    """A whole connection: all bytes until the server closes it, and whether it broke within the body."""
    async with http.session.post(http.url + path, json=body) as response:
        data = b""
        try:
            async for part in response.content.iter_any():
                data += part
        except aiohttp.ClientPayloadError:
            return data, True
        return data, False


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_rejection_has_its_status_and_retry_after(serve, path, body, stream):
    for status, message in ((429, "the queue is full"), (503, "no worker"), (400, "too long")):
        error = RequestRejected(status, message, 2.5)
        http = await serve(FakeClient(lambda client, stream, error=error: client.fail(stream, error)))
        async with http.session.post(http.url + path, json={**body, "stream": stream}) as response:
            answer = json.loads(await response.read())
        assert response.status == status
        assert answer["error"]["message"] == message
        assert response.headers.get("Retry-After") == (None if status == 400 else "3")
        assert "x-should-retry" not in response.headers


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_who_will_never_be_served_is_not_told_to_come_again_soon(serve, path, body):
    error = RequestRejected(429, "the first token would take 9 s even if nobody else were served")
    http = await serve(FakeClient(lambda client, stream: client.fail(stream, error)))
    async with http.session.post(http.url + path, json=body) as response:
        assert (response.status, response.headers["Retry-After"]) == (429, "60")
        assert response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_one_rejected_sibling_ends_the_request_and_the_others(serve, path, body):
    def answer(client, stream):
        if stream.request.sampling.choice == 1:
            client.fail(stream, RequestRejected(429, "full"))

    http = await serve(FakeClient(answer))
    for stream in (False, True):
        status, _ = await http.post(path, **body, n=3, stream=stream)
        assert status == 429
    assert sorted(n for n, _ in http.client.cancels) == [0, 2, 3, 5]


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_failure_in_mid_stream_is_an_event_and_a_broken_connection(serve, path, body):
    def answer(client, stream):
        client.give(stream, [9, 10])
        client.fail(stream, StreamFailed("the worker died"))

    http = await serve(FakeClient(answer))
    data, broken = await read_raw(http, path, {**body, "stream": True})
    events = data.rstrip(b"\n").split(b"\n\n")
    assert broken
    assert b"[DONE]" not in data
    assert json.loads(events[-1].removeprefix(b"data: "))["error"]["message"] == "the worker died"
    assert "choices" in json.loads(events[0].removeprefix(b"data: "))
    status, answer_body = await http.post(path, **body)
    assert (status, answer_body["error"]["code"]) == (503, "stream_failed")


@pytest.mark.parametrize(("path", "body"), BODIES)
async def test_a_bug_is_an_internal_error_that_breaks_the_stream(serve, path, body, caplog):
    def answer(client, stream):
        client.give(stream, [9])
        stream.fail(ZeroDivisionError("secret"))

    http = await serve(FakeClient(answer))
    data, broken = await read_raw(http, path, {**body, "stream": True})
    assert broken
    assert b'"code":"internal_error"' in data
    assert b"secret" not in data
    status, answer_body = await http.post(path, **body)
    assert (status, answer_body["error"]["type"]) == (500, "server_error")
    assert "ZeroDivisionError" in caplog.text


@pytest.mark.parametrize(("path", "body"), BODIES)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_leaves_cancels_every_choice(serve, path, body, stream, begun, caplog):
    caplog.set_level("INFO")
    client = FakeClient(lambda client, stream: client.give(stream, [9]) if begun else None)
    http = await serve(client)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(http.url.rsplit(":", 1)[1]))
    data = json.dumps({**body, "stream": stream, "n": 2}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await http.until(lambda: len(client.streams) == 2)
    if stream and begun:
        await reader.readuntil(b"data: ")
    assert client.cancels == []
    writer.close()
    await http.until(lambda: len(client.cancels) == 2)
    assert {reason for _, reason in client.cancels} == {"disconnect"}
    await http.until(lambda: "status=499" in caplog.text)
    async with http.session.get(http.url + "/metrics") as response:
        assert f'cbdisagg:http_requests_total{{path="{path}",status="499"}} 1.0' in await response.text()


async def test_a_client_that_leaves_with_the_end_has_been_served(serve, caplog, monkeypatch):
    """Many close as soon as they have read [DONE], while the server still ends the body."""
    caplog.set_level("INFO")
    client_has_left = asyncio.Event()

    async def write_eof(self, data=b""):
        client_has_left.set()
        await asyncio.Event().wait()  # until the departure cancels the handler

    monkeypatch.setattr(web.StreamResponse, "write_eof", write_eof)
    http = await serve(FakeClient(lambda client, stream: client.give(stream, [9], Finish("stop"))))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(http.url.rsplit(":", 1)[1]))
    data = json.dumps({"prompt": "x", "stream": True}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    writer.write(head.encode() + data)
    await reader.readuntil(b"data: [DONE]\n\n")
    await client_has_left.wait()
    writer.close()
    await http.until(lambda: f"path={PATH} status=" in caplog.text)
    assert f"path={PATH} status=200" in caplog.text


async def test_a_stalled_reader_is_coalesced_and_bounded_and_blocks_nobody(serve):
    """Its tokens wait as ids; when it reads on it gets them all, several in a chunk, and the text is whole."""
    http = await serve(FakeClient(), max_len=200_000)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, ("127.0.0.1", int(http.url.rsplit(":", 1)[1])))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**24)
    writer.transport.pause_reading()
    data = json.dumps({"prompt": "x", "max_tokens": 100_000, "stream": True, "logprobs": None}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    await http.until(lambda: http.client.streams)
    stream = http.client.streams[0]
    count, unread = 40_000, 0
    for number in range(count):
        http.client.give(stream, [9 + number % 200], Finish("length") if number == count - 1 else None)
        if number % 8 == 0:
            await asyncio.sleep(0)
            unread = max(unread, len(stream._unread))
    assert unread > 10_000  # ids, not text, have piled up
    assert (await http.get("/health"))[0] == 200
    writer.transport.resume_reading()
    received = (await reader.readuntil(b"data: [DONE]\n\n")).split(b"data: ")
    writer.close()
    chunks = [json.loads(part.split(b"\n\n")[0]) for part in received[1:-1]]
    assert sum(len(chunk["choices"][0]["text"]) > 100 for chunk in chunks) >= 1
    assert len(chunks) < count - unread / 2
    assert "\ufffd" not in chunks[0]["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_a_reader_that_never_reads_is_given_up(serve, caplog):
    caplog.set_level("INFO")
    http = await serve(FakeClient(), config=Config(limits=Limits(stalled_reader_s=0.05)), max_len=200_000)
    _, writer = await asyncio.open_connection("127.0.0.1", int(http.url.rsplit(":", 1)[1]))
    writer.transport.pause_reading()
    data = json.dumps({"prompt": "x", "max_tokens": 199_000, "stream": True}).encode()
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b"
        % (len(data), data)
    )
    await http.until(lambda: http.client.streams)
    while not http.client.cancels:
        http.client.give(http.client.streams[0], [9] * 100)
        await asyncio.sleep(0)
    assert http.client.cancels == [(0, "disconnect")]
    await http.until(lambda: "status=499" in caplog.text)
    writer.close()


async def test_long_waits_are_kept_alive_by_comments(serve, monkeypatch):
    monkeypatch.setattr(sse.EventStream.__init__, "__kwdefaults__", {"keep_alive_s": 0.01})
    http = await serve(FakeClient())
    async with http.session.post(http.url + PATH, json={"prompt": "x", "stream": True}) as response:
        assert await response.content.readuntil(b"\n\n") == b": waiting\n\n"
        http.client.give(http.client.streams[0], [9], Finish("stop"))
        rest = await response.content.read()
    assert rest.endswith(b"data: [DONE]\n\n")


async def test_a_rejection_after_the_headers_is_an_event(serve, monkeypatch):
    monkeypatch.setattr(sse.EventStream.__init__, "__kwdefaults__", {"keep_alive_s": 0.01})
    http = await serve(FakeClient())
    async with http.session.post(http.url + PATH, json={"prompt": "x", "stream": True}) as response:
        await response.content.readuntil(b"\n\n")
        http.client.fail(http.client.streams[0], RequestRejected(429, "full"))
        with pytest.raises(aiohttp.ClientPayloadError):
            data = b""
            while True:
                data += await response.content.readany()
    assert b'data: {"error":{"message":"full","type":"rate_limit_error"' in data
    assert b"[DONE]" not in data


async def test_updates_of_several_tokens_are_one_chunk_each_for_a_reader_that_keeps_up(serve):
    http = await serve(FakeClient(lambda client, stream: client.give(stream, [9, 10, 11, 12], Finish("length"))))
    assert len(await http.stream(PATH, prompt="x")) == 4
    assert len(await http.stream(CHAT, messages=[{"role": "user", "content": "x"}])) == 1 + 4 + 1


async def test_line_separators_cannot_split_an_event(serve, tokenizer):
    text = "a\u2028b\u0085c\u2029d\r\n"
    http = await serve(FakeClient(lambda client, stream: client.give(stream, tokenizer.encode(text), Finish("length"))))
    data, _ = await read_raw(http, PATH, {"prompt": "x", "stream": True})
    decoded = data.decode()
    assert decoded.splitlines() == decoded.split("\n")[:-1]
    events = [json.loads(line[6:]) for line in decoded.splitlines() if line.startswith("data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
