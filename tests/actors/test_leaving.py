"""Workers that leave and come again while requests run, and services that end in order; fake models, real processes."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from cbdisagg.actors import launch
from cbdisagg.actors.launch import ServiceFailed, Supervisor
from cbdisagg.actors.placement import Spot
from cbdisagg.actors.start import read_config, write_config
from cbdisagg.config import Config, ConfigError, Kv, Limits, Policy, Targets, Workers
from cbdisagg.messages import Drain

sys.path.insert(0, str(Path(__file__).parent))
from fake_process import SPOTS, fake_command
from supervised import CONFIG, Service, View, expected, service

PAIRS = (*SPOTS, Spot("prefill-1", "prefill", 1, ()), Spot("decode-1", "decode", 1, ()))
TOKENS = 150
"""Of each request: a second or two with "slow" workers."""

ASKED_AGAIN = "what runs has moved; only a request on its way when a worker's end is told is asked for again"


class Load:
    """Requests that run all the while, each one's tokens compared with those of an untroubled service."""

    def __init__(self, it: Service, clients: int = 4) -> None:
        self._it, self.clients, self.finished, self._go_on = it, clients, 0, True
        self._tasks = [asyncio.create_task(self._run(n)) for n in range(clients)]

    async def _run(self, client: int) -> None:
        number = 0
        while self._go_on:
            prompt = [client, number, *range(60)]
            assert await self._it.api.generate(prompt, TOKENS) == expected(prompt, TOKENS)
            self.finished, number = self.finished + 1, number + 1

    async def end(self) -> None:
        """Of the last ones; raises what has failed."""
        self._go_on = False
        await asyncio.gather(*self._tasks)


def tell(it: Service, drain: Drain) -> None:
    """As the api does for an operator."""
    it.api.mailbox.tell(it.supervisor.address, drain)


def incarnations(it: Service) -> dict[str, int]:
    return {child.name: child.incarnation for child in it.supervisor.children}


async def renewed(it: Service, names: tuple[str, ...], before: dict[str, int]) -> None:
    """Until these have successors, and all are members again."""
    await it.api.until(lambda: all(incarnations(it)[name] > before[name] for name in names) and it.whole())


@pytest.mark.parametrize("spots", [SPOTS, PAIRS], ids=["1p1d", "2p2d"])
async def test_a_rolling_restart_under_load_loses_nothing(
    tmp_path: Path, spots: tuple[Spot, ...], caplog: pytest.LogCaptureFixture
) -> None:
    names = tuple(spot.name for spot in spots)
    async with service(tmp_path, "slow", spots=spots) as it:
        await it.ready()
        before, seen, load = incarnations(it), len(it.api.members), Load(it)
        tell(it, Drain(names))
        with caplog.at_level(logging.INFO, "cbdisagg.actors"):
            await renewed(it, names, before)
        await load.end()
        assert load.finished >= 4
        assert incarnations(it)["coordinator"] == before["coordinator"]
        fewest = min(len(members.workers) for members in it.api.members[seen:])
        assert fewest == len(names) - 1, "one at a time"
        assert [child.ends for child in it.supervisor.children] == [0] * len(it.supervisor.children)
        assert it.api.client.stats is not None
        await it.api.until(lambda: it.api.client.stats.restarts == dict.fromkeys(names, 1))  # type: ignore[union-attr]
        assert sum(it.api.client.resumed.values()) < load.clients, ASKED_AGAIN
        left = [record.getMessage() for record in caplog.records if "has left" in record.getMessage()]
        assert [line.split()[0] for line in left] == list(names)
        assert all(line.endswith("exit status 0") for line in left)
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


async def test_sigterm_to_a_worker_by_hand_gives_its_requests_away(tmp_path: Path) -> None:
    async with service(tmp_path, "slow", spots=PAIRS) as it:
        await it.ready()
        before, load = incarnations(it), Load(it)
        for name in ("decode-0", "decode-1"):
            os.kill(it.pid(name), signal.SIGTERM)
            await renewed(it, (name,), before)
        await load.end()
        assert sum(it.api.client.resumed.values()) < load.clients, ASKED_AGAIN


async def test_a_worker_that_cannot_leave_is_killed_and_its_requests_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", 0.1)
    config = replace(CONFIG, limits=Limits(drain_s=0.2))
    async with service(tmp_path, "stubborn", config=config) as it:
        await it.ready()
        before, load = incarnations(it), Load(it)
        tell(it, Drain(("decode-0",)))
        await renewed(it, ("decode-0",), before)
        await load.end()


async def test_a_second_sigterm_ends_a_worker_at_once(tmp_path: Path) -> None:
    """It has requests that no one else can take: the first signal alone would let it finish them."""
    spots, config = (Spot("worker-0", "any", 1, ()),), replace(CONFIG, workers=(Workers(),), policy=Policy("aggregate"))
    async with service(tmp_path, "slow", config, spots) as it:
        await it.ready()
        before = incarnations(it)
        answer = asyncio.create_task(it.api.generate([1, 2, 3], TOKENS))
        await it.api.until(lambda: any(stream.received for stream in it.api.streams))
        os.kill(it.pid("worker-0"), signal.SIGTERM)
        await it.api.until(lambda: not it.api.client.ready)  # it has told that it leaves
        assert not answer.done()
        os.kill(it.pid("worker-0"), signal.SIGTERM)
        await renewed(it, ("worker-0",), before)
        assert await answer == expected([1, 2, 3], TOKENS)
        assert it.api.client.resumed == {"worker": 1}


