"""Routes: what the knobs make of them, and that both baselines are in the family, decision by decision."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from msgspec.structs import replace

from cbdisagg.core import policy
from cbdisagg.core.policy import (
    DOUBT,
    GRID_S,
    Decision,
    Link,
    Sight,
    View,
    Wanted,
    explain,
    look,
    move_target,
    refusal,
    relief,
    route,
)
from cbdisagg.messages import Address, Forecast, Knobs, Role

AUTO = Knobs(rho=0.9, eta=0.0, gamma=0.98, pin_prefill=0, pin_decode=0)
AGGREGATE = Knobs(rho=0.0, eta=0.0, gamma=0.98, pin_prefill=0, pin_decode=0)
DISAGGREGATE = Knobs(rho=0.0, eta=2.0, gamma=0.98, pin_prefill=1, pin_decode=1)
WANTED = Wanted(400, 100, 1.0, 0.05)


def worker(
    name: str, *, role: Role = "any", pin: Role = "any", streams: int = 0, queued: int = 0, step_s: float = 0.01,
    gain: float = 1.0, tpot_s: float = 0.05, room: int = 10_000, waiting: int = 0, chunk: int = 0,
) -> View:  # fmt: skip
    """1 ms for a prompt token, three times as much beside streams; 1 ms more for each stream.

    `chunk`: so many ride in each step of streams, and the step takes that much longer.
    """
    alone_s = step_s + 0.001 * streams
    forecast = Forecast(alone_s, 0.001, 1e-7, gain, tpot_s if streams else 0.0, token_s=0.003 if streams else 0.001)
    if chunk and streams:
        full_s, points = alone_s + 0.001 * chunk, tuple(alone_s + 0.001 * 2**k for k in range(13))
        forecast = replace(forecast, chunk=chunk, full_s=full_s, chunk_s=points, steady=chunk, token_s=full_s / chunk)
    return look(
        Address(name, int(name[1:]) + 1, ""), role, pin, forecast, sequences=streams + waiting, unseen=0,
        streams=streams, max_batch=16, queued_tokens=queued, room=room, between_ends_s=0.5,
    )  # fmt: skip


def sight(*views: View, cached: Mapping[str, int] | None = None, bytes_per_s: float = 1e9) -> Sight:
    """Every worker can push to every other one, 10 KB for a token."""
    links = {
        to.address: {v.address: Link(v.address, to.address, bytes_per_s, 10_000) for v in views if v is not to}
        for to in views
    }
    by_name = {view.address.name: view.address for view in views}
    return Sight(views, {by_name[name]: tokens for name, tokens in (cached or {}).items()}, links)


def refused_by(views: Sequence[View], knobs: Knobs, wanted: Wanted) -> tuple[str, float] | None:
    decision = route(sight(*views), knobs, wanted)
    (view,) = [view for view in views if view.address == decision.prefill]
    return refusal(decision, view.alone_s(wanted.tokens, 0), wanted, lambda _: 0.5)


def names(decision: Decision) -> tuple[str, str, str]:
    return decision.prefill.name, decision.decode.name, decision.reason


def test_a_request_stays_where_it_is_prefilled_as_long_as_steps_are_short() -> None:
    assert names(route(sight(worker("w0"), worker("w1")), AUTO, WANTED)) == ("w0", "w0", "colocated")
    assert names(route(sight(worker("w0", streams=3), worker("w1")), AUTO, WANTED)) == ("w1", "w1", "colocated")


def test_a_worker_whose_steps_would_get_too_long_prefills_for_the_most_loaded_that_has_room() -> None:
    views = worker("w0", step_s=0.045), worker("w1", streams=5, queued=9000), worker("w2", streams=9, queued=9000)
    assert names(route(sight(*views), AUTO, WANTED)) == ("w0", "w2", "packed")
    full = worker("w2", streams=9, queued=9000, room=300)
    assert names(route(sight(*views[:2], full), AUTO, WANTED)) == ("w0", "w1", "packed")


def test_a_tight_neighbour_is_looked_out_for() -> None:
    """Steps that are short enough for this request may be too long for one that is there."""
    views = worker("w0", streams=5, step_s=0.02, tpot_s=0.025), worker("w1", streams=12, step_s=0.02, queued=100)
    assert route(sight(*views), AUTO, WANTED).decode.name == "w1"


def test_in_an_overload_it_stays_on_the_fastest() -> None:
    views = worker("w0", streams=1, step_s=0.08), worker("w1", streams=1, step_s=0.06, queued=500)
    assert names(route(sight(*views), AUTO, WANTED)) == ("w0", "w0", "overload")


def test_a_worker_that_is_pinned_to_decode_draws_what_it_has_room_for() -> None:
    free, pinned = worker("w0"), worker("w1", pin="decode", streams=4)
    assert names(route(sight(free, pinned), AUTO, WANTED)) == ("w0", "w1", "drawn")
    busy = worker("w1", pin="decode", streams=4, step_s=0.045)
    assert names(route(sight(free, busy), AUTO, WANTED)) == ("w0", "w0", "colocated")


def test_a_first_token_that_is_held_to_the_end_of_a_step_is_foretold_then() -> None:
    """It comes after 0.1 s; the step that runs where it decodes ends after 0.3 s, one with what is queued after 0.5."""
    prefill = worker("w0", role="prefill")
    running = dataclasses.replace(worker("w1", pin="decode"), free_at=0.3, busy_to=0.5)
    queued = dataclasses.replace(running, free_at=0.05)
    short, long, late = Wanted(100, 5, 1.0, 0.05), Wanted(100, 100, 1.0, 0.05), Wanted(100, 5, 0.25, 0.05)
    foretold = [[route(sight(prefill, v), AUTO, w).ttft_s for w in (short, long, late)] for v in (running, queued)]
    soon = pytest.approx(0.1, abs=0.005)
    assert foretold == [[pytest.approx(0.3), soon, soon], [pytest.approx(0.5), soon, soon]]


def test_mixing_that_does_not_pay_is_a_reason_to_hand_over() -> None:
    dear = Knobs(0.9, 0.8, 0.98, 0, 0)
    views = worker("w0", streams=1, gain=0.5), worker("w1", streams=8, gain=0.5, queued=9000)
    assert names(route(sight(*views), dear, WANTED)) == ("w0", "w1", "unpaid")
    assert names(route(sight(*views), AUTO, WANTED)) == ("w0", "w0", "colocated")


def test_roles_are_preferences() -> None:
    prefill, decode = worker("w0", role="prefill"), worker("w1", role="decode")
    assert names(route(sight(prefill, decode), AUTO, WANTED)) == ("w1", "w1", "faster")
    busy = worker("w1", role="decode", streams=4)
    assert names(route(sight(prefill, busy), AUTO, WANTED)) == ("w0", "w1", "role")
    queue = worker("w0", role="prefill", queued=3000)
    assert names(route(sight(queue, busy), AUTO, WANTED)) == ("w1", "w1", "faster")
    over = worker("w1", role="decode", streams=4, step_s=0.045)
    assert route(sight(prefill, over), AUTO, WANTED).decode.name == "w0", "it decodes if nobody else can do it well"


def test_a_cached_prefix_draws_its_request() -> None:
    views = worker("w0"), worker("w1", queued=200)
    assert names(route(sight(*views, cached={"w1": 384}), AUTO, WANTED)) == ("w1", "w1", "cached")


def test_one_token_is_never_handed_over() -> None:
    decision = route(sight(worker("w0", pin="prefill"), worker("w1", pin="decode")), DISAGGREGATE, Wanted(9, 1, 1, 1))
    assert names(decision) == ("w0", "w0", "one-token")


def test_without_a_way_it_is_computed_where_it_decodes() -> None:
    views = worker("w0", pin="prefill"), worker("w1", pin="decode")
    assert names(route(Sight(views, {}, {}), DISAGGREGATE, WANTED)) == ("w1", "w1", "no-way")
    assert names(route(sight(worker("w1", pin="decode")), DISAGGREGATE, WANTED))[:2] == ("w1", "w1")
    assert names(route(sight(worker("w0", pin="prefill")), DISAGGREGATE, WANTED))[:2] == ("w0", "w0")


def test_who_leaves_gives_to_the_least_loaded_that_it_can_push_to() -> None:
    views = worker("w0"), worker("w1", streams=3), worker("w2", streams=1), worker("w3", pin="prefill")
    assert move_target(sight(*views), views[0].address) == views[2].address
    assert move_target(sight(views[0]), views[0].address) is None


def test_a_late_worker_is_relieved_only_by_one_that_is_clearly_better_off() -> None:
    late, good, hardly = worker("w0", streams=30), worker("w1", streams=8), worker("w2", streams=24)
    decision = relief(sight(late, good, hardly), late.address, AUTO, WANTED)
    assert decision is not None and names(decision) == ("w0", "w1", "relief")
    assert decision.step_s < decision.others[0].step_s == late.forecast.step_s
    assert relief(sight(late, hardly), late.address, AUTO, WANTED) is None
    assert relief(sight(late, good), late.address, AGGREGATE, WANTED) is None
    assert relief(sight(good), late.address, AUTO, WANTED) is None
    assert relief(Sight((late, good), {}, {}), late.address, AUTO, WANTED) is None, "there is no way for its pages"


def test_what_cannot_be_in_time_is_refused_until_it_can() -> None:
    text, after_s = refused_by([worker("w0", queued=2000)], AUTO, WANTED) or ("", 0.0)
    assert "first token" in text and abs(after_s - (2.0 - (1.0 - 0.4) / (1 + DOUBT))) < 0.01
    short = Wanted(40, 9, 1.0, 0.05)
    text, after_s = refused_by([worker("w0", streams=2, step_s=0.06)], AUTO, short) or ("", 0.0)
    assert "ms each" in text and after_s == 0.5
    assert refused_by([worker("w0", streams=1, room=10)], AUTO, short) == ("no worker has room", 0.5)
    assert refused_by([worker("w0")], AUTO, WANTED) is None


def test_only_a_wait_is_doubted() -> None:
    """What a prompt takes itself may take the whole target; a queue of the same length may not."""
    assert refused_by([worker("w0", streams=1)], AUTO, Wanted(325, 9, 1.0, 0.05)) is None
    assert refused_by([worker("w0", streams=1, queued=300)], AUTO, Wanted(25, 9, 1.0, 0.05)) is not None


def test_who_would_be_late_alone_is_told_never_to_come_again() -> None:
    for wanted in (Wanted(2000, 100, 0.5, 0.05), Wanted(40, 9, 1.0, 0.005)):
        text, after_s = refused_by([worker("w0")], AUTO, wanted) or ("", 1.0)
        assert text.endswith(" even if nobody else were served") and not after_s
    found = refused_by([worker("w1", room=10)], AUTO, WANTED)
    assert found == ("no worker has room even if nobody else were served", 0.0)


def test_a_decision_can_be_read() -> None:
    text = explain(route(sight(worker("w0"), worker("w1", queued=300), cached={"w1": 32}), AUTO, WANTED), WANTED)
    assert text.startswith("w0 (colocated) for 400 + 100 tokens: first token 0.401 s, steps 10 ms; targets 1 s, 50 ms;")
    assert "instead of w1 first token 0.668 s" in text
    handed = route(sight(worker("w0", pin="prefill"), worker("w1", pin="decode")), DISAGGREGATE, WANTED)
    assert explain(handed, WANTED).startswith("w0 > w1 (pinned)")
    relieved = relief(sight(worker("w0", streams=30), worker("w1", streams=8)), Address("w0", 1, ""), AUTO, WANTED)
    assert relieved is not None
    text = explain(relieved, WANTED)
    assert text == "w0 > w1 (relief) for 400 + 100 tokens: steps 19 ms; targets 1 s, 50 ms; instead of w0 steps 40 ms"


# ---------------------------------------------------------------------------------------------------- properties

pins = st.sampled_from(["any", "prefill", "decode"])
states = st.tuples(st.integers(0, 20), st.integers(0, 3000), st.floats(0.001, 0.08), st.integers(0, 20_000))
wishes = st.builds(Wanted, st.integers(1, 2000), st.integers(2, 500), st.floats(0.05, 5), st.floats(0.01, 0.2))


def fleet(numbers: list[tuple[int, int, float, int]], pins: Mapping[int, Role] | None = None) -> list[View]:
    """Their steps are never shorter for the prompts in them: otherwise more load could be sooner done."""
    return [
        worker(
            f"w{n}", pin=(pins or {}).get(n, "any"), streams=streams, queued=queued, step_s=step_s, room=room, chunk=16
        )
        for n, (streams, queued, step_s, room) in enumerate(numbers)
    ]


def grid(seconds: float) -> int:
    return round(seconds / GRID_S)


@given(st.lists(states, min_size=1, max_size=6), wishes)
def test_with_rho_0_and_no_pins_it_is_aggregation(numbers: list[tuple[int, int, float, int]], wanted: Wanted) -> None:
    """On the worker with the least predicted TTFT that has a place and breaks no TPOT, from prompt to end."""
    views = fleet(numbers)
    chosen = route(sight(*views), AGGREGATE, wanted)

    def worse(view: View) -> tuple[object, ...]:
        step_s, limit_s, fits, _ = view.seat(wanted)
        breaks = step_s > limit_s or not fits
        return breaks, grid(view.ttft_s(wanted.tokens, 0, 0.0)), view.sequences, view.address

    best = min(views, key=worse)
    assert (chosen.prefill, chosen.decode) == (best.address, best.address)


@given(st.lists(states, min_size=2, max_size=6), st.data(), wishes)
def test_with_all_pinned_it_is_pure_disaggregation(
    numbers: list[tuple[int, int, float, int]], data: st.DataObject, wanted: Wanted
) -> None:
    """The least loaded worker that decodes, and the one that prefills soonest; nobody does both."""
    prefills = data.draw(st.integers(1, len(numbers) - 1))
    roles: dict[int, Role] = {n: "prefill" if n < prefills else "decode" for n in range(len(numbers))}
    views = fleet(numbers, roles)
    chosen = route(sight(*views), DISAGGREGATE, wanted)
    decode = min(
        views[prefills:],
        key=lambda view: (not view.seat(wanted).fits, view.seat(wanted).step_s, view.address),
    )
    links = sight(*views).links[decode.address]

    def first_s(view: View) -> float:
        move_s = links[view.address].seconds(wanted.tokens, wanted.tokens * view.forecast.token_s)
        return view.ttft_s(wanted.tokens, 0, 0.0) + decode.place_s + move_s

    prefill = min(views[:prefills], key=lambda v: (grid(first_s(v)), v.address))
    assert (chosen.prefill, chosen.decode) == (prefill.address, decode.address)


@given(st.lists(st.tuples(states, pins), min_size=1, max_size=6), wishes, st.floats(0, 1.5), st.floats(0, 2))
def test_whatever_the_knobs_a_route_names_those_who_may_and_a_way(
    numbers: list[tuple[tuple[int, int, float, int], Role]], wanted: Wanted, rho: float, eta: float
) -> None:
    views = fleet([state for state, _ in numbers], {n: pin for n, (_, pin) in enumerate(numbers)})
    by_address = {view.address: view for view in views}
    chosen = route(sight(*views), Knobs(rho, eta, 0.98, 0, 0), wanted)
    prefill, decode = by_address[chosen.prefill], by_address[chosen.decode]
    if any(view.pin != "decode" for view in views) and any(view.pin != "prefill" for view in views):
        assert prefill.pin != "decode" and decode.pin != "prefill"
    if rho and not chosen.breaks and chosen.kind == "remote" and chosen.reason in ("packed", "drawn"):
        assert chosen.step_s <= rho * chosen.limit_s
    assert all(grid(chosen.ttft_s) <= grid(other.ttft_s) for other in chosen.others if other.breaks == chosen.breaks)


@given(states, wishes, st.floats(0, 1.5))
def test_who_keeps_its_streams_in_time_has_such_a_seat(
    numbers: tuple[int, int, float, int], wanted: Wanted, rho: float
) -> None:
    (view,) = fleet([numbers])
    seat = view.seat(wanted)
    assert view.keeps(wanted, rho) == (seat.fits and seat.step_s <= rho * seat.limit_s)


@given(st.lists(st.tuples(states, pins), min_size=1, max_size=9), wishes, st.floats(0, 1.5))
def test_routes_that_are_not_looked_at_are_no_better(
    numbers: list[tuple[tuple[int, int, float, int], Role]], wanted: Wanted, rho: float
) -> None:
    """The same is chosen where none is left out; and of what is told of the others, enough."""
    views = fleet([state for state, _ in numbers], {n: pin for n, (_, pin) in enumerate(numbers)})
    chosen = route(sight(*views), Knobs(rho, 0.0, 0.98, 0, 0), wanted)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policy, "SHOWN", len(numbers))
        whole = route(sight(*views), Knobs(rho, 0.0, 0.98, 0, 0), wanted)
    assert chosen._replace(others=()) == whole._replace(others=())
    assert len(chosen.others) >= min(policy.SHOWN, len(whole.others))


@given(st.lists(states, min_size=1, max_size=6), wishes, st.integers(0, 5), st.integers(0, 4), st.integers(0, 4000))
@example([(0, 0, 0.0625, 0), (0, 0, 0.0625, 0), (1, 0, 0.03125, 1)], Wanted(1, 2, 1.0, 0.125), 2, 0, 1)
@example([(11, 0, 0.0326, 1), (0, 0, 0.0508, 1)], Wanted(1, 2, 1.0, 0.0547), 0, 1, 0)
def test_more_load_never_promises_an_earlier_first_token(
    numbers: list[tuple[int, int, float, int]], wanted: Wanted, which: int, more_streams: int, more_queued: int
) -> None:
    """By the same route: to a worker that gets too full for it nothing is handed over, which takes time too."""
    n = which % len(numbers)
    streams, queued, step_s, room = numbers[n]
    loaded = [*numbers[:n], (streams + more_streams, queued + more_queued, step_s, room), *numbers[n + 1 :]]
    for knobs in (AGGREGATE, AUTO):
        before, after = (route(sight(*fleet(state)), knobs, wanted) for state in (numbers, loaded))
        if knobs == AGGREGATE and after.breaks == before.breaks:
            assert grid(after.ttft_s) >= grid(before.ttft_s)
        first_s = {(way.prefill, way.decode): way.ttft_s for way in (before, *before.others)}
        for way in (after, *after.others):
            assert way.ttft_s >= first_s.get((way.prefill, way.decode), 0.0) - 1e-9


@given(st.lists(states, min_size=1, max_size=6), wishes, st.integers(0, 5), st.integers(1, 4000))
@example([(1, 0, 0.045, 20_000)], Wanted(1, 2, 0.05, 0.2), 0, 1)
@example([(11, 0, 0.001, 1699), (0, 1243, 0.0625, 0)], Wanted(1699, 2, 3.0, 0.125), 1, 32)
def test_who_is_refused_is_refused_under_more_load(
    numbers: list[tuple[int, int, float, int]], wanted: Wanted, which: int, more: int
) -> None:
    """By the same route: another may be later, and leave less to doubt, if that is the prompt's own work."""
    n = which % len(numbers)
    streams, queued, step_s, room = numbers[n]
    loaded = [*numbers[:n], (streams, queued + more, step_s, room), *numbers[n + 1 :]]
    for knobs in (AGGREGATE, AUTO):
        before, after = (route(sight(*fleet(state)), knobs, wanted) for state in (numbers, loaded))
        if (before.prefill, before.decode) == (after.prefill, after.decode):
            refused, then = (refused_by(fleet(state), knobs, wanted) for state in (numbers, loaded))
            assert refused is None or then is not None


@given(st.integers(0, 5000), st.integers(1, 2000), st.floats(0.05, 5))
def test_who_comes_again_when_it_was_told_to_is_let_in_and_not_before(queued: int, tokens: int, ttft_s: float) -> None:
    """The queue has been worked off by then: 1 ms a token."""
    wanted = Wanted(tokens, 100, ttft_s, 0.05)

    def refused(queue: float) -> tuple[str, float] | None:
        return refused_by([worker("w0", queued=max(0, math.floor(queue)))], AUTO, wanted)

    found = refused(queued)
    attainable = (tokens + 0.5) / 1000 <= ttft_s
    if found is None:
        assert refused(0) is None
    elif not attainable:
        assert (refused(0) or ("", 1.0))[1] == 0, "in the end it is told that no waiting helps"
    else:
        assert refused(queued - found[1] * 1000 - 1) is None
        assert refused(queued - found[1] * 900 + 1) is not None
