"""The load generator: what requests are made of, what is counted, and how it gets on with servers of several kinds."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cbdisagg_bench import load_client
from cbdisagg_bench.load_asks import Ask, fill
from cbdisagg_bench.load_client import Answer
from cbdisagg_bench.load_events import Events, read_chunk
from cbdisagg_bench.load_report import Aims, summarise, summarise_all
from cbdisagg_bench.machine import machine_name

from cbdisagg import cli
from cbdisagg.sim import workload
from cbdisagg.sim.arrivals import Lengths, make_workload

# ----------------------------------------------------------------------------------------------------- the requests


def test_the_seed_alone_makes_the_prompts() -> None:
    lengths = make_workload(20, 3.0, Lengths(8), Lengths(16, "exponential", 40), 5)
    first, again, other = fill(lengths, 100, 5), fill(lengths, 100, 5), fill(lengths, 100, 6)
    assert first == again != other
    assert all(len(ask.prompt) == 8 and max(ask.prompt) < 100 for ask in first)
    assert len({tuple(ask.prompt) for ask in first}) == 20
    assert [(ask.arrival_s, ask.output_tokens) for ask in first] == [(a.arrival_s, a.output_tokens) for a in lengths]


def test_equal_blocks_are_equal_and_the_rest_is_not() -> None:
    asks = [workload.Ask(0.0, 4, 1100, prefix_blocks=blocks) for blocks in ((7, 8), (7, 8), (7, 9))]
    one, two, three = (ask.prompt for ask in fill(asks, 1000, 0))
    assert [len(prompt) for prompt in (one, two, three)] == [1100] * 3
    assert one[:1024] == two[:1024] and one[1024:] != two[1024:]
    assert one[:512] == three[:512] and one[512:1024] != three[512:1024]


def test_a_file_says_itself_what_it_asks_and_text_is_words() -> None:
    asks = [
        workload.Ask(1.0, 2, prompt="hello", ttft_ms=50),
        workload.Ask(2.0, 3, prompt_ids=(5, 6)),
        workload.Ask(3.0, 4, 6),
    ]
    text, ids, counted = fill(asks, 100, 0, as_text=True)
    assert (text.prompt, text.ttft_ms, text.prompt_ids) == ("hello", 50, 0)
    assert (ids.prompt, ids.prompt_ids) == ([5, 6], 2)
    assert isinstance(counted.prompt, str) and len(counted.prompt.split(" ")) == 6


# -------------------------------------------------------------------------------------------------------- figures


def answer(first: float, *gaps: float, arrived: float = 2.0, **more: object) -> Answer:
    times = [first]
    for gap in gaps:
        times.append(times[-1] + gap)
    return Answer(Ask(arrived, [1, 2], len(times)), arrived, arrived, times, **more)  # type: ignore[arg-type]


def test_percentiles_of_answers_made_by_hand() -> None:
    """TTFT 0 .. 1 s; three tokens, the gaps 0.1 and 0.3 s; latencies count from the arrival at 2 s."""
    answers = [answer(2.0 + n / 100, 0.1, 0.3) for n in reversed(range(101))]
    answers.append(answer(99.0, error="1 tokens instead of 3"))
    report = summarise(answers, seconds=10.0)
    assert (report.requests, report.failed, report.generated_tokens) == (102, 1, 303)
    assert (report.generated_per_s, report.total_per_s, report.requests_per_s) == (30.3, 50.5, 10.1)
    assert report.ttft_ms == [500.0, 900.0, 990.0]
    assert report.e2e_ms == [900.0, 1300.0, 1390.0]
    assert report.tpot_ms == [200.0, 200.0, 200.0]
    assert report.itl_ms == [200.0, 300.0, 300.0]
    assert report.in_flight == [pytest.approx(101 * 0.9 / 10, abs=0.01), 101.0]
    assert report.good is None and report.good_per_s is None


def test_runs_do_not_overlap() -> None:
    """Their times all begin at 0, but one run was after the other."""
    report = summarise_all([[answer(2.0, 1.0)], [answer(2.0, 1.0)]], [4.0, 4.0])
    assert report.in_flight == [0.25, 1.0] and (report.seconds, report.generated_per_s) == (8.0, 0.5)


def test_what_waits_in_the_client_is_queueing_and_part_of_the_latency() -> None:
    late = answer(2.5, 0.1)
    late.sent = 2.4
    report = summarise([late], seconds=1.0)
    assert report.queue_ms == [400.0] * 3 and report.ttft_ms == [500.0] * 3
    assert report.in_flight == [0.2, 1.0]


def test_goodput_counts_failures_and_refusals_as_missed() -> None:
    answers = [
        answer(2.05, 0.01, 0.01),
        answer(2.2, 0.01, 0.01),  # a late first token
        answer(2.05, 0.05, 0.05),  # slow ones
        answer(2.05),  # one token: there is no later one to be late
        answer(2.05, 0.01, error="429 full", refused=True),
    ]
    report = summarise(answers, 2.0, Aims(100, 20))
    assert (report.good, report.good_per_s, report.refused, report.failed) == (0.4, 1.0, 1, 1)
    assert summarise(answers, 2.0, Aims(100, 0)).good == 0.6
    answers[1].ask = Ask(2.0, [1], 3, ttft_ms=300)  # its own target
    assert summarise(answers, 2.0, Aims(100, 20)).good == 0.6
    assert summarise(answers, 2.0).good == 0.8  # the others have nothing to miss, but for the one that failed


def test_several_tokens_in_an_event_count_as_the_server_says() -> None:
    report = summarise([answer(2.1, 0.4, counted=5)], 1.0)
    assert report.generated_tokens == 5 and report.tpot_ms == [100.0] * 3 and report.itl_ms == [400.0] * 3


def test_no_good_answer_has_no_percentiles() -> None:
    report = summarise([Answer(Ask(0.0, [1], 1), error="500")], seconds=1.0)
    assert (report.failed, report.ttft_ms, report.tpot_ms, report.itl_ms) == (1, [], [], [])
    assert report.in_flight == [0.0, 0.0]


# --------------------------------------------------------------------------------------------------------- events


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_events_are_found_however_the_body_is_cut(size: int) -> None:
    body = b'data: {"a"}\n\n: a comment\n\ndata:x\ndata: y\n\nevent: ping\r\ndata: z\r\n\r\ndata: [DONE]\n\n'
    events = Events()
    found = [payload for n in range(0, len(body), size) for payload in events.feed(body[n : n + size])]
    assert found == [b'{"a"}', b"x\ny", b"z", b"[DONE]"]


def test_a_chunk_is_read_whatever_else_is_in_it() -> None:
    chunk = read_chunk(b'{"id":1,"choices":[{"text":"a","index":0,"logprobs":{}}],"usage":null,"timings":{"x":1}}')
    assert chunk.choices[0].text == "a" and chunk.usage is None and chunk.error is None
    with pytest.raises(ValueError, match="cannot be read"):
        read_chunk(b"nonsense")


# -------------------------------------------------------------------------------------------------------- servers


class FakeServer:
    """Streams as many tokens as asked for, `at_once` to an event, and ends as llama.cpp does, with an empty text.

    By their numbers (from 0), it refuses requests in `refused`, breaks off those in `broken`, and says nothing more in
    those in `silent` until `go_on` is set. `honest`: it tells its usage.
    """

    def __init__(
        self,
        refused: Sequence[int] = (),
        broken: Sequence[int] = (),
        silent: Sequence[int] = (),
        *,
        at_once: int = 1,
        honest: bool = False,
        max_len: int = 0,
        status: int = 200,
    ) -> None:
        self.refused, self.broken, self.silent, self.at_once, self.honest = refused, broken, silent, at_once, honest
        self.go_on = asyncio.Event()
        self.max_len, self.status = max_len, status
        self.bodies: list[dict[str, object]] = []
        self.wishes: list[tuple[str | None, str | None]] = []
        self.running = self.most = 0

    async def models(self, _: web.Request) -> web.Response:
        entry = {"id": "tiny", "max_model_len": self.max_len} if self.max_len else {"id": "tiny"}
        return web.json_response({"data": [entry]}, status=self.status)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        number = len(self.bodies)
        self.bodies.append(body)
        self.wishes.append((request.headers.get("x-slo-ttft-ms"), request.headers.get("x-slo-tpot-ms")))
        if number in self.refused:
            return web.Response(status=503, text="full")
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            return await self._stream(request, body["max_tokens"], number)
        finally:
            self.running -= 1

    async def _stream(self, request: web.Request, tokens: int, number: int) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(0, tokens, self.at_once):
            await asyncio.sleep(0)
            await response.write(b'data: {"choices": [{"text": "a", "finish_reason": null}]}\n\n')
            if number in self.broken:
                return response
            if number in self.silent:
                await self.go_on.wait()
        if self.honest:
            await response.write(b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\n')
            usage = {"prompt_tokens": 3, "completion_tokens": tokens}
            await response.write(b"data: " + json.dumps({"choices": [], "usage": usage}).encode() + b"\n\n")
        await response.write(b"data: [DONE]\n\n")
        return response


class Running:
    """A fake that listens, and the command line of a load on it."""

    def __init__(self, fake: FakeServer, server: TestServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.fake, self.url, self._capsys = fake, str(server.make_url("/")), capsys

    async def load(self, *arguments: str) -> tuple[int, str, str]:
        """Status, stdout, stderr of `cbdisagg bench serve` with a load of 6 requests of 2 tokens."""
        small = ["--requests", "6"]
        if "--file" not in arguments:
            small += ["--prompt-tokens", "3", "--output-tokens", "2"]
        status = await asyncio.to_thread(command_line, ["serve", *arguments, *small])
        shown = self._capsys.readouterr()
        return status, shown.out, shown.err

    async def figures(self, *arguments: str) -> dict:
        _, out, _ = await self.load(self.url, "--json", *arguments)
        return json.loads(out)


def command_line(arguments: Sequence[str]) -> int:
    """The exit status of `cbdisagg bench` with these arguments."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["cbdisagg", "bench", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return int(ended.value.code or 0)


