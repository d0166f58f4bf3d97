"""Services of a tiny model that are drained, started anew worker by worker, ended, and struck dumb, under load.

Every answer is compared with the one that an undisturbed service gave.
"""

from __future__ import annotations

import asyncio
import json
import signal
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
from cbdisagg_bench.faults_processes import Processes
from cbdisagg_bench.service import running

pytestmark = pytest.mark.e2e

SETTINGS = """
[model]
dtype = "float32"
served_name = "tiny"
max_len = 2048
[kv]
pages = 512
[debug]
invariants = true
"""
WORKERS = """
[[workers]]
role = "{role}"
count = {count}
threads = 1
"""
TOKENS = 1500
"""So many that a stream is still running, a good part of a second, when something is done to its worker."""
PATIENCE_S = 120.0
NOT_READY_S = 10.0
"""A service that cannot serve says so within this time."""


@dataclass
class Answer:
    """What a client got of one stream: its text, why it ended, and the error that it ended with."""

    status: int
    text: str = ""
    reason: str | None = None
    error: str = ""
    headers: dict[str, str] = field(default_factory=dict)


class Client:
    """Streams of one service, and what is known of it from outside."""

    def __init__(self, url: str, pid: int, session: aiohttp.ClientSession, log: Path) -> None:
        self.url, self.pid, self.session, self.log = url, pid, session, log
        self.processes = Processes(psutil.Process(pid))

    async def ask(self, number: int, got: Callable[[], None] = lambda: None) -> Answer:
        """A greedy stream of TOKENS; `got` is called after each event."""
        body = {"prompt": f"{number} " * 40, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
        async with self.session.post(f"{self.url}/v1/completions", json=body) as response:
            answer = Answer(response.status, headers=dict(response.headers))
            if response.status != 200:
                answer.error = await response.text()
                return answer
            try:
                async for line in response.content:
                    if line.startswith(b"data: {"):
                        self._take(answer, json.loads(line[6:]))
                        got()
            except aiohttp.ClientPayloadError:
                assert answer.error, "a stream is only broken off after it has said why"
            return answer

    @staticmethod
    def _take(answer: Answer, event: dict[str, Any]) -> None:
        if "error" in event:
            answer.error = event["error"]["message"]
            return
        (choice,) = event["choices"]
        answer.text += choice["text"]
        answer.reason = choice["finish_reason"] or answer.reason

    async def begun(self, number: int) -> asyncio.Task[Answer]:
        """A stream that has given its first tokens."""
        first = asyncio.Event()
        task = asyncio.create_task(self.ask(number, first.set))
        async with asyncio.timeout(PATIENCE_S):
            await first.wait()
        return task

    async def get(self, path: str) -> tuple[int, str]:
        async with self.session.get(self.url + path) as response:
            return response.status, await response.text()

    async def drain(self, **body: object) -> list[str]:
        async with self.session.post(f"{self.url}/drain", json=body) as response:
            assert response.status == 202, await response.text()
            names: list[str] = (await response.json())["draining"]
            return names

    async def total(self, name: str) -> float:
        _, text = await self.get("/metrics")
        lines = (line.rsplit(" ", 1) for line in text.splitlines() if line.startswith(f"cbdisagg:{name}"))
        return sum(float(value) for _, value in lines)

    async def until_ready(self, ready: bool, within_s: float = PATIENCE_S) -> str:
        """What /ready says then."""
        async with asyncio.timeout(within_s):
            while True:
                status, text = await self.get("/ready")
                if (status == 200) == ready:
                    return text
                await asyncio.sleep(0.05)  # another process changes it


@asynccontextmanager
async def serving(model: Path, *workers: tuple[str, int], settings: Sequence[str] = ()) -> AsyncIterator[Client]:
    groups = "".join(WORKERS.format(role=role, count=count) for role, count in workers)
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:  # pytest's own are too deep for a socket's path
        folder = Path(name)
        (folder / "config.toml").write_text(SETTINGS + groups)
        options = ["--config", str(folder / "config.toml"), "--model", str(model)]
        options += [part for setting in settings for part in ("--set", setting)]
        connector = aiohttp.TCPConnector(limit=0)
        async with (
            running("drain", options, folder / "log", folder) as service,
            aiohttp.ClientSession(connector=connector) as session,
        ):
            client = Client(service.url, service.pid, session, folder / "log")
            await client.until_ready(True)
            yield client


class Load:
    """Streams that follow each other until `end`, each as it is without disturbance."""

    def __init__(self, client: Client, references: Sequence[Answer]) -> None:
        self._client, self._references = client, references
        self._going, self.finished = True, 0
        self._tasks = [asyncio.create_task(self._run(number)) for number in range(len(references))]

    async def _run(self, number: int) -> None:
        while self._going:
            answer = await self._client.ask(number)
            assert (answer.error, answer.reason) == ("", "length")
            assert answer.text == self._references[number].text
            self.finished += 1

    async def end(self) -> int:
        """How many there were; raises what was wrong with one."""
        self._going = False
        await asyncio.gather(*self._tasks)
        return self.finished


async def learn(client: Client, count: int) -> list[Answer]:
    answers = [await client.ask(number) for number in range(count)]
    assert all(answer.reason == "length" for answer in answers)
    return answers


async def start_all_anew(client: Client, load: Load, count: int) -> None:
    """A rolling restart of all workers."""
    assert len(await client.drain(workers="all")) == count
    async with asyncio.timeout(PATIENCE_S):
        while await client.total("worker_restarts_total") < count:  # noqa: ASYNC110  # other processes change it
            await asyncio.sleep(0.1)
    await client.until_ready(True)
    assert await load.end() >= 3
    assert await client.total("kv_page_leaks_total") == 0


@pytest.mark.slow
async def test_two_pairs_are_started_anew_under_load(tiny_model: Path) -> None:
    """On two cores each start takes long beside the load; tests/actors has the same with fake models."""
    async with serving(tiny_model, ("prefill", 2), ("decode", 2)) as client:
        await start_all_anew(client, Load(client, await learn(client, 3)), 4)


async def end_in_order(client: Client, references: Sequence[Answer]) -> None:
    """SIGTERM: what runs is finished, nothing new is taken, one line says so."""
    supervisor = psutil.Process(client.pid)
    decoding = client.processes.look()["decode-0"]
    streams = await asyncio.gather(*(client.begun(number) for number in range(len(references))))
    decoding.send(signal.SIGSTOP)  # nothing ends before all has been looked at
    try:
        supervisor.send_signal(signal.SIGTERM)
        assert "draining" in await client.until_ready(False)
        assert (await client.get("/health"))[0] == 200
        late = await client.ask(0)
        assert (late.status, late.headers["Retry-After"]) == (503, "10")
    finally:
        decoding.send(signal.SIGCONT)
    for stream, reference in zip(streams, references, strict=True):
        assert (await stream).text == reference.text
    await asyncio.to_thread(psutil.wait_procs, [supervisor], PATIENCE_S)
    assert not supervisor.is_running()
    assert f"Stopping: {len(references)} requests are running; again to stop at once" in client.log.read_text()


async def struck_dumb(client: Client, name: str) -> None:
    """Stopped, a process is there and does nothing: the service is soon not ready, then ready with a successor."""
    before = client.processes.look()[name]
    before.send(signal.SIGSTOP)
    await client.until_ready(False, NOT_READY_S)
    assert (await client.get("/health"))[0] == 200
    await client.until_ready(True)
    assert client.processes.look()[name].incarnation > before.incarnation


async def test_one_pair_is_started_anew_under_load_and_ends_when_its_streams_do(tiny_model: Path) -> None:
    async with serving(tiny_model, ("prefill", 1), ("decode", 1)) as client:
        references = await learn(client, 3)
        await start_all_anew(client, Load(client, references), 2)
        await end_in_order(client, references)
        told = [line for line in client.log.read_text().splitlines() if "request_id=" not in line]
        assert not [line for line in told if any(word in line for word in ("Traceback", " WARNING ", " ERROR "))], told


async def test_a_process_that_is_dumb_is_soon_found_out(tiny_model: Path) -> None:
    async with serving(tiny_model, ("prefill", 1), ("decode", 1)) as client:
        (reference,) = await learn(client, 1)
        for name in ("decode-0", "coordinator"):
            await struck_dumb(client, name)
        assert (await client.ask(0)).text == reference.text


async def test_a_stream_waits_for_a_worker_as_long_as_it_may_and_new_requests_do_not(tiny_model: Path) -> None:
    """The only worker has no successor while the nursery, which would fork it, is stopped: for five seconds."""
    async with serving(tiny_model, ("any", 1), settings=["limits.resume_s=1"]) as client:
        reference = await client.ask(0)
        children = client.processes.supervisor.children()
        (nursery,) = (child for child in children if "cbdisagg.actors.nursery" in child.cmdline())
        worker = client.processes.look()["worker-0"]
        nursery.suspend()
        stream = await client.begun(0)
        worker.send(signal.SIGKILL)
        reason = await client.until_ready(False)
        refused = await client.ask(1)
        assert (refused.status, refused.headers["Retry-After"]) == (503, "1"), reason
        broken = await stream
        assert "limits.resume_s" in broken.error
        assert broken.reason is None
        assert reference.text.startswith(broken.text)
        with suppress(psutil.NoSuchProcess):  # it has been given up by now, perhaps
            nursery.resume()
        await client.until_ready(True)
        assert (await client.ask(0)).text == reference.text
