"""Every field of Sampling by itself and all together, and how two answers to one of them are compared."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace
from routes_models import make_prompt
from routes_world import Answer

from cbdisagg.messages import Logprobs, Sampling

PROMPT = make_prompt(37, seed=11)
COUNT = 30
GREEDY = Sampling(max_tokens=COUNT, temperature=0.0, logprobs=2)
DRAWN = Sampling(max_tokens=COUNT, temperature=4.0, seed=1234, logprobs=2)
"""The logits of a tiny random model lie far apart: at this temperature a draw has many choices."""
CLOSE = 1e-4


def make_fields(drawn: Sequence[int]) -> dict[str, Sampling]:
    """`drawn`: what DRAWN gives, from which ids that would end it early and late are taken."""
    early = _first_new(drawn, 3)
    late = _first_new(drawn, 20)
    return {
        "temperature": replace(DRAWN, temperature=8.0),
        "seed": replace(DRAWN, seed=-77),
        "choice": replace(DRAWN, choice=3),
        "top_k": replace(DRAWN, top_k=4),
        "top_p": replace(DRAWN, top_p=0.5),
        "min_p": replace(DRAWN, min_p=0.3),
        "presence_penalty": replace(GREEDY, presence_penalty=2.0),
        "frequency_penalty": replace(GREEDY, frequency_penalty=1.5),
        "repetition_penalty": replace(GREEDY, repetition_penalty=1.8),
        "logit_bias": replace(GREEDY, logit_bias=dict.fromkeys(range(0, 160, 9), 6.0)),
        "end_ids": replace(DRAWN, end_ids=(late,)),
        "min_tokens": replace(DRAWN, end_ids=(early, *range(0, 160, 3)), min_tokens=18),
        "logprobs": replace(GREEDY, logprobs=20),
        "prompt_logprobs": replace(DRAWN, prompt_logprobs=5),
        "all": Sampling(
            max_tokens=COUNT,
            min_tokens=20,
            temperature=5.0,
            top_k=60,
            top_p=0.95,
            min_p=0.01,
            presence_penalty=1.0,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            logit_bias={5: 3.0, 9: -100.0},
            end_ids=(early,),
            seed=99,
            choice=1,
            logprobs=7,
            prompt_logprobs=2,
        ),
    }


def _first_new(ids: Sequence[int], start: int) -> int:
    return next(ids[n] for n in range(start, len(ids)) if ids[n] not in ids[:n])


NAMES = tuple(make_fields(range(COUNT)))


def assert_same(answer: Answer, expected: Answer, name: str) -> None:
    """Ids and the reason of the end are equal, log probabilities nearly."""
    assert answer.ids == expected.ids, name
    assert answer.reason == expected.reason, name
    for mine, other in (
        (answer.logprobs, expected.logprobs),
        (answer.prompt_logprobs, expected.prompt_logprobs),
    ):
        assert len(mine) == len(other), name
        assert all(_close(a, b) for a, b in zip(mine, other, strict=True)), name


def _close(a: Logprobs | None, b: Logprobs | None) -> bool:
    if a is None or b is None:
        return a is b
    values = zip((a.logprob, *a.top), (b.logprob, *b.top), strict=True)
    return a.top_ids == b.top_ids and all(abs(x - y) < CLOSE for x, y in values)