@pytest.fixture
async def start(capsys: pytest.CaptureFixture[str]) -> AsyncIterator[object]:
    """`await start(fake)` makes it listen."""
    servers: list[TestServer] = []

    async def listen(fake: FakeServer) -> Running:
        app = web.Application()
        app.add_routes([web.get("/v1/models", fake.models), web.post("/v1/completions", fake.completions)])
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return Running(fake, servers[-1], capsys)

    yield listen
    for server in servers:
        await server.close()


@pytest.mark.parametrize("refused", [(), (1, 4)])
async def test_a_failed_request_is_counted_and_makes_the_status(refused: Sequence[int], start) -> None:
    running = await start(FakeServer(refused))
    status, out, err = await running.load(running.url + "v1/", "--concurrency", "2", "--json")
    report = json.loads(out)
    assert status == bool(refused)
    assert (report["requests"], report["failed"], report["refused"]) == (6, len(refused), len(refused))
    assert report["generated_tokens"] == 2 * (6 - len(refused))
    assert report["model"] == "tiny" and {body["model"] for body in running.fake.bodies} == {"tiny"}
    assert ("503 full" in err) == bool(refused)
    assert running.fake.most <= 2


async def test_an_answer_that_breaks_off_has_failed(start) -> None:
    running = await start(FakeServer(broken=(0,)))
    status, _, err = await running.load(running.url)
    assert status == 1 and "the stream broke off" in err


