"""Streams in the api process: one order of tokens, one end each, whatever the processes behind them do."""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cbdisagg.api.client import MAX_DEATHS, Client, RequestRejected, Stream, StreamFailed, Update
from cbdisagg.messages import (
    Accepted,
    Address,
    Cancel,
    Finish,
    Generate,
    Lead,
    Logprobs,
    Members,
    Message,
    PoolInfo,
    Rejected,
    RequestId,
    Sampling,
    Stats,
    Targets,
    TokenRun,
    Tokens,
    WorkerInfo,
    page_hashes,
    page_root,
    unpack,
)

API = Address("api", 7, "ipc://api")
COORDINATOR = Address("coordinator", 100, "ipc://coordinator")
SUPERVISOR = Address("supervisor", 1, "ipc://supervisor")
TARGETS = Targets(1.0, 0.05)
PROMPT = [5, 6, 7]


def worker(name: str, incarnation: int) -> Address:
    return Address(name, incarnation, f"ipc://{name}.{incarnation}")


def members(*workers: Address, term: int = 100, dead: tuple[tuple[str, int], ...] = (), apis: Any = (API,)) -> Members:
    pool = PoolInfo(1, 1, "", 0, 0, 1, 8, 64, "")
    infos = tuple(WorkerInfo(address, "any", "host", "f", pool, 16, 8, 512) for address in workers)
    return Members(term, tuple(apis), infos, (), dead)


D1, D2 = worker("d", 21), worker("d", 22)
E1 = worker("e", 31)


class Harness:
    """A client with everything it has told, in order."""

    def __init__(self, *workers: Address) -> None:
        self.told: list[tuple[Address, Message]] = []
        self.clock = 10.0
        self.client = Client(
            7, lambda to, message: self.told.append((to, message)), model="m", page_size=2, now=lambda: self.clock
        )
        if workers:
            self.client.receive(SUPERVISOR, Lead(COORDINATOR))
            self.client.receive(COORDINATOR, members(*workers))

    def submit(self, *, accepted_by: Address | None = None, **options: Any) -> Stream:
        stream = self.client.submit(PROMPT, Sampling(max_tokens=8, **options), TARGETS)
        if accepted_by is not None:
            self.client.receive(accepted_by, Accepted(stream.id, 0, accepted_by))
        self.told.clear()
        return stream

    def run(
        self, stream: Stream, index: int, *ids: int, sender: Address = D1, submission: int = 0, **rest: Any
    ) -> None:
        run = TokenRun(stream.id, submission, index, ids, **rest)
        self.client.receive(sender, Tokens((run,)))


async def read(stream: Stream) -> list[Update]:
    return [update async for update in stream]


def ready(stream: Stream) -> Update:
    """What a reader gets without waiting."""
    step = stream.__anext__()
    try:
        step.send(None)  # type: ignore[attr-defined]
    except StopIteration as result:
        update = result.value
        assert isinstance(update, Update)
        return update
    raise AssertionError("nothing to read")


# ------------------------------------------------------------------------------------------- submitting and reading


def test_a_request_carries_all_that_a_worker_needs() -> None:
    h = Harness(D1)
    stream = h.client.submit(
        PROMPT, Sampling(max_tokens=8, seed=3), TARGETS, salt="s", group=RequestId(7, 0), tenant="t", priority=-2
    )
    [(to, message)] = h.told
    root = page_root("m", "s")
    assert to == COORDINATOR
    assert isinstance(message, Generate)
    assert (message.id, message.submission, message.output, message.age_s) == (stream.id, 0, b"", 0.0)
    assert list(unpack(message.prompt)) == PROMPT
    assert (message.root, message.hashes) == (root, page_hashes(root, message.prompt, 2))
    assert (message.sampling, message.targets) == (Sampling(max_tokens=8, seed=3), TARGETS)
    assert (message.group, message.tenant, message.priority) == (RequestId(7, 0), "t", -2)
    assert message.first_age_s == -1.0, "nothing has come"
    assert page_root("m", "s") != page_root("m", "")
    assert h.client.submit(PROMPT, Sampling(max_tokens=8), TARGETS).id != stream.id


