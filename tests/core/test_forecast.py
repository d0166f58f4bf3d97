"""What a worker foretells of its prompts, against the steps that its own pace then plans."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cbdisagg.core.cost import NOTHING, CostModel
from cbdisagg.core.forecast import forecast, prompts_before, prompts_s
from cbdisagg.core.member import UNSEEN_S, Member
from cbdisagg.core.pace import Pace, rows
from cbdisagg.core.policy import HOP_S, View, look
from cbdisagg.core.request import Request
from cbdisagg.core.residency import Residency
from cbdisagg.messages import (
    Address,
    Counters,
    Forecast,
    Generate,
    Load,
    PoolInfo,
    RequestId,
    Route,
    Sampling,
    Targets,
    WorkerInfo,
    pack,
)

ME = Address("any-0", 1, "")
COST = CostModel(0.002, 0.001, ((1, 0.01), (8, 0.011), (64, 0.06), (512, 0.5)), 1e-8, 1e-7, 0.0, 0.0, 1e9, 1e-4)
PACE = Pace(gamma=1.0, eta=0.0, token_budget=512, page_size=16)


def request(key: int, prompt: int, drawn: int, banked_s: float) -> Request:
    """A prompt that comes at 0, or with tokens `drawn` a stream whose next one is due in `banked_s`."""
    spec = Generate(
        RequestId(9, key),
        0,
        pack([1] * prompt),
        pack([2] * drawn),
        b"",
        b"",
        Sampling(10_000),
        Targets(100.0, 0.05),
        0.0,
    )
    made = Request(key, spec, Route(ME, ME), 0.0, 16, prompt + 10_000)
    if drawn:
        made.computed = made.planned = prompt + drawn - 1
        made.first_token = banked_s - drawn * 0.05
        made.last_token = 0.0
    return made


def take_steps(streams: list[Request], prompt: Request, cost: CostModel = COST) -> float:
    """Seconds until the prompt has been computed, by the steps of PACE."""
    now = 0.0
    while prompt.remaining:
        shares = PACE.shares(streams, [prompt], cost, now)
        count = shares.chunks.get(prompt.key, 0)
        step = rows(streams)
        now += cost.sums_s(step.chunk(prompt.planned, count) if count else step)
        prompt.planned += count
        prompt.passed = 0 if count else prompt.passed + 1
        for stream in streams:
            stream.tokens.append(2)
            stream.planned += 1
            stream.last_token = now
    return now


def foretold(streams: list[Request], tokens: int, starts: float = 0.0) -> float:
    known = forecast(COST, PACE, streams, streams, 0.0, starts)
    assert known.free_s == starts
    return known.free_s + prompts_s(known, tokens) + known.square_s * tokens**2


@given(st.integers(1, 512))
def test_alone_a_prompt_takes_a_step_of_its_length(tokens: int) -> None:
    """What lies between two powers of two is between their steps: where steps are bent, off by a part of the bend."""
    assert foretold([], tokens) == pytest.approx(COST.sums_s(NOTHING.chunk(0, tokens)), rel=0.16)
    assert foretold([], tokens, starts=0.3) == pytest.approx(0.3 + foretold([], tokens))


@given(st.integers(1, 2000), st.lists(st.floats(0.02, 3.0), min_size=1, max_size=6))
def test_beside_streams_it_takes_what_they_have_banked_and_then_what_they_leave(
    tokens: int, banked_s: list[float]
) -> None:
    streams = [request(n, 50, 100, each_s) for n, each_s in enumerate(banked_s)]
    ahead = foretold(streams, tokens)
    taken = take_steps(streams, request(99, tokens, 0, 0.0))
    assert ahead == pytest.approx(taken, rel=0.15, abs=0.06), "a step with prompts in it is never longer than a TPOT"


@given(st.integers(1, 600), st.lists(st.floats(-0.3, 0.3), max_size=3), st.floats(-0.3, 0.0))
def test_late_streams_come_first_until_they_have_caught_up(tokens: int, banked_s: list[float], latest_s: float) -> None:
    """Off by no more than a step of the TPOT: how far they are ahead when the first chunk comes is not looked at."""
    streams = [request(n, 50, 100, each_s) for n, each_s in enumerate([*banked_s, latest_s])]
    ahead = foretold(streams, tokens)
    taken = take_steps(streams, request(99, tokens, 0, 0.0))
    assert ahead == pytest.approx(taken, rel=0.15, abs=0.05)


def test_the_more_streams_have_banked_the_sooner_a_prompt_is_done() -> None:
    streams = [[request(n, 50, 100, banked_s) for n in range(12)] for banked_s in (0.05, 0.1, 0.2, 0.4, 3.0)]
    seconds = [foretold(each, 400) for each in streams]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > 1.3 * seconds[-1]


# ---------------------------------------------------------------------------------------- what is made of it


def seen(known: Forecast, *, heard_at: float = 10.0, queued: int = 0, streams: int = 0) -> View:
    return look(
        ME, "any", "any", known, heard_at + known.free_s, sequences=streams, unseen=0, streams=streams, max_batch=16,
        queued_tokens=queued, room=10_000, between_ends_s=1.0,
    )  # fmt: skip


def test_a_step_that_runs_is_waited_for_as_long_as_it_still_takes() -> None:
    view = seen(Forecast(free_s=0.4, token_s=0.001))
    waits = [view.ttft_s(100, 0, now) for now in (10.0, 10.1, 10.4, 12.0)]
    assert waits == pytest.approx([0.5, 0.4, 0.1 + HOP_S, 0.1 + HOP_S])


def test_what_a_first_token_takes_beside_steps_comes_on_top() -> None:
    known = forecast(replace(COST, first_s=0.006), PACE, (), (), 1.0, 1.0)
    without = replace(known, first_s=0.0)
    assert known.first_s == 0.006
    assert seen(known).ttft_s(100, 0, 10.0) == pytest.approx(seen(without).ttft_s(100, 0, 10.0) + 0.006)


def test_streams_take_step_after_step_unheard() -> None:
    view = seen(Forecast(step_s=0.02, free_s=0.01, token_s=0.001), streams=2)
    waits = [view.ttft_s(100, 0, now) for now in (10.0, 10.009, 10.0099, 10.015, 10.029, 10.035)]
    assert waits == pytest.approx([0.11, 0.101, 0.1201, 0.115, 0.101, 0.115]), "it comes too late for the next step"


def test_what_is_queued_shares_the_step() -> None:
    """Two short prompts in one step take little more than one."""
    known = replace(forecast(COST, PACE, [], [], 0.0, 0.0), free_s=0.01)
    one, two = seen(known).ttft_s(4, 0, 10.0), seen(known, queued=4).ttft_s(4, 0, 10.0)
    assert one < two < 1.1 * one


def test_what_is_queued_is_computed_while_nobody_tells_of_it() -> None:
    """100 tokens a second. A step that holds them all is not joined; of more than that, what is left counts."""
    known = Forecast(step_s=0.2, chunk=8, full_s=0.08, chunk_s=(0.01, 0.02, 0.04, 0.08), steady=8, token_s=0.01)
    found = [prompts_before(known, 8, 0.08, 10.0, 0, at) for at in (9.5, 10.0, 10.02, 10.07, 10.5)]
    assert [tokens for tokens, _ in found] == [8, 0, 0, 0, 0]
    assert [wait_s for _, wait_s in found] == pytest.approx([0.5, 0.08, 0.06, 0.01, 0.0])
    left = [prompts_before(known, 40, prompts_s(known, 40), 10.0, 0, at)[0] for at in (9.0, 10.0, 10.1, 10.3, 10.4)]
    assert left == pytest.approx([40, 40, 30, 10, 0], abs=1)
    (_, wait_s) = prompts_before(known, 8, 0.08, 10.0, 2, 10.13)
    assert wait_s == pytest.approx(0.15), "streams have gone on from the end of that step"


# ------------------------------------------------------------------------------------------ jobs on their way


def load(jobs: int, queued: int = 0) -> Load:
    return Load(False, 0, 0, 0, queued, 64, 64, 0, Counters(), jobs=jobs, forecast=Forecast(token_s=0.001))


@pytest.fixture
def member() -> Member:
    pool = PoolInfo(pid=1, fd=3, nonce="", scratch=0, offset=0, layers=1, pages=64, page_bytes=9, data_endpoint="")
    info = WorkerInfo(ME, "prefill", "host", "", pool, page_size=16, max_batch=8, max_len=4096)
    made = Member(info, 0.0, 0.0, Residency(64))
    made.hear(load(0), 0.0)
    return made


def queued(member: Member) -> int:
    view = member.view("any")
    assert view is not None
    return view.queued_tokens


def test_a_job_counts_until_the_worker_says_that_it_has_come(member: Member) -> None:
    member.expect(100, 0.0)
    member.expect(50, 0.0)
    assert queued(member) == 150
    member.hear(load(1, queued=100), 0.2)
    assert queued(member) == 150, "the first one is in the Load now, and only there"
    member.hear(load(1, queued=20), 0.3)
    assert queued(member) == 70
    member.hear(load(2), 0.4)
    assert queued(member) == 0


def test_a_job_that_never_comes_is_forgotten(member: Member) -> None:
    """Its request has ended, or its decode worker computes the prompt itself."""
    member.expect(100, 0.0)
    member.hear(load(0), UNSEEN_S / 2)
    assert queued(member) == 100
    member.hear(load(0), UNSEEN_S)
    assert queued(member) == 0
