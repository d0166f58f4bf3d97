"""`bench faults` without a service: what is asked, what counts as lost, altered or repeated, who is struck and when."""

from __future__ import annotations

import asyncio
import copy
import json
import math
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cbdisagg_bench import faults
from cbdisagg_bench.faults_answers import Answer, compare
from cbdisagg_bench.faults_client import Client, ask_all, open_session
from cbdisagg_bench.faults_figures import (
    Report,
    Spread,
    by_cause,
    cause_of,
    finding,
    first_events,
    longest,
    pauses,
    spread,
    tables,
)
from cbdisagg_bench.faults_journal import Journals, Visit
from cbdisagg_bench.faults_load import FIRST_SEED, Ask, Room, draw_load, rounds
from cbdisagg_bench.faults_moments import Fault, Strike, Striker, draw_fault
from cbdisagg_bench.faults_processes import Processes
from rich.console import Console

from cbdisagg import cli
from cbdisagg.actors.journal import Journal
from cbdisagg.api.schemas_requests import ChatRequest, CompletionRequest
from cbdisagg.config import Config
from cbdisagg.core.events import FromCoordinatorInbox, FromWorkerInbox, Tick
from cbdisagg.messages import Address, Generate, PeerDown, RequestId, Route, Sampling, Submit, Targets

ROOM = Room(max_len=2000, tokens_per_word=1.25)


# ------------------------------------------------------------------------------------------------------ the load


def test_the_seed_alone_makes_the_load() -> None:
    assert draw_load(30, 5, ROOM) == draw_load(30, 5, ROOM) != draw_load(30, 6, ROOM)


