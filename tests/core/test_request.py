"""The whole grid of states and triggers, and what a request knows of itself."""

from __future__ import annotations

import itertools

import pytest

from cbdisagg.core.request import TRANSITIONS, IllegalTransition, Request, State, Trigger
from cbdisagg.messages import Address, Generate, RequestId, Route, Sampling, Targets, pack, page_hashes, page_root

W = Address("w", 1, "")
ROOT = page_root("m")


def request(prompt: list[int], output: list[int], **sampling: int) -> Request:
    spec = Generate(
        RequestId(1, 1),
        0,
        pack(prompt),
        pack(output),
        ROOT,
        page_hashes(ROOT, pack(prompt), 4),
        Sampling(max_tokens=8, **sampling),
        Targets(1.0, 0.1),
        0.0,
    )
    return Request(1, spec, Route(W, W), arrival=0.0, page_size=4, limit=len(prompt) + 8)


@pytest.mark.parametrize(("state", "trigger"), [*itertools.product(State, Trigger)], ids=lambda each: each.value)
def test_a_state_knows_its_triggers_and_refuses_the_others(state: State, trigger: Trigger) -> None:
    subject = request([1, 2], [])
    subject.state = state
    if (state, trigger) in TRANSITIONS:
        subject.move(trigger)
        assert subject.state is TRANSITIONS[state, trigger]
    else:
        with pytest.raises(IllegalTransition, match=f"{trigger.value} while {state.value}"):
            subject.move(trigger)
        assert subject.state is state


def test_every_living_state_can_end_and_the_end_is_final() -> None:
    assert {state for state, trigger in TRANSITIONS if trigger is Trigger.END} == set(State) - {State.ENDED}
    assert State.ENDED not in {state for state, _ in TRANSITIONS}


def test_progress_counts_what_is_in_flight() -> None:
    subject = request([1, 2, 3], [4])
    assert (subject.remaining, subject.decoding) == (4, False)
    subject.planned = 3
    assert (subject.remaining, subject.decoding) == (1, True)
    subject.planned, subject.draws_in_flight = 4, 1
    assert (subject.remaining, subject.decoding) == (1, True)


def test_a_prompt_of_one_token_is_no_decode() -> None:
    assert not request([1], []).decoding


def test_the_chain_goes_on_over_the_output() -> None:
    subject = request([1, 2, 3, 4, 5], [6, 7, 8, 9])
    whole = page_hashes(ROOT, pack([1, 2, 3, 4, 5, 6, 7, 8]), 4)
    assert b"".join(subject.chain(2)) == whole
    assert b"".join(subject.chain(1)) == whole[:16]


def test_scores_are_wanted_once() -> None:
    assert request([1, 2], [], prompt_logprobs=0).wants_scores
    assert not request([1, 2], [3], prompt_logprobs=0).wants_scores
    assert not request([1, 2], []).wants_scores
