"""The service under test at rest: what it says of itself, and whether everything that was taken is free again.

Knows /metrics, /ready, /tokenize and the process table. Counts as leaked: pages that are held with no request there,
pages that the service itself has found lost, descriptors that only grow, processes, shared memory and run folders that
outlive it.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
from cbdisagg_bench.faults_journal import Journals
from cbdisagg_bench.faults_load import WORDS, Room
from cbdisagg_bench.faults_processes import Processes, open_files, shared_memory

RECOVERY_S = 90.0
"""After the last fault, everything is up and idle before so much time has passed."""
TOLD_S = 1.5
"""Workers tell their load within this time of a change."""
LOOK_S = 0.1
FEW_FILES = 12
"""Open descriptors may differ by so many between two looks: of connections that are just closing, or being tried. Those
of an api went up and down by seven while a hundred workers died; a leak goes up only, and there are more faults."""


@dataclass(frozen=True, slots=True)
class Scrape:
    """One reading of /metrics. Keys are as they are written: `name{label="value"}`."""

    values: dict[str, float]

    def of(self, name: str) -> dict[str, float]:
        """All series of a name, by their labels as they are written; "" if it has none."""
        found = {}
        for key, value in self.values.items():
            base, _, labels = key.partition("{")
            if base == f"cbdisagg:{name}":
                found[labels.rstrip("}")] = value
        return found

    def total(self, name: str) -> float:
        return sum(self.of(name).values())


@dataclass
class Rest:
    """Looks at one service between the faults. `leaked` grows by a line for each thing that was not given back."""

    url: str
    processes: Processes
    journals: Journals
    leaked: list[str] = field(default_factory=list)
    _memory: set[str] = field(default_factory=shared_memory)
    _files: dict[str, int] = field(default_factory=dict)
    _leaks_told: float = 0.0

    async def scrape(self) -> Scrape:
        async with _one_request() as session, session.get(f"{self.url}/metrics") as response:
            lines = (await response.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return Scrape({key: float(value) for key, value in pairs})

    async def room(self) -> tuple[str, Room]:
        """The served model's name, and what a request may be."""
        async with _one_request() as session:
            async with session.get(f"{self.url}/v1/models") as response:
                model = (await response.json())["data"][0]
            async with session.post(f"{self.url}/tokenize", json={"prompt": " ".join(WORDS)}) as response:
                count = (await response.json())["count"]
        return model["id"], Room(model["max_model_len"], count / len(WORDS))

    async def settle(self, what: str) -> None:
        """Wait until all processes are up, nothing runs and no page is held; then compare with the time before."""
        deadline = time.monotonic() + RECOVERY_S
        since, wrong = time.monotonic(), "nothing is known of it"
        while time.monotonic() < deadline and (wrong or time.monotonic() - since < TOLD_S):
            await asyncio.sleep(LOOK_S)
            try:
                wrong = await self._unsettled()
            except (aiohttp.ClientError, OSError) as error:
                wrong = f"{type(error).__name__}: {error}"
            since = time.monotonic() if wrong else since
        if wrong:
            self.leaked.append(f"{what}: {RECOVERY_S:.0f} s after the last request {wrong}")
        leaks = (await self.scrape()).total("kv_page_leaks_total")
        if leaks > self._leaks_told:
            self.leaked.append(f"{what}: kv_page_leaks_total has grown by {leaks - self._leaks_told:.0f}")
            self._leaks_told = leaks
        self._count_files(what)

    async def _unsettled(self) -> str:
        running, up = self.processes.look(), self.processes.up(self.journals.living)
        missing = sorted(set(self.processes.names) - {it.name for it in up} - {"api"})
        if missing or "api" not in running:
            return f"{', '.join(missing) or 'api'} is not up"
        scrape = await self.scrape()
        for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
            busy = [f"{labels} {value:.3f}" for labels, value in scrape.of(name).items() if value]
            if busy:
                return f"{name} is not 0: {'; '.join(busy)}"
        workers = sum(it.computes for it in up)
        if len(scrape.of("kv_cache_usage_perc")) != workers:
            return f"/metrics tells of {len(scrape.of('kv_cache_usage_perc'))} of {workers} workers"
        async with _one_request() as session, session.get(f"{self.url}/ready") as response:
            return "" if response.status == 200 else f"/ready says {response.status}: {(await response.text())[:200]}"

    def _count_files(self, what: str) -> None:
        """Only those who are never struck live long enough to gather any."""
        stable = {"supervisor": self.processes.supervisor}
        stable |= {it.name: it.system for it in self.processes.look().values() if it.role == "api"}
        for name, process in stable.items():
            files = open_files(process)
            before = self._files.setdefault(name, files)
            if files > before + FEW_FILES:
                self.leaked.append(f"{what}: {name} has {files} open files, {before} at the beginning")
                self._files[name] = files

    def after_the_end(self, folder: Path) -> None:
        """The service has ended: nothing of it may be left. `folder`: where its run folder was."""
        self.leaked += [f"still running: {name}" for name in self.processes.outlived(10.0)]
        self.leaked += [f"/dev/shm/{name}" for name in sorted(shared_memory() - self._memory)]
        self.leaked += [str(path) for path in sorted(folder.glob("*cbdisagg-*"))]


def _one_request() -> aiohttp.ClientSession:
    """One request each: no connection of ours stays open while descriptors are counted."""
    return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30), headers={"Connection": "close"})
