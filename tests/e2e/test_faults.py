"""Two prefill and two decode workers of a tiny model, struck at moments of the protocol: every stream goes on to the
end that it would have had, what a dead process held is free again, and the numbers of /metrics tell the truth.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest
import pytest_asyncio
from cbdisagg_bench.faults_answers import Answer, compare
from cbdisagg_bench.faults_client import Client, open_session
from cbdisagg_bench.faults_journal import Journals, Seen
from cbdisagg_bench.faults_load import FIRST_SEED, WORDS, Ask
from cbdisagg_bench.faults_processes import Process, Processes
from cbdisagg_bench.faults_service import TOLD_S, Rest, Scrape
from cbdisagg_bench.service import running

pytestmark = [pytest.mark.e2e, pytest.mark.asyncio(loop_scope="module")]

SETTINGS = """
[model]
dtype = "float32"
served_name = "tiny"
max_len = 1500
[[workers]]
role = "prefill"
count = 2
threads = 1
[[workers]]
role = "decode"
count = 2
threads = 1
[kv]
pages = 256
[scheduler]
token_budget = 64
[policy]
mode = "disaggregate"
suspect_s = 2.0
[debug]
invariants = true
"""
PATIENCE_S = 60.0
TOLERANCE = 1e-3


def stream(number: int, words: int, tokens: int, **fields: Any) -> Ask:
    """A greedy stream with the scores of its tokens, from a prompt of its own of so many words."""
    prompt = " ".join(random.Random(number).choices(WORDS, k=words))
    plain = {"temperature": 0, "ignore_eos": True, "stream": True, "logprobs": 1, "seed": FIRST_SEED + number}
    usage = {"stream_options": {"include_usage": True}}
    return Ask(number, False, {"prompt": prompt, "max_tokens": tokens, **plain, **usage, **fields})


LONG = [stream(number, 250, 24) for number in range(4)]
SHORT = [stream(10 + number, 3, 400) for number in range(4)]
PROBE = stream(20, 8, 16)


@dataclass
class World:
    """The running service, what its journals tell, and clients that know what they should be answered."""

    url: str
    processes: Processes
    journals: Journals
    rest: Rest
    client: Client
    references: dict[int, Answer] = field(default_factory=dict)
    _salts: int = 0

    async def ask(self, ask: Ask) -> Answer:
        """Nothing is cached of an earlier one."""
        self._salts += 1
        return await self.client.ask(ask, f"salt-{self._salts}")

    async def learn(self, asks: Sequence[Ask]) -> None:
        """The answers of an untroubled service."""
        for ask in asks:
            answer = self.references[ask.number] = await self.ask(ask)
            assert answer.whole, answer.error

    def check(self, answer: Answer) -> None:
        verdict = compare(answer, self.references[answer.ask.number], TOLERANCE)
        assert verdict.kind == "same", f"request {answer.ask.number}: {verdict.what}"

    async def check_probe(self, times: int = 1) -> None:
        for _ in range(times):
            self.check(await self.ask(PROBE))

    async def seen(self, event: str) -> Seen:
        seen: Seen | None = await self.journals.next(event, PATIENCE_S)
        assert seen is not None, f"nobody has handled {event}"
        return seen

    def process(self, name: str) -> Process:
        process: Process = self.processes.look()[name]
        return process

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not condition():  # noqa: ASYNC110  # other processes change it
                await asyncio.sleep(0.05)

    async def up(self, everybody: bool = False) -> None:
        """Until a coordinator and a worker of each role are up, or all processes."""
        wanted = self.processes.names - {"api"}

        def enough() -> bool:
            up: list[Process] = self.processes.up(self.journals.living)
            if everybody:
                return {it.name for it in up} >= wanted
            return {it.role for it in up} >= {name.partition("-")[0] for name in wanted}

        await self.until(enough)
        async with asyncio.timeout(PATIENCE_S):
            while not await self.ready():  # noqa: ASYNC110  # other processes change it
                await asyncio.sleep(0.05)

    async def ready(self) -> bool:
        """Some way from a prefill to a decode worker has been tested; a killed api is away for a while."""
        try:
            async with aiohttp.ClientSession() as session, session.get(f"{self.url}/ready") as response:
                return response.status == 200
        except aiohttp.ClientConnectionError:
            return False

    async def placed(self, asks: Sequence[Ask], since: float) -> None:
        """Until each has come to a decode worker. `since`: of the monotonic clock."""
        visits = self.journals.visits
        await self.until(lambda: all(any(it.decodes and it.at > since for it in visits[ask.number]) for ask in asks))

    async def free(self) -> Scrape:
        """Until no request is anywhere and no page is held, and that for longer than the workers take to say so."""
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        since = asyncio.get_running_loop().time()
        async with asyncio.timeout(PATIENCE_S):
            while True:
                scrape: Scrape = await self.rest.scrape()
                now = asyncio.get_running_loop().time()
                if any(scrape.total(name) for name in names):
                    since = now
                elif now - since > TOLD_S:
                    assert scrape.total("kv_page_leaks_total") == 0
                    return scrape
                await asyncio.sleep(0.05)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest_asyncio.fixture(
    scope="module", loop_scope="module", params=["shm", pytest.param("zmq", marks=pytest.mark.slow)]
)
async def world(request: pytest.FixtureRequest, tiny_model: Path) -> AsyncIterator[World]:
    """One service for all tests of this file: each leaves it as it has found it, but for the incarnations."""
    folder = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))  # pytest's own are too deep for the path of a socket
    config = folder / "2p2d.toml"
    config.write_text(SETTINGS)
    journals = Journals(folder / "journals")
    settings = [f"debug.journal={journals.folder}", f"transfer.kind={request.param}"]
    options = ["--config", str(config), "--model", str(tiny_model)]
    options += [word for setting in settings for word in ("--set", setting)]
    following = asyncio.create_task(journals.follow())
    try:
        async with running("2p2d", options, folder / "log", folder, free_port()) as service, open_session() as session:
            processes = Processes(psutil.Process(service.pid))
            rest = Rest(service.url, processes, journals)
            world = World(service.url, processes, journals, rest, Client(session, service.url, "tiny"))
            processes.look()
            await world.learn([*LONG, *SHORT, PROBE])
            yield world
            await rest.settle("at the end")
            assert rest.leaked == []
            # On a busy machine a slow worker may be taken for dead, and that is the only reason to be killed.
            assert {journals.causes[it.incarnation] for it in processes.unstruck} <= {"SIGKILL"}
        rest.leaked.clear()
        config.unlink()
        rest.after_the_end(folder)
        assert rest.leaked == []
    finally:
        following.cancel()
        await asyncio.wait([following])
        journals.close()
        shutil.rmtree(folder)


@pytest_asyncio.fixture(loop_scope="module", autouse=True)
async def somebody(world: World) -> None:
    """Each test begins with a worker of each role; those that were killed before may still be loading."""
    await world.up()


# ------------------------------------------------------------------------------------------------ a prefill worker


@pytest.mark.parametrize("event", ["Prefill", "PushDone", "KvReady"])
async def test_a_prefill_worker_is_killed_while_it_hands_over(world: World, event: str) -> None:
    """B071: in mid-prefill, in mid-transfer, and just after its last word."""
    since = time.monotonic()
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in SHORT[:2]]
        await world.placed(SHORT[:2], since)
        asked += [clients.create_task(world.ask(ask)) for ask in LONG]
        seen = await world.seen(event)
        world.processes.strike(world.process(seen.sender if event == "KvReady" else seen.actor), signal.SIGKILL)
    for task in asked:
        world.check(task.result())
    await world.check_probe()


# ------------------------------------------------------------------------------------------------- a decode worker


async def test_a_decode_worker_is_killed_while_its_streams_run(world: World) -> None:
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in SHORT]
        seen = await world.seen("KvReady")
        await world.seen("StepDone")
        world.processes.strike(world.process(seen.actor), signal.SIGKILL)
    for task in asked:
        world.check(task.result())


async def test_the_nursery_is_killed_together_with_a_worker(world: World) -> None:
    """Who could not be forked is, by the next nursery; the other workers do not notice."""

    def nursery() -> psutil.Process:
        (found,) = (it for it in world.processes.supervisor.children() if "cbdisagg.actors.nursery" in it.cmdline())
        return found

    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in SHORT]
        seen = await world.seen("StepDone")
        old = nursery()
        old.kill()
        world.processes.strike(world.process(seen.actor), signal.SIGKILL)
    for task in asked:
        world.check(task.result())
    await world.up()
    assert nursery().pid != old.pid
    await world.check_probe()


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_stopped_worker_is_found_out_and_replaced(world: World, role: str) -> None:
    """B077: its requests are taken over, others do not wait for it, and nothing of it is believed later."""
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in (*SHORT, *LONG)]
        seen = await world.seen("Prefill" if role == "prefill" else "KvReady")
        stopped = world.process(seen.actor)
        world.processes.strike(stopped, signal.SIGSTOP)
        down = clients.create_task(world.seen("PeerDown"))
    assert (await down).actor == "coordinator"
    for task in asked:
        world.check(task.result())
    stopped.send(signal.SIGCONT)
    await world.check_probe(3)
    await world.until(lambda: world.processes.look().get(stopped.name, stopped).incarnation > stopped.incarnation)


async def test_a_worker_that_was_away_for_a_moment_goes_on(world: World) -> None:
    """Shorter than what is taken for a death: nobody is replaced, and its streams go on where they stood."""
    here, away = SHORT[0], SHORT[1]
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in (here, away)]
        seen = await world.seen("KvReady")
        frozen = world.process(seen.actor)
        world.processes.strike(frozen, signal.SIGSTOP, comes_back=True)
        await asyncio.sleep(0.3)  # far below policy.silent_s and suspect_s
        frozen.send(signal.SIGCONT)
    for task in asked:
        world.check(task.result())
    assert world.process(frozen.name) == frozen


# --------------------------------------------------------------------------------------------------- a coordinator


async def test_streams_do_not_notice_that_the_coordinator_is_away(world: World) -> None:
    """B073: they end while it is stopped. It is killed then, and who had asked it for something gets an answer."""
    await world.up(everybody=True)
    coordinator, since = world.process("coordinator"), time.monotonic()
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in SHORT[:2]]
        await world.placed(SHORT[:2], since)
        world.processes.strike(coordinator, signal.SIGSTOP)
        for task in asked:
            world.check(await task)
        waits = clients.create_task(world.ask(PROBE))
        done, _ = await asyncio.wait([waits], timeout=0.2)
        assert not done
        world.processes.strike(coordinator, signal.SIGKILL)
        world.check(await waits)
    workers = (await world.rest.scrape()).of("num_requests_running")
    assert len(workers) == 4, "each is there once"
    world.processes.strike(world.process("prefill-1"), signal.SIGKILL)
    await world.check_probe(3)


async def test_a_coordinator_is_killed_with_requests_on_their_way(world: World) -> None:
    """Some have been placed and some have not; each is computed to its end once."""
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in (*LONG, *SHORT)]
        await world.seen("Generate")
        world.processes.strike(world.process("coordinator"), signal.SIGKILL)
    for task in asked:
        world.check(task.result())


# --------------------------------------------------------------------------------------------------- undisturbed


async def test_streams_end_with_their_stop_strings_beside_others_that_go_on(world: World) -> None:
    """One of several streams that get their tokens in one message ends in the middle of it, and takes nobody along."""
    api = world.process("api")
    texts = {ask.number: next(iter(world.references[ask.number].said.values())).text for ask in SHORT}
    stops = {number: text[len(text) // 2 :][:3] for number, text in texts.items()}
    asked = [Ask(ask.number, ask.chat, {**ask.body, "stop": stops[ask.number]}) for ask in SHORT[:2]]
    async with asyncio.TaskGroup() as clients:
        ending = [clients.create_task(world.ask(ask)) for ask in asked]
        others = [clients.create_task(world.ask(ask)) for ask in SHORT[2:]]
    for ask, task in zip(asked, ending, strict=True):
        (said,) = task.result().said.values()
        assert (said.finish, said.stopped_by) == ("stop", stops[ask.number])
        assert said.text == texts[ask.number].partition(stops[ask.number])[0]
    for task in others:
        world.check(task.result())
    assert world.process("api") == api


# ------------------------------------------------------------------------------------------------ clients that leave


async def test_clients_leave_at_every_moment_of_a_hand_over(world: World) -> None:
    """B075: pages that are still written to are not given away, so the others' answers are theirs."""
    events = ("Submit", "Prefill", "StepDone", "PushDone", "KvReady", "PushDone", "Prefill", "StepDone")
    for event in events:
        async with asyncio.TaskGroup() as clients:
            leaves = clients.create_task(world.ask(LONG[0]))
            stays = [clients.create_task(world.ask(ask)) for ask in (LONG[1], PROBE)]
            await world.seen(event)
            leaves.cancel()
        for task in stays:
            world.check(task.result())
    await world.free()


