"""Why a request went where it went: the reason that is counted, and a line with the predictions that led to it."""

from __future__ import annotations

import re

from core_world import Setting, World

from cbdisagg.api.client import RequestRejected, Stream
from cbdisagg.config import Config, Debug, Policy
from cbdisagg.core.effects import Note
from cbdisagg.messages import Sampling, Stats, Targets

NUMBER = r"[\d.e+-]+"


def world(trace: bool = True) -> World:
    config = Config(debug=Debug(trace=trace), policy=Policy(admission="early-reject"))
    made = World(Setting(("any", "any"), config, pages=16))
    made.settle()
    return made


def ask(service: World, ttft_s: float, tpot_s: float = 1.0, sibling_of: Stream | None = None) -> Stream:
    return service.api.submit([1, 2, 3], Sampling(max_tokens=4), Targets(ttft_s, tpot_s), sibling_of)


def lines(service: World) -> list[str]:
    journal = service.coordinator.journal or ()
    notes = [e.text for _, _, effects in journal for e in effects if isinstance(e, Note)]
    return [note.split(": ", 1)[1] for note in notes if note.startswith("request ")]


def told(service: World) -> dict[tuple[str, str], int]:
    """What the api has been told of decisions: these are the metric's."""
    stats = service.api.client.stats
    assert isinstance(stats, Stats)
    return {(route, reason): count for route, reason, count in stats.decisions}


def test_every_decision_is_counted_by_its_reason_and_traced_with_its_predictions() -> None:
    service = world()
    first = ask(service, 5.0)
    sibling = ask(service, 5.0, sibling_of=first)
    late, slow = ask(service, 1e-6), ask(service, 5.0, tpot_s=1e-6)
    service.settle()
    service.check_quiet()
    assert told(service) == {("local", "colocated"): 1, ("local", "sibling"): 1, ("rejected", "unattainable"): 2}
    way, beside, too_late, too_slow = lines(service)
    ms = rf"steps {NUMBER} ms"
    first_token = rf"first token {NUMBER} s, {ms}"
    asked = r"for 3 \+ 4 tokens"
    other = rf"instead of any-\d {first_token}"
    assert re.fullmatch(rf"any-\d \(colocated\) {asked}: {first_token}; targets 5 s, 1e\+03 ms; {other}", way)
    assert re.match(rf"any-\d \(sibling\) {asked}: ", beside)
    assert re.match(rf"refused: any-\d \(\w+\) {asked}: {first_token}; targets 1e-06 s", too_late)
    assert re.match(rf"refused: any-\d \(\w+\) {asked}: {first_token}; targets 5 s, 0.001 ms", too_slow)
    assert len(first.output) == len(sibling.output) == 4
    for stream, why in ((late, "the first token would take"), (slow, "tokens would take")):
        error = stream._error
        assert isinstance(error, RequestRejected) and error.status == 429
        assert why in error.message and "even if nobody else were served" in error.message and not error.retry_after_s


def test_without_trace_nothing_is_written() -> None:
    service = world(trace=False)
    ask(service, 5.0)
    service.settle()
    assert told(service) == {("local", "colocated"): 1} and not lines(service)