async def test_one_token_one_update_and_the_finish_in_the_last() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    reader = asyncio.create_task(read(stream))
    for n in range(3):
        await asyncio.sleep(0)
        h.run(stream, n, 10 + n, logprobs=(Logprobs(-0.5 * n),), finish=Finish("length") if n == 2 else None)
        await asyncio.sleep(0)
    updates = await reader
    assert [update.ids for update in updates] == [(10,), (11,), (12,)]
    assert [update.logprobs[0].logprob for update in updates] == [0, -0.5, -1.0]
    assert [update.finish for update in updates] == [None, None, Finish("length")]
    assert (stream.received, h.client.streams, h.told) == (3, 0, [])


async def test_a_reader_that_lags_gets_what_has_come_at_once() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    h.run(stream, 0, 10, prompt_logprobs=(None, Logprobs(-1.0), Logprobs(-2.0)), logprobs=(Logprobs(-3.0),))
    h.run(stream, 1, 11, 12, logprobs=(Logprobs(-4.0), Logprobs(-5.0)), finish=Finish("stop"))
    [update] = await read(stream)
    assert update.ids == (10, 11, 12)
    assert [entry.logprob for entry in update.logprobs] == [-3.0, -4.0, -5.0]
    assert update.prompt_logprobs == (None, Logprobs(-1.0), Logprobs(-2.0))
    assert update.finish == Finish("stop")


async def test_early_runs_wait_and_known_indices_are_dropped() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    h.run(stream, 2, 12, 13, logprobs=(Logprobs(-2.0), Logprobs(-3.0)))
    assert stream.received == 0
    h.run(stream, 5, 15, logprobs=(Logprobs(-5.0),), finish=Finish("length"))
    h.run(stream, 0, 10, logprobs=(Logprobs(-0.0),))
    h.run(stream, 0, 10, 11, 12, logprobs=(Logprobs(-0.0), Logprobs(-1.0), Logprobs(-2.0)))
    assert list(stream.output) == [10, 11, 12, 13]
    h.run(stream, 3, 13, 14, logprobs=(Logprobs(-3.0), Logprobs(-4.0)))
    [update] = await read(stream)
    assert update.ids == tuple(range(10, 16))
    assert [entry.logprob for entry in update.logprobs] == [0, -1, -2, -3, -4, -5]
    assert update.finish is not None


async def test_an_error_finish_and_rejections_are_raised_after_what_has_come() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    h.run(stream, 0, 10, finish=Finish("error", "no more pages"))
    assert (await anext(stream)).ids == (10,)
    with pytest.raises(StreamFailed, match="no more pages"):
        await anext(stream)
    refused = h.submit()
    h.client.receive(COORDINATOR, Rejected(refused.id, 0, 429, "full", 2.5))
    with pytest.raises(RequestRejected, match="full") as caught:
        await anext(refused)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 2.5)
    assert h.client.streams == 0


# -------------------------------------------------------------------------------------------------------- cancelling


def test_cancel_goes_to_the_coordinator_until_a_worker_has_accepted() -> None:
    h = Harness(D1)
    early, late = h.submit(), h.submit(accepted_by=D1)
    for stream in (early, late):
        stream.cancel("disconnect")
        stream.cancel("disconnect")
    assert h.told == [
        (COORDINATOR, Cancel(early.id, 0, "disconnect")),
        (D1, Cancel(late.id, 0, "disconnect")),
    ]
    assert h.client.streams == 0


async def test_a_cancelled_stream_ends_for_its_reader() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    reader = asyncio.create_task(read(stream))
    await asyncio.sleep(0)
    stream.cancel("stop")
    assert await reader == []


async def test_a_reader_that_ends_its_stream_where_a_token_comes_in_takes_none_from_others() -> None:
    """A stop string in what goes by express: the client is in the middle of a message then."""
    h = Harness(D1)
    stopped, other = h.submit(accepted_by=D1), h.submit(accepted_by=D1)

    def stop(update: Update) -> bool:
        stopped.cancel("stop")
        return True

    stopped.express = stop
    reader = asyncio.create_task(read(stopped))
    await asyncio.sleep(0)
    h.client.receive(D1, Tokens((TokenRun(stopped.id, 0, 0, (10,)), TokenRun(other.id, 0, 0, (20,)))))
    assert await reader == []
    assert ready(other).ids == (20,)
    assert h.told == [(D1, Cancel(stopped.id, 0, "stop"))]
    assert h.client.streams == 1


