"""Chunks from deadlines: in time if that can be predicted, priced if that is asked for, and nobody starves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cbdisagg.core.cost import NOTHING, CostModel
from cbdisagg.core.pace import LATE_GAP, PATIENCE, Pace, Shares, prefill_s, rows, token_s
from cbdisagg.core.request import Request
from cbdisagg.messages import Address, Generate, RequestId, Route, Sampling, Targets, pack

ME = Address("any-0", 1, "")
COST = CostModel(0.002, 0.004, ((1, 0.01), (64, 0.012), (512, 0.05)), 1e-8, 1e-7, 0.0, 0.0, 1e9, 1e-4)
PACE = Pace(gamma=1.0, eta=0.0, token_budget=512, page_size=16)
NOW = 100.0


def request(
    key: int,
    prompt: int,
    *,
    drawn: int = 0,
    age: float = 0,
    first_age: float = 0,
    tpot_s: float = 0.05,
    most: int = 1000,
) -> Request:
    """A prompt of so many tokens, or with tokens `drawn` a stream that had its first one `first_age` ago."""
    targets = Targets(1.0, tpot_s)
    spec = Generate(RequestId(9, key), 0, pack([1] * prompt), pack([2] * drawn), b"", b"", Sampling(most), targets, age)
    made = Request(key, spec, Route(ME, ME), NOW - age, 16, prompt + most)
    made.computed = made.planned = prompt + drawn - 1 if drawn else 0
    if drawn:
        made.first_token, made.last_token = NOW - first_age, NOW
    return made


def seconds(streams: Sequence[Request], prompts: Sequence[Request], shares: Shares, cost: CostModel = COST) -> float:
    """What the step of these shares is predicted to take."""
    step = rows(streams) if shares.decodes else NOTHING
    for prompt in prompts:
        if count := shares.chunks.get(prompt.key, 0):
            step = step.chunk(prompt.planned, count)
    return cost.sums_s(step)


def test_each_token_has_its_deadline() -> None:
    waiting = request(1, 10, age=0.3)
    assert PACE.deadline(waiting) == pytest.approx(NOW + 0.7)
    stream = request(2, 10, drawn=5, first_age=0.1)
    assert PACE.deadline(stream) == pytest.approx(NOW - 0.1 + 5 * 0.05)
    stream.draws_in_flight = 1
    assert PACE.deadline(stream) == pytest.approx(NOW - 0.1 + 6 * 0.05)
    hurried = Pace(gamma=0.5, eta=0, token_budget=512, page_size=16)
    assert hurried.deadline(stream) == pytest.approx(NOW - 0.1 + 6 * 0.025)


def test_a_gap_is_bounded_however_much_is_banked() -> None:
    stream = request(1, 10, drawn=100, first_age=0.5)
    capped = Pace(gamma=1.0, eta=0.0, token_budget=512, page_size=16, gap_s=0.08)
    assert PACE.deadline(stream) > NOW + 4 and capped.deadline(stream) == pytest.approx(NOW + 0.08)
    prompt = request(2, 5000)
    assert seconds([stream], [prompt], capped.shares([stream], [prompt], COST, NOW)) <= 0.08


def test_banked_slack_is_spent_on_prompts() -> None:
    prompt = request(1, 2000)
    chunks = []
    for first_age in (1.0, 0.98, 0.95, 0.7):  # of 20 tokens in 50 ms each
        stream = request(2, 10, drawn=20, first_age=first_age)
        shares = PACE.shares([stream], [prompt], COST, NOW)
        assert seconds([stream], [prompt], shares) <= max(1.0 - first_age, COST.sums_s(rows([stream])))
        chunks.append(shares.chunks.get(1, 0))
    assert chunks == sorted(chunks) and chunks[0] == 0 and chunks[-1] == 511


def test_the_prompt_with_the_earliest_deadline_goes_first_and_those_that_will_be_late_last() -> None:
    late, tight, easy = request(1, 300, age=5.0), request(2, 300, age=0.9), request(3, 300, age=0.2)
    stream = request(4, 10, drawn=20, first_age=0.9)
    assert list(PACE.shares([stream], [late, easy, tight], COST, NOW).chunks) == [2, 3]
    assert list(PACE.shares([], [late, easy, tight], COST, NOW).chunks.items()) == [(2, 300), (3, 212)]


def test_of_prompts_that_cannot_all_be_in_time_one_is_rather_than_none() -> None:
    """Steps of 20 ms hold some 70 tokens of prompts beside the stream, and the two are due in 0.12 and 0.15 s. By the
    least slack they would take turns, for who is not served loses it, and both would be late.
    """
    first, second = request(1, 300, age=0.88), request(2, 600, age=0.85)
    stream, now = request(3, 10, drawn=20, first_age=0.38, tpot_s=0.02), NOW
    ended: dict[int, float] = {}
    while len(ended) < 2:
        prompts = [prompt for prompt in (first, second) if prompt.key not in ended]
        shares = PACE.shares([stream], prompts, COST, now)
        now += seconds([stream], prompts, shares)
        stream.computed = stream.planned = stream.planned + 1
        stream.tokens.append(2)
        for prompt in prompts:
            prompt.planned += shares.chunks.get(prompt.key, 0)
            if not prompt.remaining:
                ended[prompt.key] = now
    assert ended[1] <= PACE.deadline(first) < PACE.deadline(second)


def test_of_prompts_that_will_be_late_a_short_one_does_not_wait_for_the_whole_of_a_long_one() -> None:
    """Where a step takes longer than the target allows, whoever comes during one is late when it ends."""
    long, short = request(1, 5000, age=6.0), request(2, 10, age=2.0)
    long.computed = long.planned = 512
    assert list(PACE.shares([], [long, short], COST, NOW).chunks.items()) == [(2, 10), (1, 502)]


def test_a_long_prompt_that_has_waited_long_comes_before_short_ones_that_are_late_too() -> None:
    long, short = request(1, 2000, age=30.0), request(2, 300, age=2.0)
    assert list(PACE.shares([], [short, long], COST, NOW).chunks.items()) == [(1, 512)]
    long = request(1, 2000, age=5.0)
    assert list(PACE.shares([], [short, long], COST, NOW).chunks.items()) == [(2, 300), (1, 212)]


def test_a_stream_that_was_interrupted_is_computed_anew_before_any_prompt() -> None:
    tight, broken = request(1, 300, age=0.9), request(2, 280, drawn=20, age=9.0, first_age=8.0)
    broken.computed = broken.planned = 0
    stream = request(3, 10, drawn=20, first_age=0.9)
    assert next(iter(PACE.shares([stream], [tight, broken], COST, NOW).chunks)) == 2
    assert list(PACE.shares([], [tight, broken], COST, NOW).chunks.items()) == [(2, 300), (1, 212)]


def test_a_chunk_that_does_not_pay_rides_alone_or_not_at_all() -> None:
    """Mixing costs 40 ms more here: decodes go on until there is slack for a step of prompts."""
    dear = CostModel(0.002, 0.04, COST.L, 0.0, 0.0, 0.0, 0.0, 1e9, 0.0)
    priced = Pace(gamma=1.0, eta=0.9, token_budget=512, page_size=16)
    prompt, stream = request(1, 100), request(2, 10, drawn=20, first_age=0.5)
    alone = priced.shares([stream], [prompt], dear, NOW)
    assert not alone.decodes and alone.chunks == {1: 100}
    assert PACE.shares([stream], [prompt], dear, NOW).decodes, "with eta = 0 it rides, whatever it costs"
    tight = request(3, 10, drawn=20, first_age=0.975)
    assert priced.shares([tight], [prompt], dear, NOW) == Shares({}, True)


def test_who_cannot_catch_up_does_not_hold_prompts_up_but_gets_a_token_now_and_then() -> None:
    lost = request(1, 10, drawn=20, first_age=9.0, most=30)
    late = request(2, 10, drawn=20, first_age=1.05, most=1000)
    prompt = request(3, 2000)
    assert PACE.shares([late], [prompt], COST, NOW).chunks == {}, "it catches up, given some steps"
    shares = PACE.shares([lost], [prompt], COST, NOW)
    assert shares.chunks and seconds([lost], [prompt], shares) <= LATE_GAP * 0.05


def test_a_stream_may_be_late_by_what_a_few_tokens_make_up_for() -> None:
    """Steps of decodes take 12 ms here, so each gains 38. One that has just begun has banked nothing."""
    prompt = request(1, 2000)
    took = []
    for catch_up in (0, 1, 8):
        pace = Pace(gamma=1.0, eta=0.0, token_budget=2048, page_size=16, catch_up=catch_up)
        begun = request(2, 10, drawn=20, first_age=0.98)
        took.append(seconds([begun], [prompt], pace.shares([begun], [prompt], COST, NOW)))
    alone = COST.sums_s(rows([request(2, 10, drawn=20)]))
    assert took == [pytest.approx(0.02 + tokens * (0.05 - alone), abs=2e-3) for tokens in (0, 1)] + [took[2]]
    assert 0.15 < took[2] < 0.02 + 8 * (0.05 - alone)


def test_the_last_token_of_a_stream_has_nothing_to_make_up_for_it() -> None:
    """Whether it is to be drawn or is being drawn, and though steps are longer than the target."""
    ended = request(1, 10, drawn=20, first_age=0.9, most=20)
    for pace in (PACE, replace(PACE, catch_up=8)):
        for step_s in (0.01, 0.2):
            assert pace.latest(ended, step_s) == pace.deadline(ended)


def test_nobody_is_made_late_who_ends_before_it_could_catch_up_nor_beyond_the_longest_gap() -> None:
    prompt, ends = request(1, 2000), request(2, 10, drawn=20, first_age=0.98, most=21)
    pace = Pace(gamma=1.0, eta=0.0, token_budget=2048, page_size=16, catch_up=8)
    assert seconds([ends], [prompt], pace.shares([ends], [prompt], COST, NOW)) <= 0.02
    begun = request(2, 10, drawn=20, first_age=0.98)
    capped = Pace(gamma=1.0, eta=0.0, token_budget=2048, page_size=16, gap_s=0.07, catch_up=8)
    assert 0.06 < seconds([begun], [prompt], capped.shares([begun], [prompt], COST, NOW)) <= 0.07


# ---------------------------------------------------------------------------------------------------- properties

costs = st.builds(
    lambda h, mix, one, slope, a, d: CostModel(h, mix, ((1, one), (512, one + 511 * slope)), a, d, 0, 0, 1e9, 1e-5),
    st.floats(0, 0.01), st.floats(0, 0.02), st.floats(1e-4, 0.02), st.floats(0, 1e-3), st.floats(0, 1e-7),
    st.floats(0, 1e-6),
)  # fmt: skip
paces = st.builds(
    Pace, st.floats(0.5, 1.0), st.floats(0, 2.5), st.integers(64, 600), st.just(16), st.sampled_from([0.0, 0.1]),
    st.sampled_from([0, 0, 1, 8]),
)  # fmt: skip
numbers = st.tuples(
    st.lists(st.tuples(st.integers(1, 50), st.floats(0, 3), st.floats(0.01, 0.2), st.integers(1, 60)), max_size=8),
    st.lists(st.tuples(st.integers(1, 3000), st.floats(0, 3)), min_size=1, max_size=5),
)
Numbers: TypeAlias = tuple[list[tuple[int, float, float, int]], list[tuple[int, float]]]


def some(drawn: Numbers) -> tuple[list[Request], list[Request]]:
    """Streams of (tokens, age of the first, TPOT, tokens left) and prompts of (tokens, age)."""
    streams = [
        request(1000 + n, 50, drawn=tokens, first_age=age, tpot_s=tpot_s, most=tokens + left)
        for n, (tokens, age, tpot_s, left) in enumerate(drawn[0])
    ]
    return streams, [request(n, length, age=age) for n, (length, age) in enumerate(drawn[1])]


@given(paces, numbers, costs, st.integers(0, 2 * PATIENCE))
def test_no_deadline_is_missed_that_it_predicted_it_could_keep(
    pace: Pace, drawn: Numbers, cost: CostModel, passed: int
) -> None:
    """Of streams that a step of decodes alone would serve in time, none is late for the sake of a prompt, or it makes
    up for that within `catch_up` tokens, and before its end: but for one page of the oldest, if that has been passed
    over PATIENCE times. No gap is longer than it may be in any case.
    """
    streams, prompts = some(drawn)
    oldest = min(prompts, key=lambda prompt: prompt.order)
    oldest.passed = passed
    shares = pace.shares(streams, prompts, cost, NOW)
    if passed >= PATIENCE and shares.chunks.get(oldest.key, 0) <= pace.page_size:
        patient = shares.chunks.pop(oldest.key, 0)
        assert patient or not shares.decodes or pace.token_budget <= len(streams), "and it is not passed over again"
    taken = seconds(streams, prompts, shares, cost)
    alone = cost.sums_s(rows(streams))
    ends = taken if shares.decodes else taken + alone
    for stream in streams:
        due = pace.deadline(stream) - NOW
        if alone > due or ends <= due + 1e-9:
            continue
        assert stream.first_token is not None
        assert not pace.gap_s or ends <= pace.gap_s + 1e-9
        more = min(pace.catch_up, stream.limit - len(stream.tokens) - 1)
        drawn_then = len(stream.tokens) - stream.prompt_len + more
        due_then = stream.first_token + pace.gamma * stream.spec.targets.tpot_s * drawn_then - NOW
        assert ends + more * alone <= due_then + 1e-9
    budget = pace.token_budget - (len(streams) if shares.decodes else 0)
    assert sum(shares.chunks.values()) <= max(0, budget)
    assert all(0 < count <= prompt.remaining for prompt in prompts if (count := shares.chunks.get(prompt.key)))


@given(paces, numbers, costs, st.floats(0, 0.5))
def test_more_time_never_means_fewer_prompt_tokens(pace: Pace, drawn: Numbers, cost: CostModel, earlier: float) -> None:
    """A step that may take longer holds at least as much of a prompt."""
    streams, prompts = some(drawn)
    del prompts[1:]
    always = Pace(pace.gamma, 0.0, pace.token_budget, pace.page_size, catch_up=pace.catch_up)
    before = sum(always.shares(streams, prompts, cost, NOW).chunks.values())
    for stream in streams:
        assert stream.first_token is not None
        stream.first_token += earlier
    late = any(always.deadline(stream) - earlier < NOW + cost.sums_s(rows(streams)) for stream in streams)
    if not late:
        assert sum(always.shares(streams, prompts, cost, NOW).chunks.values()) >= before


@settings(deadline=None, max_examples=15)
@given(paces, numbers, costs)
def test_every_prompt_is_computed_in_a_bounded_number_of_steps(pace: Pace, drawn: Numbers, cost: CostModel) -> None:
    """Whatever the streams' deadlines, and though new urgent prompts come all the time."""
    streams, prompts = some(drawn)
    pages = sum(-(-prompt.remaining // pace.page_size) for prompt in prompts)
    mine, now = list(prompts), NOW
    for step in range((PATIENCE + 1) * pages + 1):
        if not mine:
            return
        urgent = request(2000 + step, 400, age=-10.0)
        shares = pace.shares(streams, [*mine, urgent], cost, now)
        now += max(1e-6, seconds(streams, [*mine, urgent], shares, cost))
        for prompt in mine:
            count = shares.chunks.get(prompt.key, 0)
            prompt.planned += count
            prompt.passed = 0 if count else prompt.passed + 1
        mine = [prompt for prompt in mine if prompt.remaining]
    assert not mine


def test_a_prompt_takes_as_long_as_its_steps() -> None:
    assert prefill_s(COST, 512, 0, token_s(COST, 512)) == pytest.approx(COST.sums_s(NOTHING.chunk(0, 512)))
