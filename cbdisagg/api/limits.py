"""From a request's numbers to a `Sampling`: every range that the configuration or the model decides.

Knows the limits, the context length and what each field means to the workers; knows no HTTP. The values that leave here
are valid, as messages.py promises to the workers.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from cbdisagg.api.errors import invalid, shown
from cbdisagg.api.prompts import check_ids, too_long
from cbdisagg.api.schemas_requests import GenerationRequest
from cbdisagg.config import Limits
from cbdisagg.messages import Sampling

GREEDY_BELOW = 1e-5
"""A lower temperature than this is greedy: dividing logits by it would leave float32's range."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """What this model and this server allow. `end_ids` end a sequence of the model's own accord."""

    limits: Limits
    max_len: int
    vocab: int
    end_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TextRules:
    """How a sequence's tokens become text."""

    stop: tuple[str, ...]
    include_stop: bool
    skip_special: bool
    hide: frozenset[int]


def output_room(
    bounds: Bounds, prompt_tokens: int, asked: int | None, default: int | None, *, field: str = "max_tokens"
) -> int:
    """The most tokens to generate, 0 only if asked for; `default` None: to the context's end. Raises ApiError 400."""
    room = bounds.max_len - prompt_tokens
    cap = bounds.limits.max_output_tokens
    if prompt_tokens == 0:
        raise invalid("prompt", "is empty: it has no tokens; at least one is needed")
    if room < 1:
        raise too_long("prompt", bounds.max_len, f"the prompt has {prompt_tokens}, which leaves none for an answer")
    if asked is None:
        return min(room, cap or room, room if default is None else default)
    if cap and asked > cap:
        raise invalid(field, f"is {shown(asked)}, more than this server allows; ask for at most {cap}")
    if asked > room:
        what = f"the prompt has {prompt_tokens} and {field} asks for {shown(asked)} more; at most {room} fit"
        raise too_long(field, bounds.max_len, what)
    return asked


def sampling_of(request: GenerationRequest, bounds: Bounds, *, max_tokens: int, logprobs: int, scores: int) -> Sampling:
    """The first choice's sampling; `logprobs` and `scores` (of the prompt) are numbers of alternatives, -1 for none.

    Raises ApiError 400.
    """
    min_tokens = request.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"is {shown(min_tokens)}, more than max_tokens, which is {max_tokens}")
    temperature = 1.0 if request.temperature is None else request.temperature
    top_k = max(request.top_k or 0, 0)
    if request.top_p == 0:
        top_k = 1  # nothing but the likeliest token is left
    seed = secrets.randbits(63) if request.seed is None else request.seed
    return Sampling(
        max_tokens=max(max_tokens, 1),  # none are asked for when only the prompt's scores are: one is drawn and dropped
        min_tokens=min_tokens,
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_k=top_k if top_k < bounds.vocab else 0,
        top_p=1.0 if not request.top_p else request.top_p,
        min_p=request.min_p or 0.0,
        presence_penalty=request.presence_penalty or 0.0,
        frequency_penalty=request.frequency_penalty or 0.0,
        repetition_penalty=1.0 if request.repetition_penalty is None else request.repetition_penalty,
        logit_bias=_bias(request, bounds),
        end_ids=_end_ids(request, bounds),
        seed=seed & (2**63 - 1),  # a negative seed is as good as any
        logprobs=logprobs,
        prompt_logprobs=scores,
    )


def text_rules(request: GenerationRequest, bounds: Bounds) -> TextRules:
    """Raises ApiError 400."""
    stop = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop or ())
    limits = bounds.limits
    if len(stop) > limits.stop:
        raise invalid("stop", f"has {len(stop)} strings; at most {limits.stop} are allowed")
    for text in stop:
        if not text:
            raise invalid(
                "stop", "holds an empty string, which would end every text; leave it out or give text to stop at"
            )
        if len(text) > limits.stop_chars:
            raise invalid("stop", f"holds a string of {len(text)} characters; at most {limits.stop_chars} are allowed")
    include_stop = bool(request.include_stop_str_in_output)
    hide = frozenset(bounds.end_ids) if include_stop else frozenset(bounds.end_ids) | set(request.stop_token_ids or ())
    return TextRules(stop, include_stop, request.skip_special_tokens is not False, hide)


def choices_of(request: GenerationRequest, limits: Limits) -> int:
    n = request.n or 1
    if n > limits.n:
        raise invalid("n", f"is {shown(n)}, more than this server allows; ask for at most {limits.n}")
    return n


def alternatives(field: str, asked: int | None, limits: Limits) -> int:
    """How many alternatives per token; -1 when the field is absent."""
    if asked is None:
        return -1
    if asked > limits.logprobs:
        raise invalid(field, f"is {shown(asked)}, more than this server allows; ask for at most {limits.logprobs}")
    return asked


def _bias(request: GenerationRequest, bounds: Bounds) -> dict[int, float]:
    bias = request.logit_bias or {}
    if len(bias) > bounds.limits.logit_bias:
        raise invalid("logit_bias", f"has {len(bias)} entries; at most {bounds.limits.logit_bias} are allowed")
    check_ids("logit_bias", list(bias), bounds.vocab)
    return bias


def _end_ids(request: GenerationRequest, bounds: Bounds) -> tuple[int, ...]:
    extra = request.stop_token_ids or []
    if len(extra) > bounds.limits.stop_token_ids:
        raise invalid("stop_token_ids", f"has {len(extra)} ids; at most {bounds.limits.stop_token_ids} are allowed")
    check_ids("stop_token_ids", extra, bounds.vocab)
    own = () if request.ignore_eos else bounds.end_ids
    return tuple(dict.fromkeys((*own, *extra)))
