"""The requests of `bench faults`: a mix of what real clients send, from a seed alone.

Knows bodies, not answers. Each request carries its own `seed`, which comes back in the journals of the service: that is
how a fault is told to have met a request. Prompts are words, so any tokenizer can read them; their lengths are wanted
in tokens, by a ratio that the service is asked for.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

FIRST_SEED = 1_000_000
"""The seed of request 0; request n has the n-th after it."""
LEAVERS = 0.05
"""The share of clients that leave before the end."""
VOCABULARY = (
    "river stone market winter teacher bridge yellow seven morning letter garden ship forest clock silver music door "
    "candle mountain paper bird kitchen road summer window doctor apple night story water king table fire horse city "
    "captain green history number island school friend cloud engine bread village moon painter station answer"
)
WORDS = VOCABULARY.split()
SHAPES = ((4, 60), (100, 400), (600, 1500))
"""Prompts in tokens: short, middle, long; drawn SHAPE_WEIGHTS times in a hundred."""
SHAPE_WEIGHTS = (70, 21, 9)
STOPS: tuple[str | list[str], ...] = (" the", ["\n", "."], [" and", ","], "e s")


@dataclass(frozen=True, slots=True)
class Room:
    """What the service takes: the longest prompt + output in tokens, and how many tokens one of WORDS is."""

    max_len: int
    tokens_per_word: float


@dataclass(frozen=True, slots=True)
class Ask:
    """One request. Its client leaves after `leave_events` events, or after `leave_s` seconds; 0: it stays."""

    number: int
    chat: bool
    body: dict[str, Any]
    leave_events: int = 0
    leave_s: float = 0.0

    @property
    def streamed(self) -> bool:
        return bool(self.body.get("stream"))

    @property
    def leaves(self) -> bool:
        return bool(self.leave_events or self.leave_s)


def draw_load(count: int, seed: int, room: Room) -> list[Ask]:
    """`count` requests. Those that share a prefix share it within this load."""
    rng = random.Random(seed)
    prefixes = [_words(rng, length, room) for length in (90, 180, 300)]
    return [_draw(number, rng, prefixes, room) for number in range(count)]


def rounds(load: list[Ask], seed: int) -> Iterator[tuple[str, Ask]]:
    """The load over and over, each time in another order and with another cache salt: what is cached is of this round.

    The salt changes no token.
    """
    rng = random.Random(seed)
    number = 0
    while True:
        for ask in rng.sample(load, len(load)):
            yield f"{seed}-{number}", ask
        number += 1


def _draw(number: int, rng: random.Random, prefixes: list[list[str]], room: Room) -> Ask:
    body: dict[str, Any] = {"seed": FIRST_SEED + number}
    chat = rng.random() < 0.4
    body |= _sampling(rng) | _lengths(rng) | _scores(rng, chat)
    if rng.random() < 0.15:
        body["n"] = 2
    if rng.random() < 0.2:
        body["stop"] = rng.choice(STOPS)
        body["include_stop_str_in_output"] = rng.random() < 0.3
    most = room.max_len - body.get("max_tokens", 0) - 64  # 64: what a chat template adds
    body |= _question(rng, chat, _prompts(rng, prefixes, most, room))
    if rng.random() < 0.7:
        body["stream"] = True
        if rng.random() < 0.6:
            body["stream_options"] = {"include_usage": True, "continuous_usage_stats": rng.random() < 0.3}
    leave_events, leave_s = 0, 0.0
    if rng.random() < LEAVERS:
        if body.get("stream") and rng.random() < 0.6:
            leave_events = rng.randint(1, 12)
        else:
            leave_s = rng.uniform(0.02, 2.0)
    return Ask(number, chat, body, leave_events, leave_s)


def _sampling(rng: random.Random) -> dict[str, Any]:
    """Greedy or drawn, one filter at most, and penalties on either."""
    fields: dict[str, Any] = {"temperature": 0.0}
    if rng.random() < 0.5:
        fields["temperature"] = rng.choice((0.7, 1.0, 1.3))
        fields |= rng.choice(({}, {"top_p": 0.9}, {"top_k": 40}, {"min_p": 0.05}))
    if rng.random() < 0.3:
        fields |= rng.choice(
            ({"presence_penalty": 0.6}, {"frequency_penalty": 0.4}, {"repetition_penalty": 1.2}, {"logit_bias": {5: 2}})
        )
    return fields


def _lengths(rng: random.Random) -> dict[str, Any]:
    """Mostly free to end early; now and then an edge."""
    most = min(120, 1 + int(rng.expovariate(1 / 28)))
    return {
        "max_tokens": most,
        **rng.choices(
            (
                {},
                {"ignore_eos": True},
                {"min_tokens": most},
                {"min_tokens": most // 2},
                {"max_tokens": 1},
                {"max_tokens": 2},
            ),
            (50, 20, 8, 8, 7, 7),
        )[0],
    }


def _scores(rng: random.Random, chat: bool) -> dict[str, Any]:
    if rng.random() >= 0.3:
        return {}
    if chat:
        return {"logprobs": True, "top_logprobs": rng.randint(0, 3)}
    fields: dict[str, Any] = {"logprobs": rng.randint(0, 3)}
    return fields | rng.choices(({}, {"echo": True}, {"prompt_logprobs": 1}), (70, 15, 15))[0]


def _prompts(rng: random.Random, prefixes: list[list[str]], most: int, room: Room) -> list[str]:
    """One text, now and then two; a quarter begin with one of the prefixes. `most`: tokens of them together."""
    count = 2 if rng.random() < 0.06 else 1
    texts = []
    for _ in range(count):
        low, high = rng.choices(SHAPES, SHAPE_WEIGHTS)[0]
        words = _words(rng, rng.randint(low, high), room)
        if rng.random() < 0.25:
            words = rng.choice(prefixes) + words
        texts.append(" ".join(words[: max(1, int(most / count / room.tokens_per_word))]))
    return texts


def _question(rng: random.Random, chat: bool, texts: list[str]) -> dict[str, Any]:
    if not chat:
        return {"prompt": texts if len(texts) > 1 else texts[0]}
    messages = [{"role": "user", "content": texts[-1]}]
    if len(texts) > 1 or rng.random() < 0.3:
        messages.insert(0, {"role": "system", "content": texts[0] if len(texts) > 1 else "Answer in short sentences."})
    return {"messages": messages}


def _words(rng: random.Random, tokens: int, room: Room) -> list[str]:
    return rng.choices(WORDS, k=max(1, int(tokens / room.tokens_per_word)))
