"""How to generate, by the names that users know from vLLM, checked when they are written down.

Knows ranges that hold for every model; what depends on the model (ids in its vocabulary, its context) is checked when a
request is made. Every error names the field, the value and what would be right.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from cbdisagg.messages import Sampling

GREEDY_BELOW = 1e-5
"""A lower temperature than this is greedy, as in vLLM."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to generate the sequences of one prompt. Raises ValueError or TypeError where a value is not possible.

    `n` sequences; `temperature` 0 is greedy; `top_k` 0 or -1, `top_p` 1 and `min_p` 0 switch these filters off.
    `max_tokens` None goes to the end of the context. `stop` strings end the text and are left out of it unless
    `include_stop_str_in_output`; `stop_token_ids` end the sequence; `ignore_eos` goes on past the model's own end
    tokens. `logprobs` and `prompt_logprobs` ask for that many alternatives besides the token's own (0: that alone,
    None: nothing). The same `seed` gives the same tokens; without one each call draws its own.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    stop: str | Iterable[str] | None = None
    stop_token_ids: Iterable[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    logit_bias: Mapping[int, float] | None = None

    def __post_init__(self) -> None:
        _whole("n", self.n, 1)
        _number("temperature", self.temperature, 0, math.inf, "at least 0, which is greedy")
        _number("top_p", self.top_p, 0, 1, "above 0 and at most 1", open_below=True)
        _whole("top_k", self.top_k, -1, "at least 1, or 0 for no limit")
        _number("min_p", self.min_p, 0, 1, "between 0 and 1")
        _number("presence_penalty", self.presence_penalty, -2, 2, "between -2 and 2")
        _number("frequency_penalty", self.frequency_penalty, -2, 2, "between -2 and 2")
        _number("repetition_penalty", self.repetition_penalty, 0, math.inf, "above 0; 1 is none", open_below=True)
        _whole("min_tokens", self.min_tokens, 0)
        for name, least in (("max_tokens", 1), ("logprobs", 0), ("prompt_logprobs", 0), ("seed", None)):
            value = getattr(self, name)
            if value is not None:
                _whole(name, value, least)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens is {self.min_tokens}, more than max_tokens, which is {self.max_tokens}")
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r}; it must be True or False")
        # Normal forms, so that a generator given for a list is not used up by the first request.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _bias(self.logit_bias))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return tuple(self.stop_token_ids or ())

    def sampling(self, prompt_tokens: int, max_len: int, vocab_size: int, end_ids: Iterable[int]) -> Sampling:
        """What the workers need to know, for the first of the `n` sequences of a prompt in a model's context.

        `max_tokens` beyond the context ends at it. Raises ValueError where the model cannot do what is asked.
        """
        room = max_len - prompt_tokens
        if room < 1:
            raise ValueError(
                f"the prompt has {prompt_tokens} tokens; the maximum context length is {max_len}, and at least one of "
                "it must be left for the output"
            )
        for name, ids in (("stop_token_ids", self.stop_ids), ("logit_bias", self.logit_bias or {})):
            wrong = next((id for id in ids if not 0 <= id < vocab_size), None)
            if wrong is not None:
                raise ValueError(f"{name} has the token id {wrong}; this model has ids 0 to {vocab_size - 1}")
        max_tokens = room if self.max_tokens is None else min(room, self.max_tokens)
        end = () if self.ignore_eos else tuple(end_ids)
        return Sampling(
            max_tokens=max_tokens,
            min_tokens=min(self.min_tokens, max_tokens),
            temperature=0.0 if self.temperature < GREEDY_BELOW else float(self.temperature),
            top_k=self.top_k if 0 < self.top_k < vocab_size else 0,
            top_p=float(self.top_p),
            min_p=float(self.min_p),
            presence_penalty=float(self.presence_penalty),
            frequency_penalty=float(self.frequency_penalty),
            repetition_penalty=float(self.repetition_penalty),
            logit_bias=dict(self.logit_bias or {}),
            end_ids=tuple(dict.fromkeys((*end, *self.stop_ids))),
            seed=(secrets.randbits(63) if self.seed is None else self.seed) & (2**63 - 1),
            logprobs=-1 if self.logprobs is None else self.logprobs,
            prompt_logprobs=-1 if self.prompt_logprobs is None else self.prompt_logprobs,
        )


def _whole(name: str, value: Any, least: int | None, right: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}; it must be a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name} is {value}; it must be {right or f'at least {least}'}")


def _number(name: str, value: Any, least: float, most: float, right: str, *, open_below: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}; it must be a number")
    if not (least < value if open_below else least <= value) or value > most or math.isinf(value):
        raise ValueError(f"{name} is {value}; it must be {right}")


def _stop_strings(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for text in strings:
        if not isinstance(text, str):
            raise TypeError(f"stop has {text!r}; it must be a string or several")
        if not text:
            raise ValueError("stop has an empty string, which would end every text; leave it out")
    return strings


def _stop_ids(ids: Iterable[int] | None) -> tuple[int, ...]:
    known = tuple(ids or ())
    for id in known:
        _whole("a token id in stop_token_ids", id, 0)
    return known


def _bias(bias: Mapping[int, float] | None) -> dict[int, float] | None:
    for id, value in (bias or {}).items():
        _whole("a token id in logit_bias", id, 0)
        _number(f"logit_bias[{id}]", value, -100, 100, "between -100 and 100")
    return None if bias is None else {id: float(value) for id, value in bias.items()}