def test_the_load_is_a_mix_that_the_api_takes() -> None:
    load = draw_load(600, 0, ROOM)
    for ask in load:
        kind = ChatRequest if ask.chat else CompletionRequest
        request = msgspec.convert(ask.body, kind, strict=True)
        assert request.seed == FIRST_SEED + ask.number
        texts = [message.content for message in request.messages] if ask.chat else request.prompt
        words = len(" ".join([texts] if isinstance(texts, str) else texts).split())
        assert 1.25 * words + request.max_tokens < ROOM.max_len
    bodies = [ask.body for ask in load]
    for field in ("stream", "stop", "n", "logprobs", "echo", "prompt_logprobs", "min_tokens", "ignore_eos", "top_p"):
        assert 0 < sum(field in body for body in bodies) < len(load), field
    for field in ("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "stream_options"):
        assert any(field in body for body in bodies), field
    assert {ask.chat for ask in load} == {body["temperature"] > 0 for body in bodies} == {True, False}
    assert any(body["max_tokens"] == 1 for body in bodies)
    assert 0.02 < sum(ask.leaves for ask in load) / len(load) < 0.09
    assert all(ask.streamed for ask in load if ask.leave_events)


def test_a_small_service_is_asked_for_what_it_can_hold() -> None:
    for ask in draw_load(200, 1, Room(max_len=400, tokens_per_word=2.0)):
        prompt = ask.body.get("prompt") or " ".join(message["content"] for message in ask.body["messages"])
        assert 2 * len((" ".join(prompt) if isinstance(prompt, list) else prompt).split()) < 400


def test_each_round_asks_everything_once_and_under_a_salt_of_its_own() -> None:
    load = draw_load(7, 0, ROOM)
    asks = rounds(load, 3)
    first, second = ([next(asks) for _ in load] for _ in range(2))
    for one in (first, second):
        assert sorted(ask.number for _, ask in one) == list(range(7))
        assert len({salt for salt, _ in one}) == 1
    assert first[0][0] != second[0][0]


# ---------------------------------------------------------------------------------------------------- comparison


def chunk(text: str, finish: str | None = None, index: int = 0, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": finish, "stop_reason": None, **more}]}


USAGE = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7}


def answer(*chunks: dict[str, Any], whole: bool = True, left: bool = False, error: str = "") -> Answer:
    made = Answer(Ask(0, False, {}), "salt", 0.0, whole=whole, left=left, error=error)
    for one in chunks:
        made.take(one)
    return made


def streamed(*texts: str) -> Answer:
    usage = {"choices": [], "usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 2}}}
    return answer(*(chunk(text) for text in texts[:-1]), chunk(texts[-1], "length"), usage)


REFERENCE = streamed("one", " two", " three", " four")


@pytest.mark.parametrize(
    ("found", "kind", "what"),
    [
        (streamed("one two", " three four"), "same", ""),
        (streamed("one", " two", " four"), "altered", "text differ at 8 of 18"),
        (streamed("one", " two", " two", " three", " four"), "repeated", "'wo three four' instead of"),
        (streamed("one", " two", " three", " four", " four"), "repeated", "at 18 of 18"),
        (streamed("one", " two", " three", " fear"), "altered", "'ear' instead of 'our'"),
        (streamed("one", " two", " three"), "altered", "at 13 of 18"),
        (answer(chunk("one two three four"), {"choices": [], "usage": USAGE}), "lost", "no finish reason"),
        (answer(chunk("one two three four", "length"), whole=False), "lost", "without an end"),
        (answer(chunk("one"), error="503 gone"), "lost", "503 gone"),
        (answer(chunk("one two three four", "length")), "altered", "usage None instead of"),
        (answer(chunk("one two three four", "stop"), {"choices": [], "usage": USAGE}), "altered", "finish reason stop"),
        (answer(whole=False, left=True), "same", ""),
        (answer(chunk("one tw"), whole=False, left=True), "same", ""),
        (answer(chunk("one ten"), whole=False, left=True), "altered", "'en' instead of 'wo"),
        (answer(chunk("one"), chunk("x", index=1), {"choices": [], "usage": USAGE}), "altered", "choices [0, 1]"),
    ],
)
def test_answers_are_the_same_or_lost_or_altered_or_repeated(found: Answer, kind: str, what: str) -> None:
    verdict = compare(found, REFERENCE, 0.0)
    assert (verdict.kind, what in verdict.what) == (kind, True), verdict


def test_where_a_text_is_cut_and_what_was_cached_does_not_matter() -> None:
    other = streamed("one two three", " four")
    assert other.usage == REFERENCE.usage == USAGE
    assert compare(other, REFERENCE, 0.0).kind == "same"


def chat_chunk(token: str, logprob: float, second: float) -> dict[str, Any]:
    best = [{"token": token, "logprob": logprob, "bytes": []}, {"token": "b", "logprob": second, "bytes": []}]
    content = [{"token": token, "logprob": logprob, "bytes": [], "top_logprobs": best}]
    return {"choices": [{"index": 0, "delta": {"content": token}, "logprobs": {"content": content}}]}


def completion_chunk(token: str, logprob: float | None, second: float) -> dict[str, Any]:
    top = None if logprob is None else {token: logprob, "b": second}
    columns = {"tokens": [token], "token_logprobs": [logprob], "top_logprobs": [top], "text_offset": [0]}
    return chunk(token, "length", logprobs=columns)


@pytest.mark.parametrize("make", [chat_chunk, completion_chunk])
def test_scores_may_differ_by_the_tolerance_and_their_tokens_not_at_all(make: Callable[..., dict[str, Any]]) -> None:
    reference = answer(make("a", -0.5, -1.0), chunk("", "length"))

    def against(other: dict[str, Any]) -> tuple[str, float]:
        verdict = compare(answer(other, chunk("", "length")), reference, 1e-3)
        return verdict.kind, round(verdict.drift, 6)

    assert against(make("a", -0.5, -1.0)) == ("same", 0.0)
    assert against(make("a", -0.5, -1.0005)) == ("same", 0.0005)
    assert against(make("a", -0.5, -1.1)) == ("altered", 0.1)
    renamed = copy.deepcopy(make("a", -0.5, -1.0))
    assert against(json.loads(json.dumps(renamed).replace('"b"', '"c"'))) == ("altered", 0.0)


def test_the_scores_of_a_prompt_are_compared() -> None:
    def with_prompt(number: float) -> Answer:
        scores = [None, {"7": {"logprob": number, "rank": 1, "decoded_token": "x"}}]
        return answer(chunk("one", "length", prompt_logprobs=scores))

    assert compare(with_prompt(-2.0), with_prompt(-2.0), 0.0).kind == "same"
    assert compare(with_prompt(-2.0), with_prompt(-2.5), 0.1).kind == "altered"
    assert compare(answer(chunk("one", "length")), with_prompt(-2.0), 0.1).kind == "altered"
    assert compare(answer(chunk("one"), whole=False, left=True), with_prompt(-2.0), 0.1).kind == "same"


# ------------------------------------------------------------------------------------------------------- clients


@asynccontextmanager
async def server(handle: Callable[[web.Request], Any]) -> AsyncIterator[Callable[..., Any]]:
    """ask(stream=..., **fields of Ask): one request to a server that answers with `handle`."""
    app = web.Application()
    app.router.add_post("/v1/completions", handle)
    async with TestServer(app) as running, open_session() as session:
        client = Client(session, str(running.make_url("")).rstrip("/"), "m")

        async def ask(stream: bool = True, **fields: Any) -> Answer:
            return await client.ask(Ask(0, False, {"stream": stream, "prompt": "p"}, **fields), "salt")

        yield ask


async def events(request: web.Request, *lines: bytes, end: bool = True) -> web.StreamResponse:
    response = web.StreamResponse()
    await response.prepare(request)
    for line in lines:
        await response.write(b"data: " + line + b"\n\n")
    if end:
        await response.write_eof()
    return response


ONE = json.dumps(chunk("one")).encode()
LAST = json.dumps(chunk(" two", "length")).encode()


async def test_a_refused_client_comes_back_as_it_is_told() -> None:
    asked: list[dict[str, Any]] = []

    async def handle(request: web.Request) -> web.StreamResponse:
        asked.append(await request.json())
        if len(asked) < 3:
            return web.json_response({"error": {"code": None}}, status=503, headers={"Retry-After": "0"})
        return await events(request, ONE, LAST, b"[DONE]")

    async with server(handle) as ask:
        got = await ask()
    assert (got.refused, got.whole, got.said[0].text, len(got.times)) == (2, True, "one two", 2)
    assert asked[0] == {"stream": True, "prompt": "p", "model": "m", "cache_salt": "salt"}


async def test_a_stream_that_failed_is_lost_although_it_might_be_asked_for_again() -> None:
    async def handle(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"code": "stream_failed"}}, status=503, headers={"Retry-After": "0"})

    async with server(handle) as ask:
        got = await ask(stream=False)
    assert got.error.startswith("503") and not got.whole and got.refused == 0


