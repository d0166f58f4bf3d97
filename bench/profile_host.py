"""What the host adds to steps: the time between two of them, and that for a message.

Knows one production WorkerCore and a runner that takes no time; nothing of the model. What is timed is what a worker
does between the end of a step and the start of the next: from the computing thread to the loop, the core, the tokens
encoded, and back to the thread.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np
from cbdisagg_bench.profile_fit import solve

from cbdisagg.actors.lane import Lane
from cbdisagg.config import Config
from cbdisagg.core.effects import RunStep, Tell
from cbdisagg.core.events import FromWorkerInbox, StepDone
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import (
    Address,
    Generate,
    Lead,
    Members,
    PoolInfo,
    RequestId,
    Route,
    Sampled,
    Sampling,
    StepResult,
    Submit,
    Targets,
    ToWorker,
    WorkerInfo,
    encode,
    pack,
    page_hashes,
    page_root,
)

PROMPT = 512
STEPS = 60
HOPS = 200


def measure_host(config: Config, batches: Sequence[int] = (1, 4, 16, 64)) -> tuple[float, float, float, float]:
    """`Host`'s event_s, step_s, token_s and request_s. The last is what the api does for a prompt of 512 tokens beside
    HTTP and text: hashes and the message.
    """
    sizes = [batch for batch in batches if batch <= config.scheduler.max_batch]
    decoder: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
    asked, events = [], []
    between: list[tuple[int, float]] = []
    for batch in sizes:
        worker = _Worker(config, batch)
        for n in range(batch):
            started = time.perf_counter()
            data = encode(worker.request(n))
            asked.append(time.perf_counter() - started)
            events.append(worker.take(data, decoder))
        worker.step()
        between += [worker.step() for _ in range(STEPS)]
    rows = np.array([[1.0, float(sequences)] for sequences, _ in between])
    step_s, token_s = solve(rows, np.array([seconds for _, seconds in between]))
    hop_s = asyncio.run(_hop_s())
    return statistics.median(events), step_s + hop_s, token_s, statistics.median(asked)


async def _hop_s() -> float:
    """From a computing thread to the loop and back."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[None] = loop.create_future()

    def fail(error: BaseException) -> None:
        loop.call_soon_threadsafe(done.set_exception, error)

    lane = Lane("hops", fail)
    times: list[float] = []

    def step() -> None:
        times.append(time.perf_counter())
        loop.call_soon_threadsafe(again)

    def again() -> None:
        if len(times) <= HOPS:
            lane.do(step)
        elif not done.done():
            done.set_result(None)

    lane.do(step)
    await done
    return statistics.median(after - before for before, after in pairwise(times))


class _Worker:
    """A core with its peers, whose steps are done as soon as they are asked for."""

    def __init__(self, config: Config, batch: int) -> None:
        self._me, self._api = Address("decode", 2, ""), Address("api", 1, "")
        coordinator = Address("coordinator", 3, "")
        size = config.kv.page_size
        pages = batch * -(-2 * PROMPT // size) + 1
        pool = PoolInfo(0, 0, "", 0, 0, 1, pages, 1, "")
        info = WorkerInfo(self._me, "any", "host", "", pool, size, config.scheduler.max_batch, 2 * PROMPT)
        self._core = WorkerCore(info, config)
        self._root, self._size = page_root("profile"), size
        self._now = 0.0
        self._plan: RunStep | None = None
        self._feed(FromWorkerInbox(coordinator, Lead(coordinator)))
        self._feed(FromWorkerInbox(coordinator, Members(3, (self._api,), (info,), (), ())))

    def request(self, n: int) -> Submit:
        prompt = pack(range(1000 * n, 1000 * n + PROMPT))
        hashes = page_hashes(self._root, prompt, self._size)
        id, sampling = RequestId(self._api.incarnation, n), Sampling(max_tokens=PROMPT)
        generate = Generate(id, 0, prompt, b"", self._root, hashes, sampling, Targets(1.0, 0.05), 0.0)
        return Submit(generate, Route(self._me, self._me), 3)

    def take(self, data: bytes, decoder: msgspec.msgpack.Decoder[ToWorker]) -> float:
        """Seconds to take in one request."""
        started = time.perf_counter()
        self._feed(FromWorkerInbox(self._me, decoder.decode(data)))
        return time.perf_counter() - started

    def step(self) -> tuple[int, float]:
        """Sequences in a step, and seconds from its end until the next can start."""
        assert self._plan is not None
        plan, self._plan = self._plan.plan, None
        self._now += 0.01
        result = StepResult(plan.number, tuple(Sampled((7,) * piece.draws) for piece in plan.slices), 0.01)
        started = time.perf_counter()
        self._feed(StepDone(result))
        return len(plan.slices), time.perf_counter() - started

    def _feed(self, event: FromWorkerInbox | StepDone) -> None:
        for effect in self._core.handle(event, self._now):
            if isinstance(effect, RunStep):
                self._plan = effect
            elif isinstance(effect, Tell):
                encode(effect.message)