async def test_a_server_that_falls_silent_is_given_up(start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_client, "SILENCE_S", 0.05)
    running = await start(FakeServer(silent=(2,)))
    status, out, err = await running.load(running.url, "--json")
    running.fake.go_on.set()
    assert status == 1 and "nothing came for" in err and json.loads(out)["failed"] == 1


async def test_a_server_that_tells_its_usage_is_believed(start, tmp_path: Path) -> None:
    """An empty event at the end is no token; two tokens in one event are two."""
    for at_once in (1, 2):
        running = await start(FakeServer(at_once=at_once, honest=True))
        report = await running.figures("--out", str(tmp_path / "out.json"))
        assert (report["failed"], report["generated_tokens"], report["prompt_tokens"]) == (0, 12, 18)
        told = json.loads((tmp_path / "out.json").read_text())
        assert {(len(row["times"]), row["tokens"]) for row in told["answers"][0]} == {(2, 2)}


async def test_a_server_without_extensions_may_end_early(start) -> None:
    running = await start(FakeServer(at_once=2))  # one event, and no usage: one token as far as anybody can tell
    status, _, err = await running.load(running.url)
    assert status == 1 and "1 tokens instead of 2" in err
    report = await running.figures("--no-ignore-eos")
    assert (report["failed"], report["generated_tokens"]) == (0, 6)
    assert "ignore_eos" not in running.fake.bodies[-1]


async def test_several_servers_get_the_same_requests_in_turn(start) -> None:
    one, two = await start(FakeServer()), await start(FakeServer())
    arguments = [f"one={one.url}", f"two={two.url}", "--rounds", "2", "--warm-up", "1"]
    status, out, _ = await one.load(*arguments)
    assert status == 0 and "one generates" in out and "the tokens of two" in out
    assert sorted(body["prompt"] for body in one.fake.bodies) == sorted(body["prompt"] for body in two.fake.bodies)
    prompts = {tuple(body["prompt"]) for body in one.fake.bodies}
    assert len(one.fake.bodies) == len(prompts) == 13  # all differ, or a cache would answer the second round
    _, out, _ = await one.load(*arguments, "--json")
    reports = json.loads(out)["servers"]
    assert [(r["name"], r["requests"], len(r["generated_per_s_by_run"])) for r in reports] == [
        ("one", 12, 2),
        ("two", 12, 2),
    ]


