"""A `Runner` without a model: tokens are a pure function of (prompt, position), so that any two routes can be compared.

Keeps ids as the real one does and refuses the plans that the real one refuses. No torch.
"""

from __future__ import annotations

from zlib import crc32

from cbdisagg.engine.base import PushLayer
from cbdisagg.messages import Admit, Logprobs, Sampled, Sampling, Slice, StepPlan, StepResult, pack


def fake_token(prompt: bytes, position: int, sampling: Sampling, vocab: int = 1000) -> int:
    """The id at `position` of prompt + output; `prompt` as int32 bytes. No end id before `min_tokens`."""
    token = crc32(prompt + pack((position,))) % vocab
    while position - len(prompt) // 4 < sampling.min_tokens and token in sampling.end_ids:
        token = (token + 1) % vocab
    return token


class FakeRunner:
    def __init__(self, layers: int = 2, page_size: int = 16, vocab: int = 1000) -> None:
        self.layers, self.page_size, self.vocab = layers, page_size, vocab
        self.admitted: dict[int, Admit] = {}
        self.lengths: dict[int, int] = {}
        self.pages: dict[int, int] = {}

    def run(self, plan: StepPlan, push: PushLayer) -> StepResult:
        for slot in plan.release:
            del self.admitted[slot], self.lengths[slot], self.pages[slot]
        for admit in plan.admit:
            if admit.slot in self.admitted:
                raise ValueError(f"slot {admit.slot} is taken")
            self.admitted[admit.slot], self.pages[admit.slot] = admit, len(admit.pages)
            self.lengths[admit.slot] = (len(admit.prompt) + len(admit.output)) // 4
        for slot, pages in plan.grow:
            self.pages[slot] += len(pages)
        pushes = [part.push for part in plan.slices if part.push is not None]
        for layer in range(self.layers):
            for each in pushes:
                push(layer, each)
        return StepResult(plan.number, tuple(self._sample(part) for part in plan.slices), 0.0)

    def _sample(self, part: Slice) -> Sampled:
        admit, length, end = self.admitted[part.slot], self.lengths[part.slot], part.start + part.count
        room = self.pages[part.slot] * self.page_size
        if part.count < 1 or end > min(length, room) or (part.draws and end != length):
            raise ValueError(f"{part} of a slot with {length} tokens and {self.pages[part.slot]} pages")
        scored = max(0, min(end, len(admit.prompt) // 4 - 1) - part.start) if part.scores else 0
        ids = (fake_token(admit.prompt, end, admit.sampling, self.vocab),) if part.draws else ()
        self.lengths[part.slot] += len(ids)
        told = (Logprobs(-0.5),) if ids and admit.sampling.logprobs >= 0 else ()
        return Sampled(ids, told, (Logprobs(-0.5),) * scored)
