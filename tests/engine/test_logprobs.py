"""Log probabilities against log_softmax of transformers' own logits."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from cbdisagg.engine.logprobs import best_ids, logprobs
from cbdisagg.messages import Logprobs, Sampling

VOCAB = 200


def expected(twin: Any, sequence: Any) -> torch.Tensor:
    """[prompt + output, vocab]: row n is the distribution of token n + 1."""
    result: torch.Tensor = twin.logits(sequence.prompt + sequence.output).double().log_softmax(-1)
    return result


def check(got: Logprobs, row: torch.Tensor, token: int, alternatives: int) -> None:
    assert got.logprob == pytest.approx(float(row[token]), abs=2e-4)
    assert len(got.top_ids) == len(got.top) == alternatives
    assert list(got.top) == sorted(got.top, reverse=True)
    assert list(got.top) == pytest.approx(row.topk(alternatives).values.tolist(), abs=2e-4)
    assert list(got.top) == pytest.approx(row[list(got.top_ids)].tolist(), abs=2e-4)


def test_of_drawn_tokens(twin: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    """Taken from the model's own distribution, whatever temperature, bias and penalties made of it."""
    samplings = [
        Sampling(max_tokens=12, temperature=0.0, logprobs=5),
        Sampling(max_tokens=12, seed=1, logprobs=0),
        Sampling(max_tokens=12, seed=2, temperature=1.7, top_k=9, logprobs=3, logit_bias={7: 20.0}),
        Sampling(max_tokens=12, seed=3, repetition_penalty=1.5, frequency_penalty=0.5, logprobs=20),
    ]
    prompts = [random.Random(n).choices(range(VOCAB), k=5 + 4 * n) for n in range(len(samplings))]
    for sequence in drive(twin, [make_sequence(*each) for each in zip(prompts, samplings, strict=True)]):
        rows = expected(twin, sequence)[len(sequence.prompt) - 1 :]
        assert len(sequence.logprobs) == len(sequence.output)
        for got, row, token in zip(sequence.logprobs, rows, sequence.output, strict=False):
            check(got, row, token, sequence.sampling.logprobs)
        if sequence.sampling.temperature == 0.0:
            assert all(got.top[0] == got.logprob for got in sequence.logprobs)
            assert [got.top_ids[0] for got in sequence.logprobs] == sequence.output


def test_none_asked_for_none_given(llama: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    sequence = drive(llama, [make_sequence([1, 2, 3], Sampling(max_tokens=4, temperature=0.0))])[0]
    assert (len(sequence.output), sequence.logprobs, sequence.prompt_logprobs) == (4, [], [])


@pytest.mark.parametrize("chunk", [1, 7, 8, 1000])
def test_of_the_prompt_across_chunks(llama: Any, drive: Callable[..., Any], make_sequence: Any, chunk: int) -> None:
    sequences = [
        make_sequence(random.Random(n).choices(range(VOCAB), k=n), Sampling(max_tokens=3, prompt_logprobs=n % 4))
        for n in (1, 2, 8, 9, 75)
    ]
    # A preempted one: its output is no part of the prompt and gets no score again.
    sequences.append(make_sequence([5, 6, 7], Sampling(max_tokens=9, prompt_logprobs=1), output=[8, 9, 10, 11]))
    for sequence in drive(llama, sequences, chunk=lambda: chunk):
        rows = expected(llama, sequence)
        assert len(sequence.prompt_logprobs) == len(sequence.prompt) - 1
        for n, got in enumerate(sequence.prompt_logprobs):
            check(got, rows[n], sequence.prompt[n + 1], sequence.sampling.prompt_logprobs)


def test_equal_alternatives_are_in_the_order_of_ids() -> None:
    logits = np.zeros(40, np.float32)
    logits[[30, 7, 21]] = 1.0
    assert best_ids(logits, 5).tolist() == [7, 21, 30, 0, 1]
    assert best_ids(logits, 2).tolist() == [7, 21]
    assert best_ids(np.arange(40, dtype=np.float32), 39).tolist() == list(range(39, 0, -1))
    got = logprobs(logits, 21, 3)
    assert got.top == (got.logprob,) * 3


def test_large_logits_do_not_overflow() -> None:
    logits = np.array([3e4, 3e4 - 1, -3e4], np.float32)
    got = logprobs(logits, 0, 2)
    assert got.logprob == pytest.approx(-np.log1p(np.exp(-1.0)), abs=2e-3)
