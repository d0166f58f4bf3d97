"""Where a worker's streams grow: draws become tokens with an index, and the reasons to stop are checked.

One writer per stream: the worker that decodes it. Runs are collected during an event and leave as one message per api.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from cbdisagg.core.effects import Effect, Tell
from cbdisagg.core.request import Request
from cbdisagg.messages import Address, Finish, RequestId, Sampled, TokenRun, Tokens


class Streams:
    def __init__(self) -> None:
        self._runs: dict[int, dict[RequestId, TokenRun]] = {}

    def extend(self, request: Request, sampled: Sampled, now: float) -> bool:
        """Append what was drawn, up to the end of the sequence. True if that has come."""
        index = len(request.tokens) - request.prompt_len
        reason: Literal["stop", "length"] | None = None
        kept = 0
        for token in sampled.ids:
            request.tokens.append(token)
            kept += 1
            reason = _end(request, token, len(request.tokens))
            if reason is not None:
                break
        prompt_logprobs = (None, *request.scores) if request.wants_scores else ()
        request.wants_scores = False
        finish = _finish(request, reason, now) if reason is not None else None
        ids, logprobs = sampled.ids[:kept], sampled.logprobs[:kept]
        cached = request.cached_tokens if index == 0 else None
        run = TokenRun(request.spec.id, request.spec.submission, index, ids, logprobs, prompt_logprobs, finish, cached)
        self._runs.setdefault(request.spec.id.api, {})[request.spec.id] = run
        return reason is not None

    def forget(self, request: Request) -> None:
        """It has ended: a run that names no end is of no use to anybody."""
        runs = self._runs.get(request.spec.id.api, {})
        run = runs.get(request.spec.id)
        if run is not None and run.finish is None:
            del runs[request.spec.id]

    def flush(self, apis: Mapping[int, Address]) -> list[Effect]:
        runs, self._runs = self._runs, {}
        return [Tell(apis[n], Tokens(tuple(new.values()))) for n, new in runs.items() if n in apis and new]


def ends(request: Request, sampled: Sampled) -> bool:
    """Whether its stream would end with what was drawn."""
    known = len(request.tokens)
    return any(_end(request, token, known + n) is not None for n, token in enumerate(sampled.ids, 1))


def _end(request: Request, token: int, known: int) -> Literal["stop", "length"] | None:
    """`known`: tokens of the sequence, with this one."""
    sampling = request.spec.sampling
    if token in sampling.end_ids and known - request.prompt_len >= sampling.min_tokens:
        return "stop"
    return "length" if known >= request.limit else None


def _finish(request: Request, reason: Literal["stop", "length"], now: float) -> Finish:
    first = now if request.first_token is None else request.first_token
    return Finish(
        reason,
        preemptions=request.preemptions,
        queue_s=request.queue_s,
        prefill_s=request.prefill_s,
        decode_s=now - first,
    )