async def test_an_error_in_a_stream_and_a_stream_without_an_end() -> None:
    async def failing(request: web.Request) -> web.StreamResponse:
        return await events(request, ONE, b'{"error": {"message": "too bad"}}')

    async def ending(request: web.Request) -> web.StreamResponse:
        return await events(request, ONE, LAST)

    async def breaking(request: web.Request) -> web.StreamResponse:
        response = await events(request, ONE, end=False)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with server(failing) as ask:
        assert (await ask()).error == "in the stream: too bad"
    async with server(ending) as ask:
        got = await ask()
        assert not got.whole and not got.error and compare(got, REFERENCE, 0.0).kind == "lost"
    async with server(breaking) as ask:
        assert (await ask()).error


async def test_clients_leave_after_events_or_after_a_time() -> None:
    gone = asyncio.Event()

    async def handle(request: web.Request) -> web.StreamResponse:
        try:
            response = await events(request, ONE, ONE, end=False)
            while True:
                await response.write(b": still here\n\n")
                await asyncio.sleep(0)
        finally:
            gone.set()

    async with server(handle) as ask:
        got = await ask(leave_events=2)
        assert (got.left, got.whole, got.error, got.said[0].text) == (True, False, "", "oneone")
        await gone.wait()
        assert (await ask(leave_s=0.05)).left


