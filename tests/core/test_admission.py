"""What waits at the door of a worker, and what must not wait behind it."""

from __future__ import annotations

from collections.abc import Sequence

from cbdisagg.config import Config, Kv
from cbdisagg.core.effects import RunStep, Tell
from cbdisagg.core.events import FromWorkerInbox, StepDone, Verified, WorkerEvent
from cbdisagg.core.invariants import check_worker
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import (
    Address,
    AttemptId,
    Generate,
    Lead,
    Members,
    Message,
    PoolInfo,
    Prefill,
    PushStopped,
    RequestId,
    Route,
    Sampled,
    Sampling,
    StepResult,
    Submit,
    Targets,
    WorkerInfo,
    pack,
    page_hashes,
    page_root,
)

PAGE, PAGES = 4, 4
ROOT = page_root("a model")
COORDINATOR, API = Address("coordinator", 1, ""), Address("api", 2, "")
ME, PEER = Address("any-0", 3, ""), Address("any-1", 4, "")


def info(address: Address) -> WorkerInfo:
    pool = PoolInfo(1, 1, "", 0, 0, layers=1, pages=PAGES, page_bytes=64, data_endpoint="")
    return WorkerInfo(address, "any", "here", "alike", pool, PAGE, 8, PAGE * PAGES)


class Worker:
    """A core that has met a peer which can push to it; a step draws nothing but zeros."""

    def __init__(self) -> None:
        self.core = WorkerCore(info(ME), Config(kv=Kv(page_size=PAGE)))
        self.told: list[Message] = []
        self.receive(COORDINATOR, Lead(COORDINATOR))
        self.receive(COORDINATOR, Members(1, (API,), (info(ME), info(PEER)), (), ()))
        self.handle(Verified(PEER, "shm", 1e9, ""))

    def handle(self, event: WorkerEvent) -> None:
        effects = self.core.handle(event, 0.0)
        check_worker(self.core)
        self.told += [effect.message for effect in effects if isinstance(effect, Tell)]
        for effect in effects:
            if isinstance(effect, RunStep):
                drawn = tuple(Sampled((0,) * part.draws) for part in effect.plan.slices)
                self.handle(StepDone(StepResult(effect.plan.number, drawn, 0.01)))

    def receive(self, sender: Address, message: object) -> None:
        self.handle(FromWorkerInbox(sender, message))  # type: ignore[arg-type]

    def submit(self, request: Generate, prefill: Address) -> None:
        self.receive(COORDINATOR, Submit(request, Route(prefill, ME), 1))


def request(n: int, prompt: Sequence[int]) -> Generate:
    ids = pack(prompt)
    hashes = page_hashes(ROOT, ids, PAGE)
    return Generate(
        RequestId(API.incarnation, n), 0, ids, b"", ROOT, hashes, Sampling(max_tokens=1), Targets(1.0, 0.1), 0.0
    )


def test_a_cached_prefix_does_not_count_as_room_for_what_follows_it() -> None:
    """Two pages are cached and two reserved: a request whose hit are the cached ones has no page left. It waits for the
    peer, so a job of that peer, which has no room either, must be declined: else both workers wait for each other.
    """
    worker = Worker()
    prefix = [1] * (2 * PAGE)
    worker.submit(request(0, prefix), prefill=ME)
    worker.submit(request(1, [2] * (2 * PAGE)), prefill=PEER)
    assert (len(worker.core.pages.cached), worker.core.pages.available()) == (2, 2)

    worker.submit(request(2, prefix + [3] * PAGE), prefill=ME)
    attempt = AttemptId(PEER.incarnation, RequestId(API.incarnation, 3), 1)
    job = request(3, [4] * (3 * PAGE))
    worker.receive(PEER, Prefill(attempt, job, 0, pack([0, 1, 2])))

    assert PushStopped(attempt, "declined") in worker.told
