"""POST /drain, and what else is different while a service is about to end."""

from __future__ import annotations

import asyncio
import socket

import aiohttp
import pytest

from cbdisagg.api.fake import FakeClient
from cbdisagg.api.service import SERVICE
from cbdisagg.config import Config, Limits, Policy, Targets
from cbdisagg.messages import Drain, Finish

PATH = "/v1/completions"


def ending(client, stream):
    client.give(stream, [9], Finish("length"))


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ({"workers": ["decode-0"]}, Drain(("decode-0",))),
        ({"workers": ["decode-0", "prefill-0", "decode-0"]}, Drain(("decode-0", "prefill-0"))),
        ({"workers": "all"}, Drain(("prefill-0", "decode-0"))),
        ({"workers": "all", "reload": True}, Drain(("prefill-0", "decode-0"), reload=True)),
        ({"workers": ["prefill-0"], "reload": None}, Drain(("prefill-0",))),
    ],
)
async def test_workers_are_asked_by_name_and_the_service_serves_on(serve, body, asked):
    http = await serve(FakeClient(ending))
    assert await http.post("/drain", **body) == (202, {"draining": list(asked.workers)})
    assert http.drained == [asked]
    assert (await http.get("/ready"))[0] == 200
    assert (await http.post(PATH, prompt="x"))[0] == 200


@pytest.mark.parametrize("data", [b"", b"{}", b'{"workers": null}'])
async def test_the_service_takes_nothing_new_and_finishes_what_runs(serve, data):
    http = await serve(FakeClient())
    running = asyncio.create_task(http.post(PATH, prompt="x"))
    await http.until(lambda: http.client.streams)
    assert await http.raw("/drain", data) == (202, {"draining": ["service"]})
    assert http.drained == [Drain()]
    for path in (PATH, "/v1/chat/completions"):
        async with http.session.post(http.url + path, json={"prompt": "x"}) as response:
            assert (response.status, response.headers["Retry-After"]) == (503, "10")
            assert (await response.json())["error"]["code"] == "draining"
    status, refusal = await http.get("/ready")
    assert (status, refusal["error"]["code"]) == (503, "draining")
    assert await http.get("/health") == (200, {"status": "ok"})
    assert (await http.get("/metrics-not-there"))[0] == 404
    assert len(http.client.streams) == 1
    ending(http.client, http.client.streams[0])
    assert (await running)[0] == 200


async def test_the_door_tells_when_the_last_request_has_left(serve):
    http = await serve(FakeClient())
    door, empty = http.app[SERVICE].door, []
    running = [asyncio.create_task(http.post(PATH, prompt="x")) for _ in range(2)]
    await http.until(lambda: len(http.client.streams) == 2)
    door.close(when_empty=lambda: empty.append(door.inside))
    assert door.inside == 2
    for stream, answer in zip(http.client.streams, running, strict=True):
        assert empty == []
        ending(http.client, stream)
        await answer
    await http.until(lambda: empty)
    assert empty == [0]
    door.close(when_empty=lambda: empty.append(-1))
    assert empty == [0, -1], "at once if nobody is inside"


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (b'{"workers": ["decode-7"]}', 404, "there is no worker 'decode-7'; there are prefill-0, decode-0"),
        (b'{"workers": ["prefill-0", "coordinator"]}', 404, "no worker 'coordinator'"),
        (b'{"workers": []}', 400, "workers is empty"),
        (b'{"reload": true}', 400, "reload needs workers"),
        (b'{"workrs": ["decode-0"]}', 400, "unknown field `workrs`"),
        (b'{"workers": "decode-0"}', 400, "Invalid enum value 'decode-0'"),
        (b'{"workers": [1]}', 400, "Expected `str`, got `int`"),
        (b'{"reload": "yes"}', 400, "Expected `bool | null`, got `str`"),
        (b"[]", 400, "Expected `object`, got `array`"),
        (b"{", 400, "not valid JSON"),
        (b'{"workers": ["\xff"]}', 400, "not valid JSON"),
    ],
)
async def test_what_is_not_meant_so_is_refused_and_drains_nobody(serve, data, status, words):
    http = await serve(FakeClient())
    got, error = await http.raw("/drain", data)
    assert got == status
    assert words in error["error"]["message"]
    assert http.drained == []
    assert (await http.get("/ready"))[0] == 200


@pytest.mark.parametrize(
    "headers", [{"Origin": "http://example.com"}, {"X-Forwarded-For": "10.0.0.1"}, {"Forwarded": "for=10.0.0.1"}]
)
async def test_without_a_key_nobody_drains_for_somebody_else(serve, headers):
    """A page in a browser of this machine, or a client of a proxy on it."""
    http = await serve(FakeClient())
    status, error = await http.raw("/drain", b"", **headers)
    assert (status, error["error"]["type"]) == (403, "permission_error")
    assert http.drained == []
    http = await serve(FakeClient(), api_key="s3cret")
    assert (await http.raw("/drain", b"", **headers))[0] == 401
    assert (await http.raw("/drain", b"", Authorization="Bearer s3cret", **headers))[0] == 202


async def test_without_a_key_another_machine_is_refused(serve):
    """This machine by an address of its own that is not the loopback's: the peer is then that address."""
    address = own_address()
    if not address:
        pytest.skip("this machine has no address but the loopback's")
    http = await serve(FakeClient(), host=address)
    async with aiohttp.ClientSession() as session, session.post(f"{http.url}/drain") as response:
        assert response.status == 403
    assert http.drained == []


def own_address() -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: a datagram socket only looks for the way
        except OSError:
            return ""
        address: str = probe.getsockname()[0]
    return "" if address.startswith("127.") else address


async def test_settings_that_are_read_again_hold_for_new_requests(serve):
    http = await serve(FakeClient(ending))
    http.client.resume_s = http.client.silent_s = 0.0
    assert (await http.post(PATH, prompt="x", n=3))[0] == 200
    http.app[SERVICE].renew(
        Config(targets=Targets(77.0, 7.0), limits=Limits(n=2, resume_s=5.0), policy=Policy(silent_s=3))
    )
    status, error = await http.post(PATH, prompt="x", n=3)
    assert (status, error["error"]["param"]) == (400, "n")
    assert (await http.post(PATH, prompt="x"))[0] == 200
    assert http.client.streams[-1].request.targets.ttft_s == 0.077
    assert (http.client.resume_s, http.client.silent_s) == (5.0, 3.0)
