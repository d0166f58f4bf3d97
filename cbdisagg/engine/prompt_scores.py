"""Log probabilities of a prompt's tokens, for the slices that ask for them. The same on a CPU and on a device.

Knows slices, slots and the head; how a row is scored is the sampler's business.
"""

from __future__ import annotations

from torch import Tensor

from cbdisagg.engine.model import Decoder
from cbdisagg.engine.samplers import Sampler
from cbdisagg.engine.slots import Slots
from cbdisagg.messages import Logprobs, Slice

ROWS = 64
"""Rows whose logits exist at once: 64 rows of 49,152 float32 logits are 12 MB."""


def score_prompt(decoder: Decoder, sampler: Sampler, slots: Slots, part: Slice, hidden: Tensor) -> tuple[Logprobs, ...]:
    """Of the tokens after the slice's first `len(hidden)` ones. `hidden` [rows, width]: what the head takes."""
    alternatives = max(0, slots[part.slot].sampling.prompt_logprobs)
    targets = slots.ids[part.slot, part.start + 1 :]
    scores: list[Logprobs] = []
    for first in range(0, len(hidden), ROWS):
        logits = decoder.logits(hidden[first : first + ROWS]).cpu()
        tokens = targets[first : first + len(logits)].tolist()
        scores += sampler.score(logits, tokens, [alternatives] * len(logits))
    return tuple(scores)
