"""Tuning while serving: what a history holds, when knobs are turned, and when they are turned back."""

from __future__ import annotations

from msgspec.structs import replace
from sim_world import config, costs

from cbdisagg.config import Config, Scheduler
from cbdisagg.core.knobs import configured
from cbdisagg.messages import (
    Finished,
    Generate,
    Knobs,
    Rejected,
    RequestId,
    Sampling,
    Targets,
    pack,
    page_hashes,
    page_root,
)
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.online import Answer, History, Question, Steering, answer
from cbdisagg.sim.simulation import simulate
from cbdisagg.sim.variants import equal_workers
from cbdisagg.sim.workload import BLOCK


def asked(n: int, prompt: int = 10, age_s: float = 0.5) -> Generate:
    ids = pack(range(prompt))
    return Generate(RequestId(1, n), 0, ids, b"", b"", b"", Sampling(max_tokens=9), Targets(1.0, 0.1), age_s)


def ended(n: int, tokens: int) -> Finished:
    return Finished(RequestId(1, n), 0, tokens)


def test_a_history_holds_the_last_requests_that_have_ended() -> None:
    history = History(window=3)
    for n in range(5):
        history.hear(10.0 + n, asked(n, prompt=n + 1))
    history.hear(15.0, ended(9, 4))  # nobody's
    for n in (0, 1, 3, 4):
        assert not history.full or n == 4
        history.hear(15.0, ended(n, 7))
    assert history.full
    asks, in_time = history.take()
    assert [(ask.arrival_s, ask.length, ask.output_tokens) for ask in asks] == [(0.0, 2, 7), (2.0, 4, 7), (3.0, 5, 7)]
    assert in_time == 1 / 3  # 1.0 s + 6 x 0.1 s after they had come, 4.5, 2.5 and 1.5 s ago
    assert not history.full and (asks[0].ttft_ms, asks[0].tpot_ms) == (1000.0, 100.0)


def test_prompts_that_began_alike_begin_alike_in_the_question() -> None:
    """Of 1,300 tokens two blocks are full. The second request shares the first of them, the third none."""
    history, root = History(window=3, page_size=16), page_root("x")
    for n, own in enumerate(((0, 0, 0), (0, 7, 0), (9, 0, 0))):
        prompt = pack([600 * own[token // BLOCK] + token % BLOCK for token in range(1300)])
        hashes = page_hashes(root, prompt, 16)
        request = Generate(
            RequestId(1, n), 0, prompt, b"", root, hashes, Sampling(max_tokens=9), Targets(1.0, 0.1), 0.0
        )
        history.hear(float(n), replace(request, tenant="t", priority=n))
        history.hear(float(n), ended(n, 4))
    asks, _ = history.take()
    assert [ask.prefix_blocks for ask in asks] == [(0, 1), (0, 2), (3, 4)]
    assert [(ask.tenant, ask.priority) for ask in asks] == [("t", 0), ("t", 1), ("t", 2)]
    hits = [record.cached_tokens for record in simulate(config("any"), costs(), asks).records]
    assert hits == [0, 512, 0]


def test_pages_larger_than_a_block_and_requests_without_hashes_have_nothing_in_common() -> None:
    for page_size, hashes in ((1024, b"x" * 64), (16, b"")):
        history = History(window=1, page_size=page_size)
        history.hear(0.0, replace(asked(0, prompt=1300), hashes=hashes))
        history.hear(0.0, ended(0, 4))
        ((ask,), _) = history.take()
        assert ask.prefix_blocks == ()


def test_a_request_that_moves_is_one_with_all_of_its_tokens() -> None:
    history = History(window=2)
    history.hear(1.0, asked(0))
    history.hear(1.5, ended(0, 3))
    history.hear(2.0, ended(0, 8))
    history.hear(2.0, ended(0, 0))  # a submission that came to nothing
    assert not history.full
    ((ask,), in_time) = history.take()
    assert ask.output_tokens == 8 and in_time == 1.0


def test_what_was_refused_was_asked_for_and_not_in_time() -> None:
    history = History(window=4)
    for n in range(5):
        history.hear(1.0 + n, asked(n, prompt=50 * (n + 1)))
    history.hear(2.0, ended(0, 3))
    history.hear(2.0, ended(1, 6))
    for n, submission, status in ((2, 0, 503), (2, 1, 429), (7, 0, 429)):  # no worker; a stream that goes on; nobody's
        history.hear(2.0, Rejected(RequestId(1, n), submission, status, ""))
    assert not history.full
    for n in (3, 4):
        history.hear(6.0, Rejected(RequestId(1, n), 0, 429, "late"))
    assert history.full
    asks, in_time = history.take()
    assert [(ask.length, ask.output_tokens) for ask in asks] == [(50, 3), (100, 6), (200, 4), (250, 4)]
    assert in_time == 0.25  # only the second: the first took 1.5 s, and 1.2 s is in time


def test_of_refused_requests_alone_the_longest_answers_are_assumed() -> None:
    history = History(window=1)
    history.hear(1.0, asked(0))
    history.hear(1.0, Rejected(RequestId(1, 0), 0, 429, "late"))
    ((ask,), in_time) = history.take()
    assert ask.output_tokens == 9 and in_time == 0.0


def test_what_never_ends_is_forgotten() -> None:
    history = History(window=3)
    for n in range(1000):
        history.hear(float(n), asked(n))
    history.hear(1000.0, ended(0, 4))
    assert not history.full
    for n in (997, 998, 999):
        history.hear(1000.0, ended(n, 4))
    assert history.full


OLD, NEW = Knobs(0.9, 0.0, 0.98, 0, 0), Knobs(0.7, 0.0, 0.98, 1, 0)


def test_knobs_are_turned_for_a_gain_and_back_for_a_loss_and_not_again() -> None:
    steering = Steering(OLD)
    assert steering.adopt(Answer(NEW, 0.03), 0.9) is None  # too little
    assert steering.adopt(Answer(OLD, 0.5), 0.9) is None  # nothing new
    assert steering.adopt(Answer(NEW, 0.04), 0.9) == NEW == steering.now
    assert steering.judge(0.84) == OLD == steering.now
    assert steering.adopt(Answer(NEW, 0.5), 0.9) is None
    assert steering.judge(0.1) is None  # nothing was turned


def test_knobs_that_hold_what_they_promise_are_what_is_gone_back_to() -> None:
    steering, third = Steering(OLD), Knobs(0.5, 0.0, 0.98, 1, 1)
    assert steering.adopt(Answer(NEW, 0.1), 0.9) == NEW and steering.judge(0.85) is None  # five points are chance
    assert steering.adopt(Answer(third, 0.1), 0.87) == third and steering.judge(0.5) == NEW


def test_an_answer_is_never_worse_than_what_is_in_force() -> None:
    service: Config = equal_workers(config("any", scheduler=Scheduler(max_batch=16, token_budget=128)), 2)
    asks = make_workload(60, 20.0, Lengths(60, "exponential", 200), Lengths(4), 0)
    question = Question(service, costs(), tuple(asks), configured(service), most=3)
    found = answer(question)
    assert found.gain >= 0.0 and (found.gain > 0 or found.knobs == question.knobs)
    again = Question(service, costs(), tuple(asks), found.knobs, most=3)
    assert answer(again).gain < 0.5 * found.gain + 0.05
