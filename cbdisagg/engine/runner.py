"""Runs plans on a torch model: the engine's `Runner`.

Knows slots, the decoder and the sampler, and in which order a plan is applied; not why a slice is as it is. A drawn id
joins its slot's ids at once, so the next plan may name it before the host has seen it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from cbdisagg.engine.base import PushLayer
from cbdisagg.engine.batch import Batch, make_batch, pusher
from cbdisagg.engine.model import Decoder
from cbdisagg.engine.prompt_scores import score_prompt
from cbdisagg.engine.samplers import sampler_for
from cbdisagg.engine.slots import Held, Slots
from cbdisagg.messages import Logprobs, Sampled, Slice, StepPlan, StepResult

NOTHING = Sampled(())


class TorchRunner:
    """Call `run` from one thread. The pool that the decoder writes belongs to the caller."""

    def __init__(self, decoder: Decoder, max_len: int) -> None:
        self.decoder = decoder
        self.sampler = sampler_for(decoder.ops)
        self.slots = Slots(max_len, page_size=decoder.pool.shape[4], vocab=decoder.spec.vocab)

    @property
    def layers(self) -> int:
        return self.decoder.spec.layers

    @torch.inference_mode()
    def run(self, plan: StepPlan, push: PushLayer) -> StepResult:
        """See `Runner`. Raises ValueError or KeyError for a plan that its slots cannot serve: a bug of the planner."""
        started = time.perf_counter()
        self.slots.apply(plan)
        sampled = self._compute(plan.slices, push) if plan.slices else ()
        return StepResult(plan.number, sampled, time.perf_counter() - started)

    def _compute(self, slices: Sequence[Slice], push: PushLayer) -> tuple[Sampled, ...]:
        batch = make_batch(slices, self.slots, self.decoder.attention)
        hidden, logits = self.decoder.forward(batch, pusher(slices, push))
        results = dict.fromkeys(range(len(slices)), NOTHING)
        for n, first, count in batch.scores:
            scores = score_prompt(self.decoder, self.sampler, self.slots, slices[n], hidden[first : first + count])
            results[n] = Sampled((), prompt_logprobs=scores)
        for n, drawn in self._draw(batch, slices, hidden, logits):
            results[n] = Sampled(drawn.ids, drawn.logprobs, results[n].prompt_logprobs)
        return tuple(results.values())

    def _draw(
        self, batch: Batch, slices: Sequence[Slice], hidden: Tensor, logits: Tensor | None
    ) -> list[tuple[int, Sampled]]:
        """(number of the slice, what it drew), after each drawn id has joined its slot."""
        if not batch.draws:
            return []
        if logits is None:
            logits = self.decoder.logits(hidden[: len(batch.draws)])
        slots = [slices[n].slot for n in batch.draws]
        held = [self.slots[slot] for slot in slots]
        tokens = self.sampler.draw(logits, [each.drawer for each in held], [each.length for each in held])
        told = self._tell(logits, held, tokens)
        for slot, token in zip(slots, tokens, strict=True):
            self.slots.append(slot, token)
        return [
            (n, Sampled((token,), told.get(row, ())))
            for row, (n, token) in enumerate(zip(batch.draws, tokens, strict=True))
        ]

    def _tell(self, logits: Tensor, held: Sequence[Held], tokens: Sequence[int]) -> dict[int, tuple[Logprobs, ...]]:
        """Row -> the log probability of its token, where one is asked for."""
        rows = [row for row, each in enumerate(held) if each.sampling.logprobs >= 0]
        if not rows:
            return {}
        scores = self.sampler.score(
            logits[rows], [tokens[row] for row in rows], [held[row].sampling.logprobs for row in rows]
        )
        return {row: (score,) for row, score in zip(rows, scores, strict=True)}
