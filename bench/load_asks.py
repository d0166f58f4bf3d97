"""What is asked of a server: requests with real prompts, made up or from a file of requests or a published trace.

Knows lengths, ids and words; nothing of HTTP. All comes from the seed, so that every server gets the same work. A
prompt given as a count is filled with random ids, or with as many plain words: nothing of it is in any cache, but that
equal `prefix_blocks` of a trace get equal content.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from cbdisagg.sim import workload
from cbdisagg.sim.workload import BLOCK

_TEXT = (
    "the of and to in is that it was for on are as with they at be this from have or by one had not but what all were "
    "when we there can an your which their said if do will each about how up out them then she many some so these "
    "would other into has more her two like him see time could no make than first been its who now people my made over"
)
WORDS = _TEXT.split()
"""Each is one token with its space, for most tokenizers."""
VOCAB = 49_000
"""Ids below this are tokens of the embedded model, and of most others."""
SHARED, OWN = 0, 1
"""What a stream of random ids is for: a block that others may have too, or the rest of one prompt."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One request: seconds after the start at which it arrives, its prompt as ids or text, the tokens wanted.

    If all arrive at 0, each does as soon as there is a place for it. Targets in milliseconds, 0 for none of its own.
    """

    arrival_s: float
    prompt: list[int] | str
    output_tokens: int
    ttft_ms: float = 0.0
    tpot_ms: float = 0.0

    @property
    def prompt_ids(self) -> int:
        """Tokens of a prompt that is given as ids; 0 for a text, of which only the server knows."""
        return 0 if isinstance(self.prompt, str) else len(self.prompt)


def fill(asks: Iterable[workload.Ask], vocab: int, seed: int, *, as_text: bool = False) -> list[Ask]:
    """The requests with their prompts. Ids are below `vocab`; `as_text`: counted prompts become words."""
    return [
        Ask(ask.arrival_s, _prompt(ask, number, vocab, seed, as_text), ask.output_tokens, ask.ttft_ms, ask.tpot_ms)
        for number, ask in enumerate(asks)
    ]


def _prompt(ask: workload.Ask, number: int, vocab: int, seed: int, as_text: bool) -> list[int] | str:
    if ask.prompt:
        return ask.prompt
    if ask.prompt_ids:
        return list(ask.prompt_ids)
    ids = [n for block in ask.prefix_blocks for n in _random_ids(seed, SHARED, block, BLOCK, vocab)]
    ids += _random_ids(seed, OWN, number, max(0, ask.length - len(ids)), vocab)
    ids = ids[: ask.length]
    return " ".join(WORDS[n % len(WORDS)] for n in ids) if as_text else ids


def _random_ids(seed: int, use: int, number: int, count: int, vocab: int) -> list[int]:
    found: list[int] = np.random.default_rng((seed, use, number)).integers(0, vocab, count).tolist()
    return found
