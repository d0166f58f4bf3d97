"""Load on a running OpenAI-compatible server: `cbdisagg bench serve URL`.

Prompts are random token ids, so that nothing is cached and every server gets the same work; the end token is ignored,
so that every answer has the length that was asked for. Latencies count from the intended arrival of a request: a client
that is late to send does not hide the server's queue. TTFT = first token - arrival; TPOT = (last - first) /
(tokens - 1); ITL = every gap between tokens, pooled over requests.
"""

from __future__ import annotations

import asyncio
import json
import platform
import random
import time
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import aiohttp
import numpy as np
import typer
from cbdisagg_bench.options import at_least
from rich.console import Console
from rich.progress import Progress
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: seconds after the start at which it arrives, its prompt, the tokens wanted."""

    arrival_s: float
    prompt: list[int]
    output_tokens: int


@dataclass(slots=True)
class Answer:
    """Times of a request's tokens, in seconds after the start; `error` if it did not end well."""

    ask: Ask
    arrived: float = 0.0
    times: list[float] = field(default_factory=list)
    error: str = ""


@dataclass(frozen=True, slots=True)
class Report:
    """Latencies are [p50, p90, p99] in milliseconds."""

    requests: int
    failed: int
    seconds: float
    generated_tokens: int
    generated_per_s: float
    total_per_s: float
    ttft_ms: list[float]
    tpot_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]


def workload(
    requests: int, prompt_tokens: int, output_tokens: int, exponential: bool, rate: float, vocab: int, seed: int
) -> list[Ask]:
    """The requests, from the seed alone. `rate` 0: all arrive at once (concurrency is then the client's limit).

    Exponential output lengths have the mean `output_tokens` and are clipped to 1 .. 4 times that.
    """
    rng = random.Random(seed)
    asks, clock = [], 0.0
    for _ in range(requests):
        length = output_tokens
        if exponential:
            length = min(4 * output_tokens, max(1, round(rng.expovariate(1 / output_tokens))))
        asks.append(Ask(clock, [rng.randrange(vocab) for _ in range(prompt_tokens)], length))
        clock += rng.expovariate(rate) if rate else 0.0
    return asks