async def test_so_many_ask_at_once_and_all_is_asked() -> None:
    busy, most = 0, 0
    done: list[Answer] = []

    class Asked:
        async def ask(self, ask: Ask, salt: str) -> Answer:
            nonlocal busy, most
            busy, most = busy + 1, max(most, busy + 1)
            await asyncio.sleep(0)
            busy -= 1
            return Answer(ask, salt, 0.0)

    load = [("s", Ask(n, False, {})) for n in range(20)]
    await ask_all(Asked(), iter(load), 3, done.append)  # type: ignore[arg-type]
    assert most == 3 and sorted(it.ask.number for it in done) == list(range(20))


# ------------------------------------------------------------------------------------------------------ journals

COORDINATOR = Address("coordinator", 1, "ipc://c")


def submit(number: int, worker: Address) -> FromWorkerInbox:
    sampling = Sampling(max_tokens=4, seed=FIRST_SEED + number)
    request = Generate(RequestId(9, 0), 0, b"", b"", b"", b"", sampling, Targets(1.0, 1.0), 0.0)
    return FromWorkerInbox(COORDINATOR, Submit(request, Route(worker, worker), 1))


@asynccontextmanager
async def following(folder: Path) -> AsyncIterator[Journals]:
    journals = Journals(folder)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(journals.follow())
        yield journals
        task.cancel()
    journals.close()


async def test_a_journal_tells_its_events_as_it_grows_and_who_serves_what(tmp_path: Path) -> None:
    first, second = Address("decode-0", 5, "ipc://d"), Address("decode-0", 6, "ipc://e")
    journal = Journal(tmp_path, first, Config())
    async with following(tmp_path) as journals:
        waiting = asyncio.create_task(journals.next("Submit", 30.0))
        await asyncio.sleep(0)
        journal.append(2.5, Tick(), [])
        journal.append(3.5, submit(7, first), [])
        seen = await waiting
        assert seen is not None
        assert (seen.name, seen.actor, seen.sender) == ("Submit", "decode-0", "coordinator")
        assert journals.visits[7] == [Visit(3.5, RequestId(9, 0), 5, True)]
        assert journals.living == {"decode-0": 5}
        assert journals.first_part(5).exists()

        waiting = asyncio.create_task(journals.next("Submit", 30.0))
        await asyncio.sleep(0)
        journal.close()
        journal = Journal(tmp_path, second, Config())
        journal.append(4.5, submit(8, second), [])
        assert await waiting is not None
        assert journals.living == {"decode-0": 6}
        assert [visit.incarnation for visit in journals.visits[8]] == [6]
        assert await journals.next("Prefill", 0.0) is None
    journal.close()


async def test_a_journal_tells_how_processes_have_ended(tmp_path: Path) -> None:
    journal = Journal(tmp_path, COORDINATOR, Config())
    async with following(tmp_path) as journals:
        waiting = asyncio.create_task(journals.next("PeerDown", 30.0))
        await asyncio.sleep(0)
        supervisor = Address("supervisor", 3, "ipc://s")
        journal.append(1.0, FromCoordinatorInbox(supervisor, PeerDown("decode-0", 5, "SIGSEGV")), [])
        await waiting
        assert journals.causes == {5: "SIGSEGV"}
    journal.close()


async def test_half_a_record_waits_for_its_other_half_and_parts_follow_each_other(tmp_path: Path) -> None:
    worker = Address("decode-0", 5, "ipc://d")
    whole = tmp_path / "elsewhere"
    journal = Journal(whole, worker, Config())
    journal.append(1.0, submit(1, worker), [])
    journal.close()
    (file,) = whole.iterdir()
    data = file.read_bytes()
    growing = tmp_path / file.name
    growing.write_bytes(data[:-10])
    async with following(tmp_path) as journals:
        assert await journals.next("Submit", 0.2) is None
        waiting = asyncio.create_task(journals.next("Submit", 30.0))
        await asyncio.sleep(0)
        with growing.open("ab") as more:
            more.write(data[-10:])
        assert await waiting is not None
        successor = worker._replace(incarnation=6)
        journal = Journal(tmp_path, successor, Config(), part_bytes=0)  # each event is in a part of its own
        waiting = asyncio.create_task(journals.next("Submit", 30.0))
        await asyncio.sleep(0)
        journal.append(1.0, Tick(), [])
        journal.append(2.0, submit(2, successor), [])
        assert await waiting is not None
        journal.close()


