"""In float32 a sequence gets the tokens of `transformers.generate`, however it is cut and in whatever company."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from cbdisagg.messages import Sampling

pytestmark = pytest.mark.usefixtures("path")

PAGE, CONTEXT, VOCAB = 8, 96, 200
NEARLY_EQUAL = 1e-4


def greedy(count: int) -> Sampling:
    return Sampling(max_tokens=count, temperature=0.0)


def check(twin: Any, sequences: Iterable[Any]) -> None:
    """Equal up to the first token whose two best logits were nearly equal; more than 2 % of such ends fail."""
    served = list(sequences)
    cut = 0
    for sequence in served:
        ids, gaps = twin.greedy(sequence.prompt, sequence.sampling.max_tokens)
        until = next((n for n, gap in enumerate(gaps) if gap < NEARLY_EQUAL), len(ids))
        assert sequence.output[:until] == ids[:until], f"prompt of {len(sequence.prompt)}"
        assert len(sequence.output) == len(ids)
        cut += sequence.output != ids
    assert cut <= 0.02 * len(served)


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


@pytest.mark.parametrize("mixed", [True, False])
def test_random_chunks_pages_and_company(twin: Any, drive: Callable[..., Any], make_sequence: Any, mixed: bool) -> None:
    chance = random.Random(7)
    sequences = [
        make_sequence(prompt(length, seed=length), greedy(count), start_step=chance.randrange(12))
        for length, count in [(1, 20), (3, 30), (9, 12), (17, 25), (40, 20), (33, 1), (64, 31), (24, 24)]
    ]
    check(twin, drive(twin, sequences, seed=1, chunk=lambda: chance.randint(1, 20), mixed=mixed))


@pytest.mark.parametrize("chunk", [1, PAGE - 1, PAGE, PAGE + 1, 1000])
def test_edge_lengths(llama: Any, drive: Callable[..., Any], make_sequence: Any, chunk: int) -> None:
    """Prompts of one token, about a page, about a chunk, and one that leaves room for a single token."""
    lengths = sorted({1, 2, PAGE - 1, PAGE, PAGE + 1, 2 * PAGE, min(chunk, 60) + 1, CONTEXT - 1})
    sequences = [make_sequence(prompt(n, seed=n), greedy(min(6, CONTEXT - n))) for n in lengths]
    check(llama, drive(llama, sequences, seed=chunk, chunk=lambda: chunk))


def test_full_context(twin: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    check(twin, drive(twin, [make_sequence(prompt(2, seed=5), greedy(CONTEXT - 2))]))


def test_admitted_again_with_output(twin: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    """What preemption and a move do: the rest of a sequence, from prompt and the output so far."""
    whole = drive(twin, [make_sequence(prompt(11, seed=2), greedy(20))])[0]
    for given in (1, 7, 19):
        again = make_sequence(whole.prompt, whole.sampling, output=whole.output[:given])
        assert drive(twin, [again], seed=given)[0].output == whole.output


def test_more_threads_give_the_same_tokens(llama: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    runner = llama.runner(threads=2)
    sequences = [make_sequence(prompt(n, seed=n), greedy(20)) for n in (3, 30, 50)]
    check(llama, drive(llama, sequences, runner=runner))


def test_bfloat16_is_close(llama: Any, drive: Callable[..., Any], make_sequence: Any) -> None:
    """Not token for token: the log probabilities of a prompt stay near those in float32."""
    both = []
    for dtype in ("float32", "bfloat16"):
        sampling = Sampling(max_tokens=1, temperature=0.0, prompt_logprobs=0)
        sequence = make_sequence(prompt(60, seed=3), sampling)
        served = drive(llama, [sequence], runner=llama.runner(dtype))[0]
        both.append([each.logprob for each in served.prompt_logprobs])
    differences = [abs(a - b) for a, b in zip(*both, strict=True)]
    assert 0.0 < sum(differences) / len(differences) < 0.2
