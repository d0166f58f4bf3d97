"""What a worker tells the coordinator of the time things take here: a few numbers, from the model that it has fitted.

Knows its own sequences; a prediction for a request that is not here yet is the coordinator's, made of these numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cbdisagg.core.cost import NOTHING, CostModel, Sums
from cbdisagg.core.pace import PATIENCE, TYPICAL, Pace, rows, token_s
from cbdisagg.core.request import Request
from cbdisagg.messages import Forecast

_FEW = 4  # sequences over which the cost of one more is averaged: L has knees


def forecast(
    cost: CostModel, pace: Pace, taken: Collection[Request], streams: Sequence[Request], now: float, starts: float
) -> Forecast:
    """`taken`: all requests that decode here, now or later; `streams`: those of them that do now. `starts`: when the
    next step can start.
    """
    full = NOTHING.rows(max(1, len(taken)), sum(len(request.tokens) for request in taken))
    step_s = cost.sums_s(full)
    alone = rows(streams)
    gain = pace.gain(alone.chunk(0, min(TYPICAL, pace.token_budget)), alone, cost) if streams else 1.0
    beside = alone if gain >= pace.eta else NOTHING  # what prompts share a step with
    chunk, owed_s, steady, each_s = (
        _prompts(cost, pace, streams, alone, beside, starts) if streams else _alone(cost, pace)
    )
    return Forecast(
        step_s=step_s,
        row_s=(cost.sums_s(full.rows(_FEW, 0)) - step_s) / _FEW,
        context_s=cost.d,
        gain=gain,
        tpot_s=min((request.spec.targets.tpot_s for request in taken), default=0.0),
        free_s=starts - now,
        chunk=chunk,
        full_s=cost.sums_s(_with(beside, chunk) if chunk else alone),
        owed_s=owed_s,
        chunk_s=tuple(cost.sums_s(_with(beside, 1 << k)) for k in range((pace.token_budget - 1).bit_length() + 1)),
        steady=steady,
        token_s=each_s,
        square_s=cost.a,
        first_s=cost.first_s,
    )


def prompts_s(known: Forecast, tokens: int) -> float:
    """From the end of the step that runs until so many tokens of prompts have been computed."""
    if tokens <= known.chunk:
        return _chunk_s(known.chunk_s, tokens)
    steps, rest = divmod(tokens - known.chunk, known.steady)
    last_s = max(rest * known.token_s, _chunk_s(known.chunk_s, rest)) if rest else 0.0
    return known.full_s + known.owed_s + steps * known.steady * known.token_s + last_s


def prompts_before(
    known: Forecast, tokens: int, needed_s: float, start: float, streams: int, at: float
) -> tuple[int, float]:
    """What a prompt finds that arrives `at`, where `tokens` of prompts are computed from `start` on: how many of them
    come before it yet, and the seconds until the first step that may hold it. Streams take step after step.

    `needed_s`: `prompts_s` of these tokens.
    """
    begun_s = at - start
    if begun_s < 0:
        return tokens, -begun_s
    if begun_s >= needed_s:
        return 0, (needed_s - begun_s) % known.step_s if streams and known.step_s else 0.0
    if tokens <= known.chunk:
        return 0, needed_s - begun_s  # all are in a step that runs, and nobody joins that
    return tokens - int(tokens * begun_s / needed_s), 0.0


def _chunk_s(points: Sequence[float], tokens: int) -> float:
    """Between the two powers of two around it."""
    if tokens < 2:
        return tokens * points[0]
    k = (tokens - 1).bit_length()
    if k >= len(points):
        k = len(points) - 1
    half = 1 << (k - 1)
    return points[k - 1] + (points[k] - points[k - 1]) * (tokens - half) / half


def _with(beside: Sums, tokens: int) -> Sums:
    """Attention of a prompt to itself left out: it depends on how the tokens are divided among prompts."""
    return beside._replace(tokens=beside.tokens + tokens, prefills=True)


def _alone(cost: CostModel, pace: Pace) -> tuple[int, float, int, float]:
    return pace.token_budget, 0.0, pace.token_budget, token_s(cost, pace.token_budget)


def _prompts(
    cost: CostModel, pace: Pace, streams: Sequence[Request], alone: Sums, beside: Sums, starts: float
) -> tuple[int, float, int, float]:
    """How many tokens the next step may hold, what streams that are late take after it, how many tokens further steps
    may hold, and the seconds for each of these: in steps that take as long as keeps the tightest stream in time, once
    what streams have banked is spent.
    """
    alone_s = cost.sums_s(alone)
    each_s = pace.gamma * min(stream.spec.targets.tpot_s for stream in streams)
    banked_s = min(pace.protected(stream, alone_s, starts) for stream in streams) - starts
    room = max(1, pace.token_budget - beside.decodes)
    least = min(pace.page_size, room)
    chunk = cost.chunk_within(beside, 0, room, banked_s if beside.decodes else banked_s - alone_s)
    chunk = chunk if chunk >= least else 0
    if not beside.decodes:
        spare = 1.0 - alone_s / each_s  # the part of the time that steps of prompts alone can have
        return chunk, 0.0, room, token_s(cost, pace.token_budget) / max(spare, 0.02)
    steady = cost.chunk_within(beside, 0, room, each_s)
    if steady < least:  # one page for the patient
        return chunk, 0.0, least, (PATIENCE + 1) * alone_s / least
    gain_s, owed_s = each_s - alone_s, 0.0
    if not chunk and gain_s > 0:  # after so many steps, the next one not counted, a chunk of `steady` is in time
        owed_s = max(0.0, (each_s - banked_s) / gain_s - 1) * alone_s
    return chunk, owed_s, steady, cost.sums_s(beside.chunk(0, steady)) / steady