def test_what_belongs_to_no_stream_is_cancelled_at_its_sender() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    stream.cancel("stop")
    h.told.clear()
    h.run(stream, 0, 10)
    h.client.receive(D1, Accepted(RequestId(7, 99), 3, D1))
    assert h.told == [(D1, Cancel(stream.id, 0, "stale")), (D1, Cancel(RequestId(7, 99), 3, "stale"))]
    h.told.clear()
    h.run(stream, 1, 11, finish=Finish("stop"))  # it has ended there as well: nothing to say
    h.client.receive(COORDINATOR, Rejected(stream.id, 0, 503, "late"))
    assert h.told == []


def test_close_ends_all_streams() -> None:
    h = Harness(D1)
    running, waiting = h.submit(accepted_by=D1), h.submit()
    h.client.close("the service has ended")
    assert [to for to, _ in h.told] == [D1, COORDINATOR]
    for stream in (running, waiting, h.submit()):
        with pytest.raises(StreamFailed, match="has ended"):
            ready(stream)


# --------------------------------------------------------------------------------------------------- before the start


def test_before_a_coordinator_knows_us_requests_are_refused() -> None:
    h = Harness()
    for step in (None, Lead(COORDINATOR), members(D1, apis=())):
        if step is not None:
            h.client.receive(SUPERVISOR, step)
        stream = h.client.submit(PROMPT, Sampling(max_tokens=1), TARGETS)
        with pytest.raises(RequestRejected) as caught:
            ready(stream)
        assert caught.value.status == 503
        assert not h.client.ready
    assert h.told == []
    h.client.receive(COORDINATOR, members(D1))
    assert h.client.not_ready_reason == "the coordinator is taking up its work"
    h.client.receive(COORDINATOR, Stats((), (), {}, False, "no decode worker"))
    assert (h.client.ready, h.client.not_ready_reason) == (False, "no decode worker")
    h.client.receive(COORDINATOR, Stats((), (), {}, True, ""))
    assert (h.client.ready, h.client.not_ready_reason) == (True, "")


# ----------------------------------------------------------------------------------------------------- dying workers


@pytest.mark.parametrize(
    "news",
    [members(dead=(("d", 21),)), members(), members(D2), members(E1, D2, dead=(("d", 21),))],
    ids=["named dead", "no longer named", "succeeded", "all"],
)
async def test_a_stream_goes_on_when_its_worker_is_gone(news: Members) -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1, prompt_logprobs=0)
    h.clock += 1
    scores = (None, Logprobs(-1.0), Logprobs(-2.0))
    h.run(stream, 0, 10, 11, logprobs=(), prompt_logprobs=scores, cached_tokens=1)
    h.run(stream, 4, 99)  # early, and lost with its submission
    h.clock += 4
    h.client.receive(COORDINATOR, news)
    if not news.workers:
        assert h.told == [], "it waits for a worker"
        h.client.receive(COORDINATOR, members(D2, dead=news.dead))
    [(to, message)] = h.told
    assert to == COORDINATOR
    assert isinstance(message, Generate)
    assert (message.submission, list(unpack(message.output))) == (1, [10, 11])
    assert (message.age_s, message.first_age_s) == (5.0, 4.0), "it keeps its turn and its pace"
    assert message.sampling.prompt_logprobs == -1, "these have come; nobody computes them again"
    assert h.client.resumed == {"worker": 1}
    h.told.clear()
    h.run(stream, 2, 77)  # the old worker, still on its way
    assert h.told == []
    h.client.receive(D2, Accepted(stream.id, 1, D2))
    h.run(stream, 2, 12, 13, sender=D2, submission=1)
    h.run(stream, 4, 14, sender=D2, submission=1, finish=Finish("length"))
    [update] = await read(stream)
    assert update.ids == (10, 11, 12, 13, 14)
    assert update.prompt_logprobs == scores
    assert (update.finish, stream.cached_tokens) == (Finish("length"), 1)
    assert stream.received == 5


async def test_what_was_cached_is_told_by_whoever_gives_the_first_token() -> None:
    """A worker that dies before says nothing of it, and its successor may have more, or less, of the prompt."""
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    assert stream.cached_tokens is None
    h.client.receive(COORDINATOR, members(D2, dead=(("d", 21),)))
    h.run(stream, 0, 10, sender=D2, submission=1, cached_tokens=2)
    h.client.receive(COORDINATOR, members(E1, dead=(("d", 21), ("d", 22))))
    h.run(stream, 0, 10, 11, sender=E1, submission=2, cached_tokens=0)
    assert (stream.received, stream.cached_tokens) == (2, 2)


