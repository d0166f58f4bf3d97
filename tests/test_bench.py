"""The benchmarks: what load is made of, what is counted, what a command line is refused for, what the tables show."""

from __future__ import annotations

import asyncio
import io
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from cbdisagg_bench import handover, load, step, transfer
from cbdisagg_bench.load import Answer, Ask, summarise, workload
from cbdisagg_bench.service import ServiceFailed
from rich.console import Console

from cbdisagg import cli


def command_line(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit status of `cbdisagg bench` with these arguments."""
    monkeypatch.setattr(sys, "argv", ["cbdisagg", "bench", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    return int(ended.value.code or 0)


# -------------------------------------------------------------------------------------------------------- workload


def test_the_seed_alone_makes_the_workload() -> None:
    first, again, other = (workload(20, 8, 16, True, 3.0, 100, seed) for seed in (5, 5, 6))
    assert first == again
    assert first != other
    assert all(len(ask.prompt) == 8 and max(ask.prompt) < 100 for ask in first)
    arrivals = [ask.arrival_s for ask in first]
    assert arrivals[0] == 0 and arrivals == sorted(set(arrivals))


def test_exponential_lengths_are_clipped_and_keep_their_mean() -> None:
    lengths = [ask.output_tokens for ask in workload(4000, 1, 10, True, 0.0, 2, 0)]
    assert (min(lengths), max(lengths)) == (1, 40)
    assert sum(lengths) / len(lengths) == pytest.approx(10, rel=0.1)


def test_fixed_lengths_and_no_rate() -> None:
    assert {(ask.arrival_s, ask.output_tokens) for ask in workload(5, 1, 10, False, 0.0, 2, 0)} == {(0.0, 10)}


# --------------------------------------------------------------------------------------------------------- figures


def test_percentiles_of_answers_made_by_hand() -> None:
    """TTFT 0 .. 1 s; three tokens, the gaps 0.1 and 0.3 s; latencies count from the arrival at 2 s."""
    ask = Ask(2.0, [1, 2], 3)
    answers = [
        Answer(ask, arrived=2.0, times=[2.0 + n / 100, 2.1 + n / 100, 2.4 + n / 100]) for n in reversed(range(101))
    ]
    answers.append(Answer(ask, arrived=2.0, times=[99.0], error="1 tokens instead of 3"))
    report = summarise(answers, seconds=10.0)
    assert (report.requests, report.failed, report.generated_tokens) == (102, 1, 303)
    assert (report.generated_per_s, report.total_per_s) == (30.3, 50.5)
    assert report.ttft_ms == [500.0, 900.0, 990.0]
    assert report.e2e_ms == [900.0, 1300.0, 1390.0]
    assert report.tpot_ms == [200.0, 200.0, 200.0]
    assert report.itl_ms == [200.0, 300.0, 300.0]


def test_no_good_answer_has_no_percentiles() -> None:
    report = summarise([Answer(Ask(0.0, [1], 1), error="500")], seconds=1.0)
    assert (report.failed, report.ttft_ms, report.tpot_ms, report.itl_ms) == (1, [], [], [])


# ---------------------------------------------------------------------------------------------------------- server


class FakeServer:
    """Streams as many tokens as asked for, but refuses the requests whose numbers (from 0) are in `refused`."""

    def __init__(self, refused: frozenset[int]) -> None:
        self.refused = refused
        self.bodies: list[dict[str, object]] = []

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "tiny"}]})

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        if len(self.bodies) - 1 in self.refused:
            return web.Response(status=503, text="full")
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(body["max_tokens"]):
            await response.write(b'data: {"choices": [{"text": "a"}]}\n\n')
        await response.write(b"data: [DONE]\n\n")
        return response

    async def listen(self) -> TestServer:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self.models), web.post("/v1/completions", self.completions)])
        server = TestServer(app)
        await server.start_server()
        return server


@pytest.mark.parametrize(("refused", "status"), [(frozenset(), 0), (frozenset({1, 4}), 1)])
async def test_a_failed_request_is_counted_and_makes_the_status(
    refused: frozenset[int], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = FakeServer(refused)
    server = await fake.listen()
    try:
        arguments = ["serve", f"{server.make_url('/v1')}", "--requests", "6", "--prompt-tokens", "3"]
        arguments += ["--output-tokens", "2", "--no-exponential", "--concurrency", "2", "--json"]
        assert await asyncio.to_thread(command_line, arguments, monkeypatch) == status
    finally:
        await server.close()
    shown = capsys.readouterr()
    report = json.loads(shown.out)
    assert (report["requests"], report["failed"]) == (6, len(refused))
    assert report["generated_tokens"] == 2 * (6 - len(refused))
    assert report["model"] == "tiny" and {body["model"] for body in fake.bodies} == {"tiny"}
    assert ("failed: 503 full" in shown.err) == bool(refused)


# -------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("arguments", "right"),
    [
        ("step --batches a,b", "from 1 up"),
        ("step --batches 0", "from 1 up"),
        ("step --contexts 128,,512", "from 1 up"),
        ("step --contexts -1", "from 1 up"),
        ("step --dtypes float64", "bfloat16, float32"),
        ("step --repeat 1", "from 2 up"),
        ("handover --repeat 0", "from 2 up"),
        ("handover --repeat 1", "from 2 up"),
        ("handover --dtype foo", "bfloat16, float32"),
        ("transfer --tokens 0", "from 1 up"),
        ("transfer --kind foo", "shm, zmq"),
        ("transfer --repeats 2", "from 3 up"),
        ("serve http://127.0.0.1:9 --requests 0", "from 1 up"),
        ("serve http://127.0.0.1:9 --concurrency 0", "from 1 up"),
        ("serve http://127.0.0.1:9 --rate -1", "from 0 up"),
    ],
)
def test_refusal_is_one_line_with_option_value_and_what_is_right(
    arguments: str, right: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*_: object) -> None:
        raise AssertionError("work has begun")

    for module, name in ((step, "machine"), (handover, "measure"), (transfer, "Pair"), (load, "_model")):
        monkeypatch.setattr(module, name, too_late)
    words = arguments.split()
    assert command_line(words, monkeypatch) == 1
    (line,) = capsys.readouterr().err.splitlines()
    *_, option, value = words
    assert f"'{option}'" in line and right in line
    assert all(part in line for part in value.split(","))


async def test_a_service_that_does_not_start_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ServiceFailed, match=r"the service pair did not get ready: cbdisagg: .*nonsense"):
        async with handover.service("pair", "nonsense = 1\n", "float32"):
            pass


# ---------------------------------------------------------------------------------------------------------- tables


def shown(table: object) -> str:
    text = io.StringIO()
    Console(file=text, width=80).print(table)
    return text.getvalue()


def test_steps_table_fits_a_terminal_of_80_columns() -> None:
    row = step.Row(
        "prefill", "native", "bfloat16", 32, 1024, 1148.43, 112.31, 12345.0, 65.0, 1114.0, 0.87, 9999.0, 1.24
    )
    text = shown(step._table([row], 2))
    assert "…" not in text
    for word in ("prefill", "native", "bf16", "1148", "112", "12345", "spread", "87%", "9999", "124%"):
        assert word in text


def test_transfers_table_fits_too(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    row = transfer.Row(
        kind="shm",
        tokens=2048,
        mib=45.0,
        first_ms=123.45,
        median_ms=112.34,
        p10_ms=101.2,
        p90_ms=123.4,
        gb_per_s=10.1,
        runner_ms=111.11,
        memcpy_ms=11.22,
        memcpy_gb_per_s=9.9,
    )
    transfer._print_table([row], {"shm": 1e9})
    text = capsys.readouterr().out
    for word in ("2048", "123.45", "112.34", "101-123", "10.1", "111.11", "11.22", "9.9", "memcpy"):
        assert word in text
    assert "…" not in text and max(map(len, text.splitlines())) <= 80


def test_a_pair_that_is_interrupted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while the processes are being joined: the child has ended, the folder is gone."""

    def interrupted(_: object) -> str:
        raise KeyboardInterrupt

    pair = transfer.Pair("zmq", 1)
    monkeypatch.setattr(transfer.Pair, "_read", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.__enter__()
    assert pair._child.returncode == 0
    assert not Path(pair._folder.name).exists()
