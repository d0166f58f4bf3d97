"""Steps of the engine, timed one by one: which ones `cbdisagg profile` measures, and how.

Knows the runner and plans, as a worker gives them; neither scheduler nor messages. Every sequence of a step is admitted
anew before it, so that a step can be repeated; the time is the runner's own, of the plan with the slices alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from cbdisagg.core.cost import Work
from cbdisagg.engine.base import Runner
from cbdisagg.engine.build import ModelInfo, build_runner, describe
from cbdisagg.messages import Admit, Push, Sampling, Slice, StepPlan, pack

KINDS = ("decode small", "decode large", "prefill", "mixed")
LONG = "long"
REGIONS = (*KINDS, LONG)
SMALL_BATCH, SHORT = 8, 1024
"""Sequences that still are a small batch, tokens that still are a short sequence: with a longer one a step is long."""
CHUNKS = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
CONTEXTS = (64, 256, 1024, 4096)
_GREEDY = Sampling(max_tokens=1 << 20, temperature=0.0)


@dataclass(slots=True)
class Case:
    """One kind of step, and how long it took each time."""

    work: tuple[Work, ...]
    seconds: list[float] = field(default_factory=list)

    @property
    def region(self) -> str:
        if max(part.start + part.tokens for part in self.work) > SHORT:
            return LONG
        decodes = sum(part.decodes for part in self.work)
        if decodes == 0:
            return "prefill"
        if decodes < len(self.work):
            return "mixed"
        return "decode small" if decodes <= SMALL_BATCH else "decode large"

    @property
    def median(self) -> float:
        return float(np.median(self.seconds))


@dataclass(frozen=True, slots=True)
class Range:
    """How far the steps go: sequences that decode at once, tokens of a chunk, tokens of one sequence, the chunk
    included, and tokens of all sequences together (`pool`).
    """

    batch: int
    chunk: int
    context: int
    pool: int


def sweep(reach: Range) -> list[Case]:
    """The steps to fit: each size alone, over all lengths, and chunks beside decodes."""
    batches = _upto(reach.batch, (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128, 256))
    chunks = _upto(reach.chunk, CHUNKS)
    contexts = _upto(reach.context, CONTEXTS)
    fitting = {batch: min(reach.context, reach.pool // batch) for batch in batches if batch <= reach.pool}
    cases = [decode([context] * batch) for batch, most in fitting.items() for context in _upto(most, CONTEXTS)]
    cases += [prefill(start, chunk) for chunk in chunks for start in _starts(reach, chunk, contexts)]
    for batch in sorted({batches[0], max(n for n in batches if n <= SMALL_BATCH), batches[-1]}):
        for chunk in chunks[::-2]:
            starts = _starts(reach, chunk, contexts)
            for start in sorted({starts[0], starts[-1]}):
                context = min(512, reach.context // 2, (reach.pool - start - chunk) // batch)
                if context >= 1:
                    cases.append(Case((*decode([context] * batch).work, *prefill(start, chunk).work)))
    return cases


def _upto(most: int, sizes: Sequence[int]) -> list[int]:
    """Those, and the most itself."""
    return [*(size for size in sizes if size < most), most]


def _starts(reach: Range, chunk: int, contexts: Sequence[int]) -> list[int]:
    """Tokens that may have been computed before a chunk: none, each of the contexts, as many as there is room for."""
    last = reach.context - chunk
    return sorted({0, last, *(context for context in contexts[1:] if context < last)})


def unseen(reach: Range, count: int, seed: int) -> list[Case]:
    """Steps that are not fitted: any mixture of lengths, of each region in turn. Chunks of all sizes, from the least
    that is fitted on, are as likely.
    """
    draw = random.Random(seed)
    regions = [region for region in REGIONS if region != LONG or reach.context > SHORT]
    return [_drawn(regions[n % len(regions)], reach, draw) for n in range(count)]


def _drawn(region: str, reach: Range, draw: random.Random) -> Case:
    """Of a long one, the first sequence is."""
    kind = draw.choice(KINDS) if region == LONG else region
    few = draw.randint(1, min(SMALL_BATCH, reach.batch))
    many = draw.randint(min(SMALL_BATCH + 1, reach.batch), reach.batch)
    batch = {"decode small": few, "decode large": many, "prefill": 0, "mixed": draw.choice((few, many))}[kind]
    prompts = draw.randint(1, min(2, reach.chunk)) if kind in ("prefill", "mixed") else 0
    short, left = min(SHORT, reach.context), reach.pool
    longest = reach.context if region == LONG else short
    work: list[Work] = []
    for n in range(prompts + batch):
        others = prompts + batch - n - 1
        least, room = (SHORT + 1, left - others) if region == LONG and n == 0 else (1, left // (others + 1))
        tokens = draw.randint(least, max(least, min(longest if n == 0 else short, room)))
        left -= tokens
        if n < prompts:
            most = reach.chunk // prompts
            chunk = min(tokens, round(math.exp(draw.uniform(math.log(min(CHUNKS[0], most)), math.log(most)))))
            start = tokens - chunk if least > 1 else draw.choice((0, tokens - chunk))
            work += prefill(start, chunk).work
        else:
            work += decode([tokens]).work
    return Case(tuple(work))


def decode(contexts: Sequence[int]) -> Case:
    return Case(tuple(Work(context - 1, 1, True) for context in contexts))


def prefill(start: int, chunk: int) -> Case:
    return Case((Work(start, chunk, False),))


class Stepper:
    """The model in this process, with a pool that holds the largest of the `cases`, full of small random numbers."""

    def __init__(
        self,
        folder: Path,
        dtype: str,
        threads: int,
        page_size: int,
        cases: Sequence[Case],
        seed: int,
        *,
        weights: str = "same",
        cache: Path | None = None,
    ) -> None:
        """`weights`, `cache`: as for `build_runner`."""
        info = describe(folder, dtype, weights, cache)
        self._start(info, page_size, cases, seed)
        longest = max(part.start + part.tokens for case in cases for part in case.work) + 1
        torch.manual_seed(seed)
        kind = getattr(torch, dtype)
        page_bytes = info.page_bytes(page_size)
        content = torch.empty(info.layers, len(self._pages), page_bytes // kind.itemsize, dtype=kind).normal_()
        memory = content.view(torch.uint8).numpy()
        self._runner: Runner = build_runner(
            folder, dtype, memory, page_size, longest, threads, weights=weights, cache=cache
        )

    @classmethod
    def of(cls, info: ModelInfo, runner: Runner, page_size: int, cases: Sequence[Case], seed: int) -> Stepper:
        """With a runner that is there already, and whose pool holds the largest of the `cases`."""
        stepper = cls.__new__(cls)
        stepper._start(info, page_size, cases, seed)
        stepper._runner = runner
        return stepper

    def _start(self, info: ModelInfo, page_size: int, cases: Sequence[Case], seed: int) -> None:
        self.info = info
        self._page_size = page_size
        self._random = np.random.default_rng(seed)
        pages = max(sum(self._pages_for(part) for part in case.work) for case in cases)
        self._pages = self._random.permutation(pages).tolist()
        self._plans = 0
        self._held: tuple[int, ...] = ()

    def measure(self, cases: Sequence[Case], rounds: int, enough_s: float = math.inf) -> Iterator[Case]:
        """Each case once in every round, so that a slow spell of the machine falls on all; yields as it goes.

        What has just been loaded, or not been used for long, is slow: the first step of all is not counted. What has
        been measured for `enough_s` is left out: the longer a step, the less noise is in its time.
        """
        self._run(cases[0].work)
        for _ in range(rounds):
            for case in cases:
                if sum(case.seconds) < enough_s:
                    case.seconds.append(self._run(case.work))
                yield case

    def _pages_for(self, part: Work) -> int:
        return -(-(part.start + part.tokens + 1) // self._page_size)

    def _run(self, work: Sequence[Work]) -> float:
        admits, left = [], list(self._pages)
        for slot, part in enumerate(work):
            needed = self._pages_for(part)
            pages, left = tuple(left[:needed]), left[needed:]
            ids = self._random.integers(0, self.info.vocab, part.start + part.tokens)
            admits.append(Admit(slot, pack(ids.tolist()), b"", pages, _GREEDY))
        self._plan(release=self._held, admit=tuple(admits))
        self._held = tuple(range(len(work)))
        return self._plan(slices=tuple(Slice(n, part.start, part.tokens, 1) for n, part in enumerate(work)))

    def _plan(
        self, release: tuple[int, ...] = (), admit: tuple[Admit, ...] = (), slices: tuple[Slice, ...] = ()
    ) -> float:
        self._plans += 1
        return self._runner.run(StepPlan(self._plans, release, admit, (), slices), _no_push).seconds


def _no_push(layer: int, push: Push) -> None:
    raise AssertionError("no slice of a profile pushes")