def test_prompt_logprobs_that_have_not_come_are_asked_for_again_and_given_once() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1, prompt_logprobs=0)
    h.client.receive(COORDINATOR, members(E1))
    message = h.told[-1][1]
    assert isinstance(message, Generate)
    assert message.sampling.prompt_logprobs == 0
    for index in (0, 1):
        h.run(stream, index, 10, sender=E1, submission=1, prompt_logprobs=(None, Logprobs(-1.0), Logprobs(-2.0)))
    assert len(ready(stream).prompt_logprobs) == 3


def test_other_workers_deaths_do_not_concern_a_stream_that_is_accepted() -> None:
    h = Harness(D1, E1)
    h.submit(accepted_by=D1)
    h.client.receive(COORDINATOR, members(D1, dead=(("e", 31),)))
    assert h.told == []


def test_a_stream_that_nobody_has_accepted_may_have_been_on_the_worker_that_died() -> None:
    h = Harness(D1, E1)
    h.submit()
    h.client.receive(COORDINATOR, members(E1))
    [(_, message)] = h.told
    assert isinstance(message, Generate)
    assert message.submission == 1
    h.told.clear()
    h.client.receive(COORDINATOR, members(E1))  # no new death, nothing to do
    assert h.told == []


def test_an_accept_that_comes_after_the_news_of_the_death() -> None:
    h = Harness(D1, E1)
    h.client.receive(COORDINATOR, members(E1))
    stream = h.submit()
    h.client.receive(D1, Accepted(stream.id, 0, D1))
    [(_, message)] = h.told
    assert isinstance(message, Generate)
    assert message.submission == 1


def test_a_request_that_kills_every_worker_fails() -> None:
    h = Harness(worker("d", 1))
    stream = h.submit(accepted_by=worker("d", 1))
    for n in range(MAX_DEATHS):
        h.client.receive(COORDINATOR, members(worker("d", n + 2)))
        h.client.receive(worker("d", n + 2), Accepted(stream.id, n + 1, worker("d", n + 2)))
    assert not stream.ended
    h.client.receive(COORDINATOR, members(worker("d", MAX_DEATHS + 2)))
    with pytest.raises(StreamFailed, match="have died"):
        ready(stream)
    assert h.client.streams == 0


def test_a_token_in_between_clears_the_account() -> None:
    h = Harness(worker("d", 1))
    stream = h.submit(accepted_by=worker("d", 1))
    for n in range(3 * MAX_DEATHS):
        h.run(stream, n, n, submission=n)
        h.client.receive(COORDINATOR, members(worker("d", n + 2)))
        h.client.receive(worker("d", n + 2), Accepted(stream.id, n + 1, worker("d", n + 2)))
    assert not stream.ended
    assert list(stream.output) == list(range(3 * MAX_DEATHS))


@pytest.mark.parametrize("status", [429, 503])
def test_a_resubmission_that_is_refused_waits_for_a_change(status: int) -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    h.client.receive(COORDINATOR, members(D2))
    h.told.clear()
    h.client.receive(COORDINATOR, Rejected(stream.id, 1, status, "not now"))
    assert h.told == []
    h.client.receive(COORDINATOR, Stats((), (), {}, True, ""))
    [(_, message)] = h.told
    assert isinstance(message, Generate)
    assert message.submission == 2


def test_a_resubmission_that_can_never_run_fails() -> None:
    h = Harness(D1)
    stream = h.submit(accepted_by=D1)
    h.run(stream, 0, 10)
    h.client.receive(COORDINATOR, members(D2))
    h.client.receive(COORDINATOR, Rejected(stream.id, 1, 400, "too long"))
    assert ready(stream).ids == (10,)
    with pytest.raises(StreamFailed, match="too long"):
        ready(stream)


# ----------------------------------------------------------------------------------------------------- coordinators


