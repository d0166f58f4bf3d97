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


def forecast(cost: CostModel, pace: Pace, taken: Collection[Request], streams: Sequence[Request]) -> Forecast:
    """`taken`: all requests that decode here, now or later; `streams`: those of them that do now."""
    full = NOTHING.rows(max(1, len(taken)), sum(len(request.tokens) for request in taken))
    step_s = cost.sums_s(full)
    prefill_s = token_s(cost, pace.token_budget)
    alone = rows(streams)
    typical = alone.chunk(0, min(TYPICAL, pace.token_budget))
    gain = pace.gain(typical, alone, cost) if streams else 1.0
    tightest = min((request.spec.targets.tpot_s for request in streams), default=0.0)
    return Forecast(
        step_s=step_s,
        row_s=(cost.sums_s(full.rows(_FEW, 0)) - step_s) / _FEW,
        context_s=cost.d,
        prefill_s=prefill_s,
        mixed_s=_mixed_s(cost, pace, alone, pace.gamma * tightest, gain) if streams else prefill_s,
        square_s=cost.a,
        gain=gain,
        tpot_s=min((request.spec.targets.tpot_s for request in taken), default=0.0),
    )


def _mixed_s(cost: CostModel, pace: Pace, alone: Sums, each_s: float, gain: float) -> float:
    """Seconds for each prompt token in steps that take `each_s`: those that keep the tightest stream in time."""
    alone_s = cost.sums_s(alone)
    if gain < pace.eta:
        spare = 1.0 - alone_s / each_s  # the part of the time that steps of prompts alone can have
        return token_s(cost, pace.token_budget) / max(spare, 0.02)
    room = max(1, pace.token_budget - alone.decodes)
    chunk = cost.chunk_within(alone, 0, room, each_s)
    if chunk >= min(pace.page_size, room):
        return cost.sums_s(alone.chunk(0, chunk)) / chunk
    return (PATIENCE + 1) * alone_s / pace.page_size