class Client:
    """Sends requests and notes when tokens come. Times are seconds since `begin`."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, begin: float) -> None:
        self.session, self.url, self.model, self.begin = session, url, model, begin

    async def ask(self, ask: Ask) -> Answer:
        answer = Answer(ask, arrived=max(ask.arrival_s, time.perf_counter() - self.begin))
        if ask.arrival_s:
            answer.arrived = ask.arrival_s
        body = {
            "model": self.model,
            "prompt": ask.prompt,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        try:
            async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
                if response.status != 200:
                    answer.error = f"{response.status} {(await response.text())[:200]}"
                    return answer
                await self._read(response, answer)
        except (aiohttp.ClientError, OSError) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if not answer.error and len(answer.times) != ask.output_tokens:
            answer.error = f"{len(answer.times)} tokens instead of {ask.output_tokens}"
        return answer

    async def _read(self, response: aiohttp.ClientResponse, answer: Answer) -> None:
        async for line in response.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            if line.startswith(b'data: {"error"'):
                answer.error = line.decode()[6:206].strip()
            else:
                answer.times.append(time.perf_counter() - self.begin)


async def run(
    url: str, model: str, asks: list[Ask], concurrency: int, progress: Progress
) -> tuple[list[Answer], float]:
    """Send all requests, at most `concurrency` at once; the answers and the seconds from the first to the last."""
    task = progress.add_task("requests", total=len(asks))
    gate = asyncio.Semaphore(concurrency)
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        begin = time.perf_counter()
        client = Client(session, url, model, begin)

        async def one(ask: Ask) -> Answer:
            await asyncio.sleep(max(0.0, ask.arrival_s - (time.perf_counter() - begin)))
            async with gate:
                answer = await client.ask(ask)
            progress.advance(task)
            return answer

        answers = await asyncio.gather(*(one(ask) for ask in asks))
        return answers, time.perf_counter() - begin


def summarise(answers: list[Answer], seconds: float) -> Report:
    good = [answer for answer in answers if not answer.error]
    generated = sum(len(answer.times) for answer in good)
    prompts = sum(len(answer.ask.prompt) for answer in good)
    return Report(
        requests=len(answers),
        failed=len(answers) - len(good),
        seconds=round(seconds, 3),
        generated_tokens=generated,
        generated_per_s=round(generated / seconds, 1),
        total_per_s=round((generated + prompts) / seconds, 1),
        ttft_ms=_percentiles([a.times[0] - a.arrived for a in good]),
        tpot_ms=_percentiles([(a.times[-1] - a.times[0]) / (len(a.times) - 1) for a in good if len(a.times) > 1]),
        itl_ms=_percentiles([gap for a in good for gap in np.diff(a.times)]),
        e2e_ms=_percentiles([a.times[-1] - a.arrived for a in good]),
    )


def _percentiles(seconds: list[float]) -> list[float]:
    return [round(float(value) * 1e3, 2) for value in np.percentile(seconds, [50, 90, 99])] if seconds else []


async def _model(url: str) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"{url}/v1/models") as response:
        listed: dict[str, Any] = await response.json()
        return str(listed["data"][0]["id"])


def load(
    url: Annotated[str, typer.Argument(help="Base address of the server, without /v1.")],
    requests: Annotated[int, typer.Option(callback=at_least(1), help="How many requests.")] = 64,
    concurrency: Annotated[int, typer.Option(callback=at_least(1), help="How many at once.")] = 16,
    rate: Annotated[
        float,
        typer.Option(callback=at_least(0), help="Poisson arrivals per second; 0: as many as concurrency lets in."),
    ] = 0.0,
    prompt_tokens: Annotated[int, typer.Option(callback=at_least(1), help="Length of each prompt.")] = 128,
    output_tokens: Annotated[int, typer.Option(callback=at_least(1), help="Length of each answer, or its mean.")] = 32,
    exponential: Annotated[bool, typer.Option(help="Draw the lengths of answers from an exponential.")] = True,
    vocab: Annotated[int, typer.Option(callback=at_least(1), help="Token ids are drawn below this.")] = 49_000,
    model: Annotated[str, typer.Option(help="Model name; empty: the first that the server lists.")] = "",
    seed: Annotated[int, typer.Option(help="Of prompts, lengths and arrivals.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Put load on a server and time its answers.

    Example: cbdisagg bench serve http://127.0.0.1:8000 --requests 64 --concurrency 16
    """
    url = url.rstrip("/").removesuffix("/v1")
    asks = workload(requests, prompt_tokens, output_tokens, exponential, rate, vocab, seed)
    try:
        model = model or asyncio.run(_model(url))
    except (aiohttp.ClientError, OSError, KeyError, IndexError, TypeError, ValueError) as error:
        raise typer.BadParameter(
            f"{url} does not answer like an OpenAI-compatible server: {error}", param_hint="URL"
        ) from error
    with Progress(console=Console(stderr=True), transient=True) as progress:
        answers, seconds = asyncio.run(run(url, model, asks, concurrency, progress))
    report = summarise(answers, seconds)
    if as_json:
        setting = {"url": url, "model": model, "concurrency": concurrency, "rate": rate, "seed": seed}
        print(json.dumps(asdict(report) | setting | {"machine": platform.processor()}, indent=1))
    else:
        Console().print(_table(report))
    for error in sorted({answer.error for answer in answers if answer.error})[:5]:
        Console(stderr=True).print(f"failed: {error}", markup=False)
    if report.failed:
        raise typer.Exit(1)


def _table(report: Report) -> Table:
    table = Table(
        title=f"{report.requests} requests, {report.failed} failed, {report.seconds} s: "
        f"{report.generated_per_s} generated tok/s, {report.total_per_s} with prompts"
    )
    for name in ("ms", "p50", "p90", "p99"):
        table.add_column(name, justify="right")
    for name, row in (
        ("TTFT", report.ttft_ms),
        ("TPOT", report.tpot_ms),
        ("ITL", report.itl_ms),
        ("e2e", report.e2e_ms),
    ):
        table.add_row(name, *(f"{value:.2f}" for value in row))
    return table