def test_a_new_coordinator_is_asked_for_what_nobody_has_answered() -> None:
    h = Harness(D1)
    running, waiting = h.submit(accepted_by=D1), h.submit()
    successor = Address("coordinator", 200, "ipc://coordinator.200")
    h.client.receive(SUPERVISOR, Lead(successor))
    assert not h.client.ready
    fresh = h.submit()
    assert h.told == [], "it does not know us yet and would drop it"
    h.client.receive(successor, members(term=200))
    assert h.told == [], "it knows no worker yet and would refuse"
    h.client.receive(successor, members(D1, term=200))
    assert [(to, message.id, message.submission) for to, message in h.told if isinstance(message, Generate)] == [
        (successor, waiting.id, 1),
        (successor, fresh.id, 1),
    ]
    assert h.client.resumed == {"coordinator": 1}
    h.told.clear()
    h.run(running, 0, 10)
    assert ready(running).ids == (10,), "a running stream does not notice"
    h.client.receive(SUPERVISOR, Lead(COORDINATOR))  # of an older one, late
    h.client.receive(COORDINATOR, members(D2, term=100))
    assert h.told == []
    running.cancel("stop")
    h.submit().cancel("stop")
    assert [to for to, _ in h.told] == [successor]


def test_the_terms_may_come_in_either_order() -> None:
    h = Harness(D1)
    waiting = h.submit()
    successor = Address("coordinator", 200, "ipc://coordinator.200")
    h.client.receive(successor, members(D1, term=200))
    h.client.receive(SUPERVISOR, Lead(successor))
    [(to, message)] = h.told
    assert (to, message.id) == (successor, waiting.id)  # type: ignore[union-attr]


def test_stats_of_an_older_coordinator_do_not_count() -> None:
    h = Harness(D1)
    successor = Address("coordinator", 200, "ipc://coordinator.200")
    h.client.receive(SUPERVISOR, Lead(successor))
    h.client.receive(successor, members(D1, term=200))
    h.client.receive(successor, Stats((), (), {}, True, ""))
    h.client.receive(COORDINATOR, Stats((), (), {}, False, "old"))
    assert h.client.ready


# ---------------------------------------------------------------------------------------------- any order of events

LENGTH = 6


def token(n: int, index: int) -> int:
    """What any worker computes for this stream at this place."""
    return 100 * n + index