@pytest.mark.slow
async def test_clients_leave_while_their_pages_are_on_a_slow_way(world: World) -> None:
    """B075: whoever receives stands still, so that a transfer takes a second, and its client leaves meanwhile."""
    await world.up(everybody=True)
    rng = random.Random(75)
    for n in range(20):
        leaver = LONG[n % 2]
        async with asyncio.TaskGroup() as clients:
            leaves = clients.create_task(world.ask(leaver))
            prefill = await world.seen("Prefill")
            receivers = [it for it in world.processes.look().values() if it.role == "decode"]
            for receiver in receivers:
                world.processes.strike(receiver, signal.SIGSTOP, comes_back=True)
            stays = [clients.create_task(world.ask(ask)) for ask in (LONG[2], PROBE)]
            await asyncio.sleep(rng.uniform(0.1, 1.0))  # below policy.suspect_s
            leaves.cancel()
            for receiver in receivers:
                receiver.send(signal.SIGCONT)
        assert prefill.actor.startswith("prefill")
        for task in stays:
            world.check(task.result())
    await world.free()


# ----------------------------------------------------------------------------------------------------- the api


async def test_an_api_that_was_killed_is_back_and_its_requests_are_forgotten(world: World) -> None:
    """B079: its clients lose their connections, nobody else loses anything, and the port is the same."""
    api = world.process("api")
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in SHORT]
        await world.seen("KvReady")
        world.processes.strike(api, signal.SIGKILL)
    assert any(task.result().error for task in asked)
    await world.until(lambda: world.processes.look().get("api", api) != api)
    await world.up()
    await world.check_probe()
    await world.free()


