"""How many prompt tokens ride in the next step: what the running streams' deadlines leave, and whether it pays.

Every token has a deadline: the first one arrival + TTFT, token k + 1 gamma x TPOT x k after the first. A stream that
has been faster has banked slack, which is spent on prompts: a chunk is the largest whose step ends before the next
token of any stream is due. A stream that keeps its deadlines keeps its TPOT however long its answer gets, so no length
is guessed. With `catch_up` its next token may be late by what it makes up for within a few more: its mean is what
counts, and prompts need not wait whenever a stream has just begun and banked nothing; but an answer that ends before
that is late. All instants are on this worker's clock: ages travel, not clocks, so deadlines outlive moves and crashes.
The first token starts the clock: one that comes from another worker in the middle of a step may wait for the end.

A stream that lost its pages, with its worker or to an older one, is computed anew before all others: its client waits
in the middle of an answer. Who cannot be served in time does not hold up the others: a new prompt that will be late
comes after those that will not, and a stream that cannot catch up before its last token only keeps a bound on its gaps.
Nobody starves: the oldest prompt that was passed over for PATIENCE steps gets a page's worth in any case.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from cbdisagg.core.cost import NOTHING, CostModel, Sums
from cbdisagg.core.request import Request

PATIENCE = 8
LATE_GAP = 4.0
"""A stream that is lost gets a token at least each so many TPOT, if it can be done."""
TYPICAL = 256
"""Tokens of a chunk by which a worker judges whether mixing pays at all."""


@dataclass(frozen=True, slots=True)
class Shares:
    """What the next step computes: tokens of prompts, by `Request.key`, and with `decodes` a token of each stream."""

    chunks: dict[int, int] = field(default_factory=dict)
    decodes: bool = True


@dataclass(frozen=True, slots=True)
class Pace:
    """`gap_s`: no gap between two tokens of a stream is to be longer; 0: only their mean counts. `catch_up`: a prompt
    may make a stream late by what that makes up for within so many tokens.
    """

    gamma: float
    eta: float
    token_budget: int
    page_size: int
    gap_s: float = 0.0
    catch_up: int = 0

    # -------------------------------------------------------------------------------------------- deadlines

    def deadline(self, request: Request) -> float:
        """When its next token is due."""
        targets = request.spec.targets
        if request.first_token is None:
            return request.arrival + targets.ttft_s
        drawn = len(request.tokens) - request.prompt_len + request.draws_in_flight
        return min(request.first_token + self.gamma * targets.tpot_s * drawn, self._gap_ends(request))

    def _gap_ends(self, request: Request) -> float:
        """When its next token has to come, whatever the mean of the gaps."""
        if not self.gap_s or request.last_token is None:
            return math.inf
        return request.last_token + self.gap_s * (1 + request.draws_in_flight)

    def slack(self, request: Request, cost: CostModel, now: float, each_s: float) -> float:
        """Seconds that a prompt can still wait; below 0: its token will be late whatever is done.

        `each_s`: `token_s`, which is the same for all: who puts a long queue in order computes it once.
        """
        return self.deadline(request) - now - prefill_s(cost, request.remaining, request.planned, each_s)

    def latest(self, stream: Request, step_s: float) -> float:
        """Its deadline, and by how much its next token may be later: what `catch_up` tokens after that make up for."""
        if not self.catch_up:
            return self.deadline(stream)
        later = max(0, min(self.catch_up, _left(stream) - 1))
        late_s = later * max(0.0, self._gain_s(stream, step_s))
        return min(self.deadline(stream) + late_s, self._gap_ends(stream))

    def protected(self, stream: Request, step_s: float, start: float) -> float:
        """When its next token has to come: its deadline, unless it can never catch up with that."""
        due = self.deadline(stream)
        late_s = start + step_s - due
        if late_s <= 0 or late_s <= _left(stream) * self._gain_s(stream, step_s):
            return due
        last = stream.last_token if stream.last_token is not None else start
        return last + LATE_GAP * max(stream.spec.targets.tpot_s, step_s)

    def _bound(self, stream: Request, step_s: float, start: float) -> float:
        """The instant by which a step with prompts has to end for its sake."""
        due = self.protected(stream, step_s, start)
        return max(due, self.latest(stream, step_s)) if self.catch_up else due

    def _gain_s(self, stream: Request, step_s: float) -> float:
        """What it makes up for with each step without prompts. It has these until its longest possible end."""
        return self.gamma * stream.spec.targets.tpot_s - step_s

    def first_waits(self, request: Request, now: float, ends: float, step_s: float) -> bool:
        """Whether its first token, which a prefill worker has drawn, is told when the step that runs here `ends`.

        The second one comes `step_s` after that, whenever the first is told. If this is too late for a first one that
        is told now, the first one waits, unless that made it late itself, or the stream can catch up: each later token
        gains gamma x TPOT - `step_s`, to its longest possible end. A single gap that is too long is never made up for.
        """
        if ends > self.deadline(request):
            return False
        gap_s, due_s = ends + step_s - now, self.gamma * request.spec.targets.tpot_s
        later = request.limit - len(request.tokens) - 2
        return late_for_good(gap_s, due_s, step_s, later) or 0 < self.gap_s < gap_s

    # ------------------------------------------------------------------------------------------------- shares

    def urgency(self, request: Request, cost: CostModel, now: float, each_s: float) -> tuple[int, float, float, int]:
        """A sort key: streams that were interrupted, by age; then the earliest deadline; who will be late anyway last.

        Not the least slack: of two that have as much of it each would fall behind while the other is served, so that
        they take turns and both are late. Of those that will be late anyway the latest comes first, measured by its own
        work (highest response ratio next, Brinch Hansen 1971): a short one does not wait for the whole of a long one,
        and each one's turn comes. `each_s`: see `slack`.
        """
        if request.first_token is not None:
            return (0, 0.0, *request.order)
        slack = self.slack(request, cost, now, each_s)
        if slack >= 0:
            return (1, self.deadline(request), *request.order)
        work_s = prefill_s(cost, request.remaining, request.planned, each_s)
        return (2, slack / work_s, *request.order)

    def shares(self, streams: Sequence[Request], prompts: Sequence[Request], cost: CostModel, now: float) -> Shares:
        """For the next step, which starts at `now`. `streams`: those that decode; `prompts`: those that do not yet."""
        if not prompts:
            return Shares()
        order = prompts
        if len(prompts) > 1:
            each_s = token_s(cost, self.token_budget)
            order = sorted(prompts, key=lambda prompt: self.urgency(prompt, cost, now, each_s))
        room = max(0, self.token_budget - len(streams))
        if not streams:
            return Shares(self._with_the_patient(_fill(order, room), prompts, room))
        alone = rows(streams)
        alone_s = cost.sums_s(alone)
        ends = min(self._bound(stream, alone_s, now) for stream in streams)
        chunks, mixed = self._within(order, alone, room, ends - now, cost)
        if chunks and self.eta and self.gain(mixed, alone, cost) < self.eta:
            chunks, _ = self._within(order, NOTHING, self.token_budget, ends - now - alone_s, cost)
            if chunks and not self._patient(prompts, chunks):
                return Shares(chunks, decodes=False)
            chunks = {}
        return Shares(self._with_the_patient(chunks, prompts, room))

    def gain(self, mixed: Sums, alone: Sums, cost: CostModel) -> float:
        """Seconds of prefill alone that the chunks of a step save, for each second that they add to it."""
        tokens, squares = mixed.tokens - alone.tokens, mixed.squares - alone.squares
        saved = tokens * token_s(cost, self.token_budget) + cost.a * squares
        added = cost.sums_s(mixed) - cost.sums_s(alone)
        return saved / added if added > 0 else float("inf")

    def _within(
        self, order: Sequence[Request], beside: Sums, room: int, seconds: float, cost: CostModel
    ) -> tuple[dict[int, int], Sums]:
        """As much of the prompts, in this order, as a step of `seconds` holds. No chunk smaller than a page."""
        chunks: dict[int, int] = {}
        step = beside
        for prompt in order:
            most = min(prompt.remaining, room)
            least = min(self.page_size, prompt.remaining)
            if most < least:
                break
            count = cost.chunk_within(step, prompt.planned, most, seconds)
            if count >= least:
                chunks[prompt.key] = count
                step = step.chunk(prompt.planned, count)
                room -= count
            if count < most:
                break
        return chunks, step

    def _with_the_patient(self, chunks: dict[int, int], prompts: Sequence[Request], room: int) -> dict[int, int]:
        starving = self._patient(prompts, chunks)
        if starving is None or not room:
            return chunks
        return _trim(chunks, starving.key, min(self.page_size, starving.remaining, room), room)

    def _patient(self, prompts: Sequence[Request], chunks: dict[int, int]) -> Request | None:
        """The oldest prompt, if it has waited long enough to be served in any case, and is not."""
        oldest = min(prompts, key=lambda prompt: prompt.order)
        return oldest if oldest.passed >= PATIENCE and oldest.key not in chunks else None


def _left(stream: Request) -> int:
    """Tokens that it can still draw, at most."""
    return stream.limit - len(stream.tokens) - stream.draws_in_flight


def late_for_good(gap_s: float, due_s: float, step_s: float, later: int) -> bool:
    """Whether a stream whose second token comes `gap_s` after the first is late to the end: each of the `later` ones
    gains what `step_s` lacks of `due_s`.
    """
    return gap_s - due_s > max(0.0, later * (due_s - step_s))


def rows(streams: Sequence[Request]) -> Sums:
    """A step in which these decode."""
    return NOTHING.rows(len(streams), sum(stream.planned + 1 for stream in streams))


def token_s(cost: CostModel, token_budget: int) -> float:
    """Seconds for each prompt token in a full step of nothing else, attention to what is before it left out."""
    return (cost.h + cost.linear_s(token_budget)) / token_budget


def prefill_s(cost: CostModel, tokens: int, start: int, each_s: float) -> float:
    """Seconds for `tokens` of a prompt after `start`, in steps of nothing else. `each_s`: `token_s` of such steps."""
    return tokens * each_s + cost.a * tokens * (2 * start + tokens)


def _fill(order: Sequence[Request], room: int) -> dict[int, int]:
    chunks: dict[int, int] = {}
    for prompt in order:
        if room <= 0:
            break
        chunks[prompt.key] = min(prompt.remaining, room)
        room -= chunks[prompt.key]
    return chunks


def _trim(chunks: dict[int, int], first: int, count: int, room: int) -> dict[int, int]:
    """`count` for the `first`, and the others as far as `room` goes."""
    trimmed, left = {first: count}, room - count
    for key, wanted in chunks.items():
        if left > 0:
            trimmed[key] = min(wanted, left)
            left -= trimmed[key]
    return trimmed
