"""Who is to go elsewhere when streams are late, and how often that is asked."""

from __future__ import annotations

from dataclasses import replace

import pytest
from test_pace import COST, NOW, PACE, request

from cbdisagg.core.flow import HOLD, PAUSE_S, WORTH, Flow
from cbdisagg.core.pace import Pace
from cbdisagg.core.request import Request


def ask(flow: Flow, streams: list[Request], now: float = NOW, times: int = HOLD, pace: Pace = PACE) -> list[Request]:
    found = [flow.pick(streams, pace, COST, now) for _ in range(times)]
    return [stream for stream in found if stream is not None]


def late() -> list[Request]:
    """One that is short of a step, one with 0.8 s banked, and one with 0.6 s."""
    ages = {1: 0.995, 2: 0.2, 3: 0.4}
    return [request(key, 10, drawn=20, first_age=age) for key, age in ages.items()]


def test_the_stream_with_most_banked_is_the_one_to_go_once_another_is_late() -> None:
    assert [stream.key for stream in ask(Flow(), late())] == [2]
    assert not ask(Flow(), late(), times=HOLD - 1), "one late step is no overload"
    assert not ask(Flow(), late()[1:], times=3 * HOLD), "nobody is late"
    assert not ask(Flow(), late()[:1], times=3 * HOLD), "alone it would be late anywhere"


def test_who_was_made_late_for_a_prompt_and_will_catch_up_asks_for_nothing() -> None:
    assert not ask(Flow(), late(), times=3 * HOLD, pace=replace(PACE, catch_up=8))


def test_it_is_not_asked_again_at_once() -> None:
    flow = Flow()
    assert len(ask(flow, late(), times=5 * HOLD)) == 1
    assert len(ask(flow, late(), now=NOW + PAUSE_S, times=5 * HOLD)) == 1


@pytest.mark.parametrize("why", ["returned", "nearly over"])
def test_who_is_on_the_way_or_nearly_done_stays(why: str) -> None:
    streams = late()
    if why == "returned":
        streams[1].returned = True
    else:
        streams[1].limit = len(streams[1].tokens) + WORTH - 1
    assert [stream.key for stream in ask(Flow(), streams)] == [3]


def test_who_is_late_itself_stays() -> None:
    """It would hold up the prompts of the worker that takes it, until it has caught up."""
    streams = [request(key, 10, drawn=20, first_age=age) for key, age in ((1, 0.995), (2, 0.999), (3, 1.2))]
    assert not ask(Flow(), streams, times=3 * HOLD)


def test_with_nobody_to_spare_nobody_goes() -> None:
    streams = late()
    for stream in streams:
        stream.returned = True
    assert not ask(Flow(), streams, times=3 * HOLD)