# ---------------------------------------------------------------------------------------------- processes, faults


@pytest.fixture
def start() -> Iterator[Callable[[str, int], subprocess.Popen[bytes]]]:
    """start(name, incarnation): a process that looks like one of a service, as far as its command line goes."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(name: str, incarnation: int) -> subprocess.Popen[bytes]:
        words = ["import time; print(flush=True); time.sleep(600)", "--start", f"/run/{name}.{incarnation}.json"]
        process = subprocess.Popen([sys.executable, "-c", *words], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


SERVICE = ("coordinator", "api", "prefill-0", "decode-0", "decode-1")
Begin = Callable[[str, int], subprocess.Popen[bytes]]


def service(start: Begin, names: Sequence[str] = SERVICE) -> tuple[Processes, Journals, dict[str, Any]]:
    """Processes that all have a core, but for the api; the third are the processes as they were started."""
    started = {name: start(name, 1 + n) for n, name in enumerate(names)}
    journals = Journals(Path("none"), living={name: 1 + n for n, name in enumerate(names) if name != "api"})
    return Processes(psutil.Process()), journals, started


def fault(kind: Any = "kill", who: Any = "decode", **fields: Any) -> Fault:
    return Fault(
        **{"kind": kind, "who": who, "event": "", "delay_s": 0.0, "calm_s": 0.0, "pause_s": 0.0, "soon": False} | fields
    )


def test_faults_are_drawn_from_the_seed_and_are_of_all_kinds() -> None:
    first, again = ([draw_fault(random.Random(3), 3.0) for _ in range(5)] for _ in range(2))
    assert first == again
    rng = random.Random(0)
    drawn = [draw_fault(rng, 3.0) for _ in range(3000)]
    assert {it.kind for it in drawn} == {"kill", "term", "stop", "freeze"}
    assert {it.who for it in drawn} == {"receiver", "sender", "prefill", "decode", "coordinator", "workers"}
    assert {"Prefill", "KvReady", "Submit", "Hello", ""} <= {it.event for it in drawn}
    assert all(it.event for it in drawn if it.who in ("receiver", "sender"))
    pauses_s = [it.pause_s for it in drawn]
    assert min(pauses_s) < 1.5 and max(pauses_s) > 3.0
    assert 0.1 < sum(it.soon for it in drawn) / len(drawn) < 0.3


def test_processes_are_known_by_their_start_file_and_crashes_by_their_successor(start: Begin) -> None:
    processes, _, started = service(start)
    running = processes.look()
    assert {name: it.incarnation for name, it in running.items()} == {name: 1 + n for n, name in enumerate(SERVICE)}
    assert [running[name].role for name in ("coordinator", "prefill-0")] == ["coordinator", "prefill"]
    assert {name for name, it in running.items() if it.computes} == {"prefill-0", "decode-0", "decode-1"}
    for name, struck in (("decode-0", True), ("decode-1", False)):
        if struck:
            processes.struck[running[name].incarnation] = False
        started[name].kill()
        started[name].wait()
        assert name not in processes.look()
        start(name, 70)
        assert processes.look()[name].incarnation == 70
    assert [it.system.pid for it in processes.unstruck] == [started["decode-1"].pid]
    assert processes.names == set(SERVICE)
    assert len(processes.outlived(0.0)) == len(SERVICE)


async def test_a_fault_strikes_who_it_is_for_and_is_remembered(start: Begin) -> None:
    processes, journals, started = service(start)
    async with asyncio.TaskGroup() as tasks:
        striker = Striker(processes, journals, random.Random(0), tasks)
        assert {it.name for it in striker.up()} == set(SERVICE) - {"api"}
        await striker.strike(fault("kill", "prefill"))
        assert started["prefill-0"].wait() == -signal.SIGKILL
        await striker.strike(fault("term", "decode", soon=True))
        (first, second) = striker.strikes
        assert (first.kind, first.name, first.alone, second.kind, second.alone) == (
            "kill",
            "prefill-0",
            False,
            "term",
            False,
        )
        assert started[second.name].wait() == -signal.SIGTERM
        last = ({"decode-0", "decode-1"} - {second.name}).pop()
        await striker.strike(fault("kill", "workers", soon=True))
        assert (striker.strikes[2].name, striker.strikes[2].alone) == (last, True)
        assert processes.struck == {it.incarnation: False for it in striker.strikes}
        assert [it.name for it in striker.up()] == ["coordinator"]
    assert started["api"].poll() is None


async def test_a_coordinator_is_only_frozen_and_thaws(start: Begin) -> None:
    processes, journals, started = service(start)
    async with asyncio.TaskGroup() as tasks:
        striker = Striker(processes, journals, random.Random(0), tasks)
        await striker.strike(fault("stop", "coordinator", pause_s=0.05))
        assert striker.strikes[0].kind == "freeze"
        await striker.strike(fault("stop", "prefill", soon=True))
        stopped = psutil.Process(started["prefill-0"].pid)
        while stopped.status() != psutil.STATUS_STOPPED:  # noqa: ASYNC110  # another process changes it
            await asyncio.sleep(0)
        assert "prefill-0" not in {it.name for it in striker.up()}
    # The group has waited for the thaw.
    assert psutil.Process(started["coordinator"].pid).status() != psutil.STATUS_STOPPED
    assert stopped.status() == psutil.STATUS_STOPPED


async def test_a_fault_waits_until_each_role_is_there_again(start: Begin) -> None:
    processes, journals, started = service(start, ("coordinator", "prefill-0", "decode-0"))
    async with asyncio.TaskGroup() as tasks:
        striker = Striker(processes, journals, random.Random(0), tasks)
        await striker.strike(fault("kill", "prefill"))
        started["prefill-0"].wait()
        next_one = tasks.create_task(striker.strike(fault("kill", "decode")))
        done, _ = await asyncio.wait([next_one], timeout=0.3)
        assert not done
        start("prefill-0", 90)
        done, _ = await asyncio.wait([next_one], timeout=0.3)
        assert not done, "it has no core yet"
        journals.living["prefill-0"] = 90
        await next_one
    assert [it.name for it in striker.strikes] == ["prefill-0", "decode-0"]


async def test_workers_of_a_role_are_killed_in_turn_while_another_is_there(start: Begin) -> None:
    processes, journals, started = service(start)
    async with asyncio.TaskGroup() as tasks:
        striker = Striker(processes, journals, random.Random(0), tasks)
        await striker.kill_workers("prefill", 1, math.inf)  # the service has one only
        killing = tasks.create_task(striker.kill_workers("decode", 2, math.inf))
        done, _ = await asyncio.wait([killing], timeout=1.0)
        assert not done and [it.role for it in striker.strikes] == ["prefill", "decode"]
        (last,) = {"decode-0", "decode-1"} - {striker.strikes[1].name}
        assert started[last].poll() is None
        successor = striker.strikes[1].name
        start(successor, 90)
        journals.living[successor] = 90
        await killing
        await striker.kill_workers("decode", 9, time.monotonic())  # too late
    assert [(it.kind, it.role) for it in striker.strikes[1:]] == [("kill", "decode")] * 2
    assert not any(it.alone for it in striker.strikes[1:])


async def test_a_moment_is_an_event_of_the_journal_and_its_receiver_or_sender_is_struck(
    start: Begin, tmp_path: Path
) -> None:
    processes, _, started = service(start)
    worker = Address("decode-1", 5, "ipc://d")
    journal = Journal(tmp_path, worker, Config())
    async with following(tmp_path) as journals, asyncio.TaskGroup() as tasks:
        journals.living.update({name: 1 + n for n, name in enumerate(SERVICE)})
        striker = Striker(processes, journals, random.Random(0), tasks)
        for who in ("receiver", "sender"):
            strike = tasks.create_task(striker.strike(fault("kill", who, event="Submit", soon=True)))
            await asyncio.sleep(0)
            journal.append(time.monotonic(), submit(1, worker), [])
            await strike
        assert [(it.name, it.event) for it in striker.strikes] == [("decode-1", "Submit"), ("coordinator", "Submit")]
    journal.close()
    assert started["decode-1"].wait() == started["coordinator"].wait() == -signal.SIGKILL


# ------------------------------------------------------------------------------------------------------- figures


def strike(at: float, name: str = "decode-0", incarnation: int = 5, kind: Any = "kill", alone: bool = False) -> Strike:
    return Strike(at, kind, name, incarnation, 1, "Submit", alone)


def stream(*times: float, began: float = 0.0) -> Answer:
    said_at = {0: list(times)}
    return Answer(Ask(3, False, {"stream": True}), "s", began, times[-1] + 0.1, times=list(times), said_at=said_at)


def visit(at: float, incarnation: int, decodes: bool = True, n: int = 0) -> Visit:
    return Visit(at, RequestId(1, n), incarnation, decodes)


def test_a_pause_is_the_longest_silence_that_begins_with_the_fault() -> None:
    it = stream(1.0, 1.1, 1.2, 3.2, 3.3, 9.0)
    visits = {3: [visit(0.5, 5), visit(3.0, 6)]}
    (found,) = pauses([it], [strike(1.15)], visits)
    assert (found.cause, found.seconds) == ("another worker was up", pytest.approx(2.0)), "the rest came at 1.2"
    assert by_cause([found])["another worker was up"] == [pytest.approx(2.0)]
    assert not pauses([it], [strike(1.15, incarnation=7)], visits), "another worker's fault"
    assert not pauses([it], [strike(5.0)], visits), "it is served by 6 by now"
    assert not pauses([it], [strike(10.0)], visits), "it has ended"
    (found,) = pauses([it], [strike(5.0, "coordinator", 1)], visits)
    assert (found.cause, found.seconds) == ("coordinator", pytest.approx(5.7))


def test_a_choice_that_waits_for_its_prompt_is_not_silent_yet() -> None:
    it = stream(1.0, 1.1, 1.2, 6.0, 6.1)
    it.said_at = {0: [1.0, 1.1, 1.2], 1: [6.0, 6.1]}
    visits = {3: [visit(0.5, 5)]}
    assert not pauses([it], [strike(1.25)], visits)
    (found,) = pauses([it], [strike(1.05)], visits)
    assert found.seconds == pytest.approx(0.1)


def test_a_silence_with_several_faults_counts_once() -> None:
    it = stream(1.0, 1.1, 8.0)
    visits = {3: [visit(0.5, 5), visit(2.0, 6)]}
    strikes = [strike(1.2), strike(2.5, incarnation=6, alone=True), strike(3.0, "coordinator", 1)]
    (found,) = pauses([it], strikes, visits)
    assert (found.cause, list(found.strikes)) == ("several faults", strikes)


def test_a_prefill_worker_serves_until_the_first_event() -> None:
    visits = {3: [visit(0.5, 5), visit(0.6, 8, decodes=False)]}
    it = stream(2.0, 2.1, 4.0)
    assert not pauses([it], [strike(2.05, "prefill-0", 8)], visits)
    again = {3: [*visits[3], visit(2.2, 8, decodes=False)]}  # it has been preempted, and is prefilled anew
    (found,) = pauses([it], [strike(2.5, "prefill-0", 8)], again)
    assert (found.cause, found.seconds) == ("another worker was up", pytest.approx(1.9))


def test_the_longest_pauses_come_with_what_one_needs_to_look_into_them() -> None:
    journals = Journals(Path("j"), names={5: "decode-0", 6: "decode-1"})
    journals.visits[3] += [visit(0.5, 5), visit(1.3, 6)]
    answers = [stream(1.0, 1.1, end) for end in (4.0, 9.0)]
    first, second = longest(pauses(answers, [strike(1.15)], journals.visits), journals, 0.5)
    assert first.kind == second.kind == "another worker was up"
    assert first.what == "7.90 s of silence from 0.600 s on"
    assert first.faults == ["0.650 s: kill decode-0 after Submit"]
    assert first.journals == ["decode-0.5.0000.journal", "decode-1.6.0000.journal"]


def test_causes() -> None:
    assert cause_of(strike(0.0, kind="term")) == "told to end"
    assert cause_of(strike(0.0, kind="term", alone=True)) == "restart needed"
    assert cause_of(strike(0.0, kind="freeze", alone=True)) == "stopped or frozen"
    assert cause_of(strike(0.0, "coordinator", kind="term")) == "coordinator"


def test_first_events_apart_for_those_that_a_fault_fell_into() -> None:
    calm, struck = first_events([stream(1.0, 2.0), stream(4.0, began=2.5)], [strike(3.0)]).values()
    assert (calm, struck) == ([1.0], [1.5])


def test_spreads() -> None:
    assert spread([]) == Spread(0, 0.0, 0.0, 0.0)
    assert spread([n / 100 for n in range(101)]) == Spread(101, 0.5, 0.99, 1.0)


def test_tables_fit_a_terminal_and_complaints_say_how_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    report = Report(requests=7, faults={"kill decode": 3}, pauses_s={"undisturbed": Spread(1, 0.25, 0.5, 0.75)})
    report.requests_per_s = {"before": 1.25, "during": 0.5, "after": 1.5}
    assert report.clean and faults.complaints(report, None) == []
    journals = Journals(Path("j"), names={5: "decode-0"})
    journals.visits[3].append(visit(0.5, 5))
    lost = compare(answer(error="gone"), REFERENCE, 0.0)
    report.findings.append(finding("during", lost, stream(1.0, 2.0), [strike(1.5)], journals, 0.0))
    report.verdicts["lost"] += 1
    assert not report.clean
    for table in tables(report):
        Console(width=80).print(table)
    text = capsys.readouterr().out
    for word in ("kill decode", "1.25", "0.75", "undisturbed", "lost", "repeated", "preemptions"):
        assert word in text
    assert "…" not in text and max(map(len, text.splitlines())) <= 80
    lines = "\n".join(faults.complaints(report, Path("kept")))
    assert "lost: request 3 (during, 0.0 to 2.1 s)" in lines
    assert "1.500 s: kill decode-0 after Submit" in lines
    assert f"cbdisagg check {Path('kept/journals/decode-0.5.0000.journal')}" in lines
    assert "--keep FOLDER" in "\n".join(faults.complaints(report, None))


@pytest.mark.parametrize("wrong", ["leaked", "crashed"])
def test_what_is_left_behind_or_falls_over_is_a_failure_too(wrong: str) -> None:
    report = Report()
    getattr(report, wrong).append("x")
    assert not report.clean and faults.complaints(report, None)[0] == f"{wrong}: x"


# ------------------------------------------------------------------------------------------------ the command line


def command_line(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["cbdisagg", "bench", "faults", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--kills", "0"], "from 1 up"),
        (["--dtype", "int4"], "bfloat16"),
        (["--keep", "/"], "/ is not empty"),
        (["--set", "kv.page=1"], "did you mean page"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_starts(
    arguments: list[str], right: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("work has begun")

    monkeypatch.setattr(faults, "measure", too_late)
    assert command_line(arguments, monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert right in line


def test_the_status_is_that_of_the_report_and_journals_are_kept_on_demand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    report = Report()

    async def measured(plan: Any, options: list[str], folder: Path, progress: object) -> Report:
        assert (plan.kills, plan.suspect_s) == (4, 7.0)
        assert options[options.index("--model") + 1] == "smollm2"
        assert "model.dtype=bfloat16" in options
        (folder / "journals").mkdir()
        return report

    monkeypatch.setattr(faults, "measure", measured)
    words = ["--kills", "4", "--json", "--keep", str(tmp_path / "kept"), "--dtype", "bfloat16"]
    words += ["--set", "policy.suspect_s=7"]
    assert command_line(words, monkeypatch) == 0
    assert json.loads(capsys.readouterr().out)["verdicts"] == {"lost": 0, "altered": 0, "repeated": 0}
    assert (tmp_path / "kept" / "journals").is_dir()
    report.leaked.append("a page")
    words[words.index("--keep") + 1] = str(tmp_path / "again")
    assert command_line(words, monkeypatch) == 1
    assert (tmp_path / "again" / "journals").is_dir()
    assert "leaked: a page" in capsys.readouterr().err
