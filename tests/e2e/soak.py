"""A long load of short requests, and whether anything grows with their number: memory, descriptors, threads.

    python tests/e2e/soak.py --requests 20000

starts two prefill and two decode workers of a tiny model on this machine and prints one line a round: each process's
anonymous memory (RssAnon + VmSwap, MiB), descriptors and threads, taken when nothing runs. Of every hundred requests
five are cancelled by their client and one is refused; lengths are mixed, and a third of the prompts share a prefix.
The last line is the verdict; exit status 1 if something grew.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import linear_regression

import aiohttp
import psutil

sys.path.insert(0, str(Path(__file__).parent))
from tiny_service import VOCAB, Running, make_model, settings, short_folder, started

CLIENTS = 12
ROUNDS = 20
WARM_UP = 6
"""Rounds that do not count: caches fill, allocators take what they will keep."""
GROWS_MIB = 0.5
"""Per round and process: more than this is growth."""
MORE = CLIENTS + 2
"""Descriptors or threads: what clients keep open differs from round to round, and that is not growth."""
CANCELLED, REFUSED = 0.05, 0.01
REPORTED_S = 1.0
"""How long it takes, at most, until /metrics shows what workers do."""


@dataclass(frozen=True)
class Sample:
    """One process when nothing runs."""

    mib: float
    descriptors: int
    threads: int


def sample(process: psutil.Process) -> Sample:
    status = Path(f"/proc/{process.pid}/status").read_text()
    kib = sum(int(value) for value in re.findall(r"^(?:RssAnon|VmSwap):\s+(\d+)", status, re.MULTILINE))
    return Sample(kib / 1024, process.num_fds(), process.num_threads())


class Load:
    """Requests drawn by `seed`; the outcome of each is counted, and any but the expected ones is an error."""

    def __init__(self, url: str, session: aiohttp.ClientSession, seed: int) -> None:
        self._url, self._session, self._random = url, session, random.Random(seed)
        self.outcomes: Counter[str] = Counter()

    async def run(self, count: int) -> None:
        """So many, CLIENTS at a time."""
        left = iter(range(count))
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._client(left))

    async def until_idle(self) -> None:
        quiet_since = time.monotonic()
        while time.monotonic() - quiet_since < REPORTED_S:
            async with self._session.get(f"{self._url}/metrics") as response:
                text = await response.text()
            gauges = re.findall(r"^cbdisagg:(?:num_requests_\w+|kv_cache_usage_perc)\{.*\} (\S+)$", text, re.MULTILINE)
            if not gauges or any(float(value) for value in gauges):
                quiet_since = time.monotonic()
            await asyncio.sleep(0.05)
        assert not re.search(r"^cbdisagg:kv_page_leaks_total\S* [^0]", text, re.MULTILINE), "a page has leaked"

    async def _client(self, left: Sequence[int]) -> None:
        for _ in left:
            luck = self._random.random()
            prompt = self._random.choices(range(3, VOCAB), k=int(self._random.triangular(1, 300, 20)))
            if self._random.random() < 1 / 3:
                prompt[:0] = range(10, 90)
            body = {"prompt": prompt, "max_tokens": self._random.randint(1, 40), "ignore_eos": True, "stream": True}
            if self._random.random() < 0.5:
                body["temperature"] = 0
            if luck < REFUSED:
                body["top_p"] = 7
            await self._ask(body, expected="refused" if luck < REFUSED else "", cuts=luck > 1 - CANCELLED)

    async def _ask(self, body: dict[str, object], expected: str, cuts: bool) -> None:
        outcome, tokens = "", 0
        patience = self._random.randint(0, 5)
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                outcome = "refused" if response.status == 400 else f"HTTP {response.status}"
            async for line in response.content:
                if line.startswith(b"data: {"):
                    choice = json.loads(line[6:])["choices"][0]
                    tokens += 1
                    outcome = choice["finish_reason"] or outcome
                    if cuts and tokens > patience:
                        response.close()
                        outcome = "cancelled"
                        break
        wanted = expected or ("cancelled" if outcome == "cancelled" else "length")
        if outcome != wanted:
            raise AssertionError(f"{outcome or 'no end'} instead of {wanted}")
        self.outcomes[outcome] += 1


@dataclass
class Report:
    """Samples of each process by its name, one a round."""

    samples: dict[str, list[Sample]]
    outcomes: Counter[str]
    seconds: float

    @property
    def growths(self) -> list[str]:
        """What grew, in words."""
        found = []
        for name, samples in self.samples.items():
            counted = samples[WARM_UP:]
            slope = linear_regression(range(len(counted)), [it.mib for it in counted]).slope
            if slope > GROWS_MIB:
                found.append(f"{name}: {slope:.2f} MiB of memory a round")
            for what in ("descriptors", "threads"):
                more = getattr(counted[-1], what) - getattr(counted[0], what)
                if more > MORE:
                    found.append(f"{name}: {more} {what} more")
        return found


async def soak(it: Running, requests: int, seed: int = 0, told: bool = True) -> Report:
    """Load a running service. Raises AssertionError if a request ends as it should not, or a page leaks."""
    names = {process.pid: _name(process) for process in it.family}
    samples: dict[str, list[Sample]] = {name: [] for name in names.values()}
    began = time.monotonic()
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Load(it.url, session, seed)
        for round_ in range(ROUNDS):
            await load.run(requests // ROUNDS)
            await load.until_idle()
            for process in it.family:
                samples[names[process.pid]].append(sample(process))
            if told:
                now = {name: each[-1] for name, each in samples.items()}
                cells = (f"{name} {s.mib:.1f}/{s.descriptors}/{s.threads}" for name, s in now.items())
                print(
                    f"{(round_ + 1) * (requests // ROUNDS):6d}  {time.monotonic() - began:5.0f} s ", *cells, flush=True
                )
    root = psutil.Process(it.process.pid)
    assert {root, *root.children(recursive=True)} == set(it.family), "a process has been replaced"
    return Report(samples, load.outcomes, time.monotonic() - began)


def _name(process: psutil.Process) -> str:
    """prefill-0, api, ...: the start file's; the supervisor has none."""
    words = process.cmdline()
    return Path(words[-1]).name.partition(".")[0] if "--start" in words else "supervisor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kind", choices=["auto", "shm", "zmq"], default="auto", help="how KV moves")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as home, short_folder() as folder:
        model, config = make_model(Path(home)), Path(home) / "2p2d.toml"
        config.write_text(settings(2, 2, pages=512, kind=options.kind, invariants=False))
        with started(model, config, folder) as it:
            report = asyncio.run(soak(it, options.requests, options.seed))
            assert it.end(signal.SIGTERM) == 0
        assert not os.listdir(folder)
    print(f"{options.requests} requests in {report.seconds:.0f} s: {dict(report.outcomes)}")
    print("; ".join(report.growths) or "flat")
    sys.exit(bool(report.growths))


if __name__ == "__main__":
    main()
