"""Tokens that go out where they come in: order, what is left to the reader, failures, and the bytes on the wire."""

from __future__ import annotations

import asyncio
import json

import pytest

from cbdisagg.api.fake import FakeClient
from cbdisagg.api.format_completions import CompletionForm
from cbdisagg.api.stream import Stream, Update
from cbdisagg.messages import Finish, Sampling, Targets

PATH = "/v1/completions"


class Reader:
    """A task that iterates over a stream, as a request does, and what it and its express have got, in order."""

    def __init__(self, takes: int = 1000) -> None:
        self.client = FakeClient()
        self.stream = self.client.submit([1], Sampling(max_tokens=8), Targets(1.0, 0.05))
        self.got: list[tuple[str, int]] = []
        self.takes = takes
        self.stream.express = self.express

    def express(self, update: Update) -> bool:
        if not self.takes:
            return False
        self.takes -= 1
        self.got += [("express", id) for id in update.ids]
        return True

    async def read(self) -> None:
        async for update in self.stream:
            self.got += [("reader", id) for id in update.ids]

    async def give(self, *ids: int, finish: Finish | None = None) -> None:
        self.client.give(self.stream, ids, finish)


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_only_while_the_reader_waits_and_never_the_end() -> None:
    reader = Reader()
    await reader.give(1)  # nobody waits yet
    async with asyncio.TaskGroup() as group:
        group.create_task(reader.read())
        await settle()
        await reader.give(2)
        assert reader.got == [("reader", 1), ("express", 2)]  # at once
        await reader.give(3)
        await reader.give(4, finish=Finish("length"))
    assert reader.got == [("reader", 1), ("express", 2), ("express", 3), ("reader", 4)]


async def test_what_it_cannot_take_waits_for_the_reader_and_nothing_overtakes_it() -> None:
    reader = Reader(takes=1)
    async with asyncio.TaskGroup() as group:
        group.create_task(reader.read())
        await settle()
        await reader.give(1)
        await reader.give(2)
        reader.takes = 1  # it could again, but the reader has been woken for the one before
        await reader.give(3)
        await settle()
        await reader.give(4)
        await reader.give(5, finish=Finish("length"))
    assert reader.got == [("express", 1), ("reader", 2), ("reader", 3), ("express", 4), ("reader", 5)]


async def test_what_it_raises_is_raised_in_the_reader() -> None:
    reader = Reader()

    def broken(update: Update) -> bool:
        raise ZeroDivisionError

    reader.stream.express = broken
    task = asyncio.ensure_future(reader.read())
    await settle()
    await reader.give(1)  # where all streams are fed: nothing is raised here
    await reader.give(2)
    with pytest.raises(ZeroDivisionError):
        await task


def answer_in_parts(client: FakeClient, stream: Stream) -> None:
    """A token in each turn of the loop."""
    loop = asyncio.get_running_loop()

    def give(left: int) -> None:
        if not stream.ended:
            client.give(stream, [40 + left], Finish("length") if left == 0 else None)
            loop.call_later(0.001, give, left - 1)

    loop.call_soon(give, 6)


async def test_a_stream_has_an_event_for_each_token_either_way(serve, monkeypatch) -> None:
    http = await serve(FakeClient(answer_in_parts))
    events = await http.stream(PATH, prompt="x", max_tokens=7)
    monkeypatch.setattr(Stream, "_goes_by", lambda stream, express: False)
    plain = await http.stream(PATH, prompt="x", max_tokens=7)
    assert len(events) == 7 and [event["choices"] for event in events] == [event["choices"] for event in plain]


async def test_most_tokens_go_by_express(serve, monkeypatch) -> None:
    taken = []
    goes_by = Stream._goes_by
    monkeypatch.setattr(Stream, "_goes_by", lambda *both: taken.append(goes_by(*both)) or taken[-1])
    http = await serve(FakeClient(answer_in_parts))
    await http.stream(PATH, prompt="x", max_tokens=7, n=2)
    assert taken.count(True) >= 6


async def test_an_old_client_gets_no_chunks(serve) -> None:
    """HTTP/1.0: the body is what lies between the headers and the end of the connection."""
    http = await serve(FakeClient(answer_in_parts))
    reader, writer = await asyncio.open_connection("127.0.0.1", int(http.url.rsplit(":", 1)[1]))
    data = json.dumps({"prompt": "x", "stream": True, "max_tokens": 7}).encode()
    writer.write(b"POST %b HTTP/1.0\r\nContent-Type: application/json\r\n" % PATH.encode())
    writer.write(b"Content-Length: %d\r\n\r\n%b" % (len(data), data))
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    assert b"chunked" not in head.lower()
    *events, done, rest = body.split(b"\n\n")
    assert (len(events), done, rest) == (7, b"data: [DONE]", b"")
    assert all(event.startswith(b"data: {") for event in events)


async def test_a_bug_in_express_costs_one_stream(serve, monkeypatch, caplog) -> None:
    events = CompletionForm.events
    calls = []

    def breaks_at_third(form, choice, piece, usage):
        calls.append(piece)
        if len(calls) == 3:
            raise ZeroDivisionError("secret")
        return events(form, choice, piece, usage)

    monkeypatch.setattr(CompletionForm, "events", breaks_at_third)
    http = await serve(FakeClient(answer_in_parts))
    async with http.session.post(http.url + PATH, json={"prompt": "x", "stream": True}) as response:
        body = b""
        with pytest.raises(Exception, match="payload"):
            async for part in response.content.iter_any():
                body += part
    assert b'"code":"internal_error"' in body and b"secret" not in body and b"[DONE]" not in body
    assert "ZeroDivisionError" in caplog.text
    assert http.client.cancels == [(0, "disconnect")]
    assert len(await http.stream(PATH, prompt="x", max_tokens=7)) == 7