@dataclass
class Node:
    """A worker: what it works on (the request and its next index), and what it has said that has not arrived."""

    address: Address
    work: dict[RequestId, tuple[Generate, int]] = field(default_factory=dict)
    outbox: deque[Message] = field(default_factory=deque)

    def accept(self, request: Generate) -> None:
        self.work[request.id] = (request, len(request.output) // 4)
        self.outbox.append(Accepted(request.id, request.submission, self.address))

    def step(self) -> None:
        runs = []
        for id, (request, index) in list(self.work.items()):
            finish = Finish("length") if index == LENGTH - 1 else None
            runs.append(TokenRun(id, request.submission, index, (token(id.n, index),), finish=finish))
            self.work[id] = (request, index + 1)
            if finish is not None:
                del self.work[id]
        if runs:
            self.outbox.append(Tokens(tuple(runs)))


class ClientMachine(RuleBasedStateMachine):
    """Workers and coordinators come and go, queues are delivered in any order: every stream gets its tokens once."""

    def __init__(self) -> None:
        super().__init__()
        self.client = Client(7, self.tell, model="m", page_size=2, now=lambda: 0.0)
        self.count = 100
        self.nodes: dict[int, Node] = {}
        self.dead: list[tuple[str, int]] = []
        self.ghosts: list[Node] = []
        self.coordinator = COORDINATOR
        self.asked: deque[Generate] = deque()
        self.news: deque[tuple[Address, Message]] = deque()
        self.streams: list[Stream] = []
        self.read: dict[RequestId, list[int]] = {}
        self.finished: set[RequestId] = set()
        self.cancelled: set[RequestId] = set()
        self.start_worker("d")
        self.client.receive(SUPERVISOR, Lead(COORDINATOR))
        self.deliver_all()

    def tell(self, to: Address, message: Message) -> None:
        if to == self.coordinator and isinstance(message, Generate):
            self.asked.append(message)
        elif isinstance(message, Cancel) and (node := self.nodes.get(to.incarnation)) is not None:
            held = node.work.get(message.id)
            if held is not None and held[0].submission <= message.submission:
                del node.work[message.id]

    def broadcast(self) -> None:
        workers = [node.address for node in self.nodes.values()]
        news = members(*workers, term=self.coordinator.incarnation, dead=tuple(self.dead))
        self.news.append((self.coordinator, news))

    @rule(name=st.sampled_from("de"))
    def start_worker(self, name: str) -> None:
        if any(node.address.name == name for node in self.nodes.values()):
            return
        self.count += 1
        self.nodes[self.count] = Node(worker(name, self.count))
        self.broadcast()

    @precondition(lambda self: self.nodes)
    @rule(data=st.data(), lost=st.booleans())
    def kill_worker(self, data: st.DataObject, lost: bool) -> None:
        """What it has said may still arrive, before the news of its death or long after."""
        node = self.nodes.pop(data.draw(st.sampled_from(sorted(self.nodes))))
        self.dead.append(node.address[:2])
        self.broadcast()
        if not lost:
            self.ghosts.append(node)

    @rule()
    def restart_coordinator(self) -> None:
        self.count += 1
        self.coordinator = Address("coordinator", self.count, f"ipc://coordinator.{self.count}")
        self.asked.clear()
        self.news.clear()
        self.news.append((SUPERVISOR, Lead(self.coordinator)))
        self.broadcast()

    @rule()
    def submit(self) -> None:
        if len(self.streams) < 4:
            self.streams.append(self.client.submit(PROMPT, Sampling(max_tokens=LENGTH), TARGETS))
            self.read[self.streams[-1].id] = []

    @rule(data=st.data(), refuse=st.booleans())
    def route(self, data: st.DataObject, refuse: bool) -> None:
        if not self.asked:
            return
        request = self.asked.popleft()
        if not self.nodes or (refuse and request.submission):
            self.news.append((self.coordinator, Rejected(request.id, request.submission, 503, "no worker")))
            self.news.append((self.coordinator, Stats((), (), {}, True, "")))
            return
        self.nodes[data.draw(st.sampled_from(sorted(self.nodes)))].accept(request)

    @precondition(lambda self: any(node.work for node in self.nodes.values()))
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from([node for node in self.nodes.values() if node.work])).step()

    @property
    def speakers(self) -> list[Node]:
        return [node for node in [*self.nodes.values(), *self.ghosts] if node.outbox]

    @precondition(lambda self: self.speakers)
    @rule(data=st.data())
    def deliver_from_worker(self, data: st.DataObject) -> None:
        node = data.draw(st.sampled_from(self.speakers))
        self.client.receive(node.address, node.outbox.popleft())  # type: ignore[arg-type]

    @precondition(lambda self: self.news)
    @rule()
    def deliver_news(self) -> None:
        sender, message = self.news.popleft()
        self.client.receive(sender, message)  # type: ignore[arg-type]

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        stream = data.draw(st.sampled_from(self.streams))
        if stream.id not in self.finished:
            stream.cancel("disconnect")
            self.cancelled.add(stream.id)

    @invariant()
    def every_stream_has_its_tokens_in_order(self) -> None:
        for stream in self.streams:
            assert list(stream.output) == [token(stream.id.n, index) for index in range(stream.received)]
            if stream._unread:
                update = ready(stream)
                self.read[stream.id] += update.ids
                if update.finish is not None:
                    self.finished.add(stream.id)

    def teardown(self) -> None:
        """With a worker and time to deliver, every stream comes to its end, and nobody works for one that has."""
        if not self.nodes:
            self.start_worker("d")
        for _ in range(40 * (LENGTH + 2)):
            self.deliver_all()
            self.every_stream_has_its_tokens_in_order()
        for stream in self.streams:
            if stream.id in self.cancelled:
                continue
            if stream._error is None:
                assert self.read[stream.id] == [token(stream.id.n, index) for index in range(LENGTH)]
                assert stream.id in self.finished
            else:
                assert isinstance(stream._error, RequestRejected) or stream.deaths > MAX_DEATHS
        assert not any(node.work for node in self.nodes.values())
        assert self.client.streams == 0

    def deliver_all(self) -> None:
        """One round: all news, all routes, one step of each worker, all it says."""
        while self.news:
            self.deliver_news()
        while self.asked and self.nodes:
            next(iter(self.nodes.values())).accept(self.asked.popleft())
        for node in self.nodes.values():
            node.step()
        for node in self.speakers:
            while node.outbox:
                self.client.receive(node.address, node.outbox.popleft())  # type: ignore[arg-type]


TestAnyOrder = ClientMachine.TestCase
TestAnyOrder.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