# ------------------------------------------------------------------------------------------------------- settings


async def test_settings_that_are_read_again_hold_for_who_starts_from_then_on(tmp_path: Path) -> None:
    new = replace(CONFIG, targets=Targets(77.0, 7.0))
    async with service(tmp_path, reload=lambda: new) as it:
        await it.ready()
        before, first = incarnations(it), it.api.leads[-1]
        tell(it, Drain(("decode-0",), reload=True))
        await it.api.until(lambda: it.api.leads[-1] != first and it.whole())
        after = incarnations(it)
        assert before["prefill-0"] == after["prefill-0"], "was not named"
        assert before["decode-0"] < after["decode-0"] < after["coordinator"], "the coordinator comes last"
        assert read_config(tmp_path) == new
        assert await it.api.generate([1, 2], 5) == expected([1, 2], 5)


def unreadable() -> Config:
    raise ConfigError("a.toml: line 3: not valid TOML")


@pytest.mark.parametrize(
    ("reload", "why"),
    [
        (unreadable, "a.toml: line 3: not valid TOML"),
        (lambda: replace(CONFIG, kv=Kv(pages=77)), "[kv] pages has changed from 0 to 77"),
        (None, "this service was not started from a file"),
    ],
    ids=["unreadable", "of the start", "none"],
)
async def test_settings_that_cannot_be_used_change_nothing(
    tmp_path: Path, reload: object, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with service(tmp_path, reload=reload) as it:  # type: ignore[arg-type]
        await it.ready()
        before = incarnations(it)
        tell(it, Drain(("decode-0",), reload=True))
        tell(it, Drain(("prefill-0",)))  # read after the one that is refused
        await it.api.until(lambda: incarnations(it)["prefill-0"] > before["prefill-0"] and it.whole())
        after = incarnations(it)
        assert (after["decode-0"], after["coordinator"]) == (before["decode-0"], before["coordinator"])
        assert read_config(tmp_path) == CONFIG
    refusals = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert len(refusals) == 1
    assert refusals[0].startswith("the settings stay as they are") and why in refusals[0]


# --------------------------------------------------------------------------------------------- the whole service


class Standing:
    """A service with an api process of its own, which serves nobody; up to its end."""

    def __init__(self, folder: Path, model: str, config: Config = CONFIG) -> None:
        write_config(config, folder)
        self.view = View()
        self.supervisor = Supervisor(config, folder, Path(model), SPOTS, self.view, None, fake_command)
        self.run = asyncio.create_task(self.supervisor.run())

    async def ready(self) -> None:
        async with asyncio.timeout(30):
            await self.view.is_ready.wait()

    async def ended(self) -> dict[str, int | None]:
        """Exit statuses by name."""
        await asyncio.wait_for(self.run, 30)
        return {child.name: child.process.returncode for child in self.supervisor.children if child.process}


async def test_a_service_that_ends_lets_its_api_finish_first(tmp_path: Path) -> None:
    it = Standing(tmp_path, "good")
    await it.ready()
    it.supervisor.drain()
    assert await it.ended() == {"coordinator": 0, "prefill-0": 0, "decode-0": 0, "api": 0}
    assert it.view.stops == ["2 requests are running", ""]
    assert os.listdir(tmp_path) == ["config.json"]


async def test_the_second_signal_ends_it_now(tmp_path: Path) -> None:
    it = Standing(tmp_path, "slow")
    await it.ready()
    it.supervisor.drain()
    async with asyncio.timeout(20):
        while not it.view.stops:  # noqa: ASYNC110  # the view has no event
            await asyncio.sleep(0.01)
    assert not it.run.done(), "its api has requests to finish"
    it.supervisor.drain()
    statuses = set((await it.ended()).values())
    assert statuses <= {0, -signal.SIGKILL, 255}  # 255: asyncio's send_signal has looked first, and lost the status
    assert statuses != {0}
    assert it.view.stops[0] == "2 requests are running"


async def test_an_api_that_finishes_nothing_is_not_waited_for_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "PATIENCE_S", 0.1)
    it = Standing(tmp_path, "slow", replace(CONFIG, limits=Limits(drain_s=0.1)))
    await it.ready()
    it.supervisor.drain()
    await it.ended()


async def test_an_operator_drains_the_service_once_however_often_he_asks(tmp_path: Path) -> None:
    """By a client's mailbox: there is no api process that could finish anything, so it ends at once."""
    async with service(tmp_path) as it:
        await it.ready()
        for _ in range(3):
            tell(it, Drain())
        await asyncio.wait_for(it.run, 30)
        assert {child.process.returncode for child in it.supervisor.children if child.process} == {0}


async def test_a_service_that_cannot_start_says_so_and_not_that_it_stops(tmp_path: Path) -> None:
    it = Standing(tmp_path, "fails")
    with pytest.raises(ServiceFailed, match="there is no such model"):
        await it.ended()
    assert it.view.stops == []