async def test_what_is_computed_while_an_api_is_stopped_waits_for_it(world: World) -> None:
    """Nobody judges an api by its silence: its streams are decoded to their ends meanwhile, and lose nothing."""
    api, since = world.process("api"), time.monotonic()
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in SHORT]
        await world.placed(SHORT, since)
        world.processes.strike(api, signal.SIGSTOP, comes_back=True)
        await world.seen("Finished")
        api.send(signal.SIGCONT)
    for task in asked:
        world.check(task.result())
    assert world.process("api") == api


# ------------------------------------------------------------------------------------------------------- metrics


async def test_counters_do_not_fall_when_workers_are_restarted(world: World) -> None:
    """B093: scraped all the while, each number that only grows does so, and in the end nobody runs or waits."""
    await world.up(everybody=True)
    scrapes = [await world.rest.scrape()]
    async with asyncio.TaskGroup() as clients:
        asked = [clients.create_task(world.ask(ask)) for ask in (*SHORT, *LONG)]
        for name, event in (("prefill-0", "Prefill"), ("decode-1", "StepDone")):
            await world.seen(event)
            world.processes.strike(world.process(name), signal.SIGKILL)
            scrapes.append(await world.rest.scrape())
        while not all(task.done() for task in asked):
            scrapes.append(await world.rest.scrape())
    for task in asked:
        world.check(task.result())
    scrapes.append(await world.free())
    for before, after in pairwise(scrapes):
        for key, value in growing(before).items():
            assert after.values[key] >= value, key
        assert all(value >= 0 for value in after.values.values())
    first, last = scrapes[0], scrapes[-1]
    ended = last.total("request_success_total") - first.total("request_success_total")
    assert ended == len(asked), "each is counted once"
    restarts = last.of("worker_restarts_total")
    for name in ("prefill-0", "decode-1"):
        label = f'worker="{name}"'
        assert restarts[label] == first.of("worker_restarts_total").get(label, 0) + 1


def growing(scrape: Scrape) -> dict[str, float]:
    ends = ("_total", "_count", "_sum", "_bucket")
    return {key: value for key, value in scrape.values.items() if key.partition("{")[0].endswith(ends)}


# ----------------------------------------------------------------------------------------------------- the command


async def test_bench_faults_finds_nothing_wrong(tiny_model: Path, tmp_path: Path) -> None:
    """The whole command. In bfloat16 sums are the same in any company, so that drawn tokens are too."""
    config = tmp_path / "1p1d.toml"
    config.write_text(SETTINGS.replace("count = 2", "count = 1"))
    words = ["--kills", "2", "--requests", "6", "--concurrency", "3", "--model", str(tiny_model), "--json"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "cbdisagg", "bench", "faults", "--config", str(config), *words),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    report = json.loads(out)
    assert sum(report["faults"].values()) >= 2
    assert report["requests"] >= 12
    assert report["verdicts"] == {"lost": 0, "altered": 0, "repeated": 0}
    assert (report["leaked"], report["crashed"]) == ([], [])
