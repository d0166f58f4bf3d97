"""Stop strings in text that comes in any parts: the same as looking at the text one character at a time."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cbdisagg.api.stops import StopScanner


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """The text up to the first stop string to be complete, of several the longest; found by trying every end."""
    for end in range(len(text) + 1):
        met = max((stop for stop in stops if text[:end].endswith(stop)), key=len, default=None)
        if met is not None:
            return text[: end if include else end - len(met)], met
    return text, None


@given(
    parts=st.lists(st.text("abc", max_size=5), max_size=12),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    include=st.booleans(),
)
def test_equals_the_reference_for_any_cut(parts: list[str], stops: list[str], include: bool) -> None:
    scanner = StopScanner(stops, include)
    shown, whole = "", reference("".join(parts), stops, include)
    for part in parts:
        shown += scanner.feed(part)
        assert whole[0].startswith(shown), "what has been shown is never taken back"
    assert (shown + scanner.finish(), scanner.met) == whole


@given(parts=st.lists(st.text("ab", max_size=4), max_size=10), stops=st.lists(st.text("ab", min_size=1), min_size=1))
def test_holds_back_only_the_longest_beginning_of_a_stop_string(parts: list[str], stops: list[str]) -> None:
    scanner, seen, shown = StopScanner(stops, False), "", ""
    for part in parts:
        seen, shown = seen + part, shown + scanner.feed(part)
        if scanner.met is not None:
            return
        beginnings = {stop[:k] for stop in stops for k in range(1, len(stop))}
        assert len(seen) - len(shown) == max((len(b) for b in beginnings if seen.endswith(b)), default=0)


@pytest.mark.parametrize("stop", ["aab", "abab", "aaaa", "END"])
def test_one_string_in_single_characters(stop: str) -> None:
    scanner = StopScanner([stop], False)
    text = "xaabaabababaaaaEND"
    shown = "".join(scanner.feed(character) for character in text)
    assert shown == text[: text.index(stop)]
    assert scanner.feed("more") == scanner.finish() == ""


def test_a_string_may_be_passed_over_and_still_found_later() -> None:
    scanner = StopScanner(["ab"], False)
    assert scanner.feed("xab", may_stop=False) == "xab"
    assert scanner.feed("ya", may_stop=False) == "y"  # the next part may complete this one
    assert scanner.feed("b!") == ""
    assert scanner.met == "ab"