async def test_a_file_of_requests_is_asked_at_its_own_times(start, tmp_path: Path) -> None:
    file = tmp_path / "asks.jsonl"
    rows = [(0.0, 2), (0.02, 3), (0.04, 1)]
    targets = {0.02: 2e6}  # the second one brings its own
    file.write_bytes(
        workload.write_workload(
            workload.Ask(at, tokens, prompt="hi", ttft_ms=targets.get(at, 0.0)) for at, tokens in rows
        )
    )
    running = await start(FakeServer())
    out, picture = tmp_path / "out.json", tmp_path / "load.png"
    arguments = [running.url, "--file", str(file), "--out", str(out), "--plot", str(picture), "--ttft-ms", "1e6"]
    status, shown, _ = await running.load(*arguments)
    assert status == 0 and "within targets: 100.0%" in shown
    assert {body["prompt"] for body in running.fake.bodies} == {"hi"}
    assert sorted(running.fake.wishes, key=str) == [("2e+06", None), (None, None), (None, None)]
    told = json.loads(out.read_text())
    assert [(row["arrived"], row["tokens"]) for row in told["answers"][0]] == rows  # the one at 0 too
    assert all(row["sent"] >= at for row, (at, _) in zip(told["answers"][0], rows, strict=True))
    assert picture.read_bytes().startswith(b"\x89PNG")


async def test_without_arrivals_latencies_count_from_when_a_request_is_sent(start, tmp_path: Path) -> None:
    running = await start(FakeServer())
    await running.load(running.url, "--concurrency", "1", "--out", str(tmp_path / "out.json"))
    rows = json.loads((tmp_path / "out.json").read_text())["answers"][0]
    assert all(row["arrived"] == row["sent"] for row in rows)
    assert rows[5]["arrived"] >= rows[4]["times"][-1] > 0


async def test_the_json_says_what_was_measured(start) -> None:
    running = await start(FakeServer())
    report = await running.figures("--rate", "1e4", "--burst", "2", "--text", "--tpot-ms", "20", "--warm-up", "3")
    wanted = {
        "prompt_lengths": "3",
        "output_lengths": "2",
        "file": None,
        "text": True,
        "ignore_eos": True,
        "targets_ms": {"ttft": 0, "tpot": 20},
        "rate": 1e4,
        "burst": 2,
        "warm_up": 3,
        "seed": 0,
        "rounds": 1,
    }
    assert {key: report[key] for key in wanted} == wanted
    assert report["machine"] == machine_name() and machine_name()[0] != ","


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        (["--model", "huge"], "serves tiny, not 'huge'"),
        (["--prompt-tokens", "200"], "takes 100 together"),
        (["--prompt-tokens", "some"], "write a number"),
        (["--output-tokens", "0"], "must be from 1 to"),
        (
            ["--output-tokens", "lognormal:3000:1024"],
            "'--output-tokens': 'lognormal:3000:1024': the mean, 3000",
        ),
        (["--file", "EMPTY"], "holds no request"),
        (["--plot", "load.gif"], ".png or .svg or .pdf"),
        (["--out", "nowhere/out.json"], "there is no folder nowhere"),
        (["--out", "."], "that is a folder"),
        (["--burst", "2"], "'--burst': has no effect without --rate"),
        (["--file", "COUNTED", "--prompt-tokens", "9"], "'--prompt-tokens': has no effect with --file"),
        (["--file", "COUNTED", "--output-tokens", "9"], "'--output-tokens': has no effect with --file"),
        (["--file", "WRITTEN", "--text"], "'--text': has no effect on a file with the prompts themselves"),
        (["--file", "WRITTEN", "--vocab", "9"], "'--vocab': has no effect on a file with"),
        (["--requests", "4", "--warm-up", "5"], "'--warm-up': 5 of 4 requests"),
    ],
)
async def test_a_wrong_order_is_refused_with_one_line(
    arguments: list[str], right: str, start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = await start(FakeServer(max_len=100))
    (tmp_path / "EMPTY").touch()
    for name, ask in (("COUNTED", workload.Ask(0.0, 2, 3)), ("WRITTEN", workload.Ask(0.0, 2, prompt="hi"))):
        (tmp_path / name).write_bytes(workload.write_workload([ask]))
    words = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    assert await asyncio.to_thread(command_line, ["serve", running.url, *words]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert right in line
    assert not running.fake.bodies


async def test_a_server_that_is_not_ready_is_named(start, capsys: pytest.CaptureFixture[str]) -> None:
    running = await start(FakeServer(status=503))
    wrong = "no address like"
    for url, right in ((running.url, "is not ready: 503"), ("127.0.0.1:8000", wrong), ("http://[::1", wrong)):
        assert await asyncio.to_thread(command_line, ["serve", url]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert right in line
