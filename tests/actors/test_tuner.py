"""The tuner's process: a question goes to a child and comes back as a Steer; a child that fails is only a line."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from cbdisagg.actors import tuner
from cbdisagg.actors.local import LocalMailbox, Network
from cbdisagg.config import Config, Kv, Policy, ProfileFile, Scheduler, Workers
from cbdisagg.core.knobs import configured
from cbdisagg.core.profile import Profile, parse_profile
from cbdisagg.messages import Finished, Generate, Rejected, RequestId, Sampling, Steer, Targets, pack
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.online import Answer, History, Question

PATH = Path(__file__).parents[2] / "configs" / "profiles" / "h200-llama3.1-8b.json"
H200 = parse_profile(PATH.read_bytes(), PATH.name)
SERVICE = Config(
    workers=(Workers(role="any", count=2),),
    kv=Kv(page_size=64, pages=2000),
    scheduler=Scheduler(max_batch=16),
    policy=Policy(tuner=True),
)


def question(profile: Profile) -> Question:
    asks = make_workload(20, 20.0, Lengths(200), Lengths(3), 0)
    return Question(SERVICE, profile, tuple(asks), configured(SERVICE), most=1)


async def test_a_child_answers() -> None:
    found = await tuner.ask(question(H200))
    assert found is not None and found.gain >= 0.0


async def test_a_child_that_fails_is_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    tiny = msgspec.structs.replace(H200, kv_bytes=1 << 40)  # no request fits the pool of a worker
    small = msgspec.structs.replace(question(tiny), config=msgspec.structs.replace(SERVICE, kv=Kv(memory_mb=1)))
    with caplog.at_level(logging.WARNING):
        assert await tuner.ask(small) is None
    assert "tuning failed with status 1: [kv] memory_mb = 1 holds less than two pages" in caplog.text


async def test_enough_requests_bring_a_question_and_a_gain_a_steer(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Question] = []
    steered: asyncio.Queue[Steer] = asyncio.Queue()
    better = msgspec.structs.replace(configured(SERVICE), rho=0.5)

    async def answer(question: Question) -> Answer:
        asked.append(question)
        return Answer(better, 0.2)

    monkeypatch.setattr(tuner, "ask", answer)
    made = tuner.Tuner(SERVICE, H200, steered.put_nowait, History(window=2))
    running = asyncio.ensure_future(made.run())
    for n in range(2):
        ids, targets = pack(range(5)), Targets(10.0, 1.0)
        made.hear(Generate(RequestId(1, n), 0, ids, b"", b"", b"", Sampling(max_tokens=9), targets, 0.0))
        made.hear(Finished(RequestId(1, n), 0, 4))
    told = await steered.get()
    assert told.knobs == better and "20% more" in told.reason
    assert [ask.output_tokens for ask in asked[0].asks] == [4, 4] and asked[0].knobs == configured(SERVICE)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_new_knobs_are_judged_by_what_ends_after_the_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests end while the search goes on, enough for a judgement, and in time: that is the old knobs' merit."""
    steered: asyncio.Queue[Steer] = asyncio.Queue()
    numbers = iter(range(100))

    def end_two(in_time: bool) -> None:
        for _ in range(2):
            id, patience = RequestId(1, next(numbers)), 10.0 if in_time else -1.0
            targets = Targets(patience, 0.0)
            made.hear(Generate(id, 0, pack(range(5)), b"", b"", b"", Sampling(max_tokens=9), targets, 0.0))
            made.hear(Finished(id, 0, 4))

    async def answer(question: Question) -> Answer:
        if question.knobs == configured(SERVICE):
            end_two(in_time=True)
        return Answer(msgspec.structs.replace(configured(SERVICE), rho=0.5), 0.2)

    monkeypatch.setattr(tuner, "ask", answer)
    made = tuner.Tuner(SERVICE, H200, steered.put_nowait, History(window=2))
    running = asyncio.ensure_future(made.run())
    end_two(in_time=True)
    assert (await steered.get()).knobs.rho == 0.5
    for _ in range(10):
        await asyncio.sleep(0)
    end_two(in_time=False)
    assert (await asyncio.wait_for(steered.get(), 10)).knobs == configured(SERVICE)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


def test_what_is_told_is_heard_and_sent_on() -> None:
    heard: list[object] = []
    received: list[object] = []
    network = Network()
    api = LocalMailbox("api", 3, network, msgspec.msgpack.Decoder(Rejected))
    api.start(lambda sender, message: received.append(message), lambda peer, reason: None)
    coordinator = LocalMailbox("coordinator", 4, network, msgspec.msgpack.Decoder(Steer))
    refusal = Rejected(RequestId(3, 0), 0, 429, "late")
    tuner.Heard(coordinator, heard.append).tell(api.address, refusal)
    network.deliver()
    assert heard == received == [refusal]


def test_without_a_profile_it_says_so_and_nothing_else(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    assert tuner.make_tuner(SERVICE, lambda message: None) is None
    assert "[profile] path" in caplog.text
    missing = msgspec.structs.replace(SERVICE, profile=ProfileFile(path=str(tmp_path / "none.json")))
    assert tuner.make_tuner(missing, lambda message: None) is None and "none.json" in caplog.text
    there = msgspec.structs.replace(SERVICE, profile=ProfileFile(path=str(PATH)))
    assert tuner.make_tuner(there, lambda message: None) is not None
