"""What a service adds to its workers' steps: measured on one with a single worker, as its clients see it.

Knows three loads, each too small to wait: single prompts, one stream, several streams. The first token of a prompt
comes later than its step takes: that is `first_s`. What processes compute that are no workers (coordinator, api, the
clients of this benchmark) is divided among requests, tokens, and the messages that bring them; each step sends one.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import numpy as np
import psutil
from cbdisagg_bench.faults_processes import Processes
from cbdisagg_bench.load_asks import Ask, fill
from cbdisagg_bench.load_client import Answer
from cbdisagg_bench.load_client import run as send
from cbdisagg_bench.profile_fit import solve
from cbdisagg_bench.service import Service, ServiceFailed, running
from msgspec.structs import replace
from prometheus_client.parser import text_string_to_metric_families
from rich.progress import Progress

from cbdisagg.config import Config, Workers
from cbdisagg.core.cost import CostModel, Work
from cbdisagg.core.profile import Host
from cbdisagg.load import print_config
from cbdisagg.sim import workload

NAME = "profiled"
PROMPTS, PROMPT = 30, 32
"""Prompts, and their tokens (few: what is looked for is what a step does not take)."""
APART_S, APART_STEPS = 0.2, 3
"""Between two of them: so long, and as long as so many of their steps, that each is alone on a slow machine too."""
ONE, FEW = (1, 300), (8, 150)
"""Streams at once, and tokens of each."""
IDLE_S = 2.0
IDS = 200
"""Ids below this are tokens of every model."""
STEPS = "cbdisagg:step_model_error_ratio_count"


@dataclass(frozen=True, slots=True)
class Live:
    """As `Profile` and `Host` name them. `first_s`: beside a step, and what the simulator counts by itself."""

    first_s: float
    message_s: float
    token_s: float
    request_s: float


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one load: seconds of processors in all that is no worker, less what an idle service takes."""

    steps: float
    tokens: int
    requests: int
    seconds: float


async def measure_live(config: Config, worker: Workers, cost: CostModel, host: Host, bar: Progress) -> Live:
    """`cost`, `host`: of such a worker. Of the config only what its steps depend on counts: who may ask for what, pins
    and keys are those of another service. Raises ServiceFailed.
    """
    alone_s = cost.step_s([Work(0, PROMPT, False)]) + host.step_s + host.token_s
    apart_s = max(APART_S, APART_STEPS * alone_s)
    model = replace(config.model, served_name=NAME, max_len=0)
    alone = Config(model=model, workers=(worker,), kv=config.kv, scheduler=config.scheduler)
    with tempfile.TemporaryDirectory() as place:
        file = Path(place) / "config.toml"
        file.write_text(print_config(alone), encoding="utf-8")
        async with running(NAME, ("--config", str(file)), Path(place) / "stderr") as service:
            others = Others(service)
            await others.load(_prompts(4, 0.0, 16), 0, bar)  # the first requests warm up
            before = others.seconds()
            await asyncio.sleep(IDLE_S)
            others.idle = (others.seconds() - before) / IDLE_S
            firsts, single = await others.load(_prompts(PROMPTS, apart_s, 1), 1, bar)
            _, one = await others.load(_streams(*ONE), 2, bar)
            _, few = await others.load(_streams(*FEW), 3, bar)
    late = [answer.times[0] - answer.arrived for answer in firsts]
    message_s, token_s, request_s = divided((single, one, few))
    return Live(max(0.0, statistics.median(late) - alone_s), message_s, token_s, request_s)


def divided(loads: Sequence[Spent]) -> tuple[float, float, float]:
    """Seconds for each message with tokens, each token, each request."""
    rows = np.array([[load.steps, load.tokens, load.requests] for load in loads])
    message_s, token_s, request_s = solve(rows, np.array([max(load.seconds, 1e-3) for load in loads]))
    return message_s, token_s, request_s


def _prompts(count: int, apart_s: float, outputs: int) -> list[workload.Ask]:
    return [workload.Ask(apart_s * (n + 1), outputs, PROMPT) for n in range(count)]


def _streams(count: int, tokens: int) -> list[workload.Ask]:
    return [workload.Ask(0.0, tokens, PROMPT)] * count


class Others:
    """The processes beside a service's workers, this one included. `idle`: what they compute for nobody, a second."""

    def __init__(self, service: Service) -> None:
        self._url = service.url
        supervisor = psutil.Process(service.pid)
        found = Processes(supervisor).look().values()
        self._processes = [supervisor, psutil.Process(), *(each.system for each in found if not each.computes)]
        self.idle = 0.0

    async def load(self, asks: Sequence[workload.Ask], seed: int, bar: Progress) -> tuple[list[Answer], Spent]:
        sent: list[Ask] = fill(asks, IDS, seed)
        steps, before = await self._steps(), self.seconds()
        answers, seconds = await send(self._url, NAME, sent, len(sent), bar)
        spent = self.seconds() - before - self.idle * seconds
        problem = next((answer.error for answer in answers if answer.error), "")
        if problem:
            raise ServiceFailed(f"a request to the service {NAME} failed: {problem}")
        tokens = sum(answer.tokens for answer in answers)
        return answers, Spent(await self._steps() - steps, tokens, len(answers), spent)

    def seconds(self) -> float:
        times = [process.cpu_times() for process in self._processes]
        return float(sum(each.user + each.system for each in times))

    async def _steps(self) -> float:
        async with aiohttp.ClientSession() as session, session.get(f"{self._url}/metrics") as response:
            families = text_string_to_metric_families(await response.text())
            return sum(sample.value for family in families for sample in family.samples if sample.name == STEPS)
