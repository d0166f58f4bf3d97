"""The latency experiment with real processes: one service per system, asked over HTTP at the times of the experiment.

Knows services and clients; every service is started with the system's config as a file, as a user would. What a client
cannot see, how long its request waited and was prefilled, comes from the service's own metrics, as means.
"""

from __future__ import annotations

import asyncio
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
from cbdisagg_bench.batching_latency import Latencies, Rate
from cbdisagg_bench.batching_lengths import Request, poisson
from cbdisagg_bench.load_asks import Ask
from cbdisagg_bench.load_client import Answer, Client
from cbdisagg_bench.service import ServiceFailed, running
from msgspec.structs import replace

from cbdisagg.config import Config
from cbdisagg.load import print_config

SERVED = "bench"
_PHASES = {"queue": "request_queue_time_seconds", "prefill": "request_prefill_time_seconds"}


@asynccontextmanager
async def asked(
    system: str, config: Config, folder: Path, warm_up: Sequence[Request], port: int
) -> AsyncIterator[tuple[aiohttp.ClientSession, str]]:
    """A service with the model in `folder` that has answered `warm_up`, since first steps are slow; and a session.

    Raises ServiceFailed if it does not start or an answer fails.
    """
    model = replace(config.model, path=str(folder), name="", served_name=SERVED)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / f"{system}.toml"
        file.write_text(print_config(replace(config, model=model)), encoding="utf-8")
        async with (
            running(system, ("--config", str(file)), Path(place) / "stderr", port=port) as service,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session,
        ):
            await ask_all(session, service.url, warm_up, [0.0] * len(warm_up), _nothing)
            yield session, service.url


async def served(
    system: str,
    config: Config,
    folder: Path,
    requests: Sequence[Request],
    rates: Sequence[Rate],
    port: int,
    ended: Callable[[], None],
) -> list[Latencies]:
    """Each rate in turn, against one service. `ended` is called after each answer. Raises ServiceFailed."""
    async with asked(system, config, folder, requests[:2], port) as (session, url):
        return [await _at_rate(session, url, system, requests, rate, ended) for rate in rates]


async def _at_rate(
    session: aiohttp.ClientSession,
    url: str,
    system: str,
    requests: Sequence[Request],
    rate: Rate,
    ended: Callable[[], None],
) -> Latencies:
    before = await _phase_sums(session, url)
    answers = await ask_all(session, url, requests, poisson(len(requests), rate.qps), ended)
    after = await _phase_sums(session, url)
    waited = {name: (after[name] - before[name]) / len(requests) for name in _PHASES}
    return Latencies(
        system,
        rate,
        e2e=[answer.times[-1] - answer.arrived for answer in answers],
        ttft=[answer.times[0] - answer.arrived for answer in answers],
        gaps=[later - sooner for a in answers for sooner, later in zip(a.times, a.times[1:], strict=False)],
        queue=waited["queue"],
        prefill=waited["prefill"],
        decode=sum(answer.times[-1] - answer.times[0] for answer in answers) / len(answers),
    )


async def ask_all(
    session: aiohttp.ClientSession,
    url: str,
    requests: Sequence[Request],
    arrivals: Sequence[float],
    ended: Callable[[], None],
) -> list[Answer]:
    """All answers, in the order of the requests. Latencies count from the intended arrival."""
    begin = time.perf_counter() + 0.01
    client = Client(url, SERVED, begin, timed=True)

    async def one(request: Request, arrival: float) -> Answer:
        await asyncio.sleep(max(0.0, arrival - (time.perf_counter() - begin)))
        answer = await client.ask(Ask(arrival, list(request.prompt), request.output))
        if answer.error:
            raise ServiceFailed(f"{url}: {answer.error}")
        ended()
        return answer

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(*pair)) for pair in zip(requests, arrivals, strict=True)]
    return [task.result() for task in tasks]


async def _phase_sums(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Seconds of all requests so far, by phase."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    return {
        name: sum(map(float, re.findall(rf"^cbdisagg:{metric}_sum(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)))
        for name, metric in _PHASES.items()
    }


def _nothing() -> None:
    pass
