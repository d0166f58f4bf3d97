"""Tuning while serving, but for the process that it takes: what was asked lately, whether to turn the knobs, and back.

    requests end -> enough of them: a question (History) -> a search in the simulator (answer) -> the knobs are turned
    if that is predicted to gain (Steering) -> the next requests say whether it did: else the last good ones again

Knows the coordinator's messages and what a search returns. Latencies are not the coordinator's to see: a request was in
time if it ended within TTFT + TPOT for each later token. One that was refused was not, and is part of what was asked:
those that are refused are not like the others, long prompts most of all.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from cbdisagg.config import Config
from cbdisagg.core.knobs import configured
from cbdisagg.core.profile import Profile
from cbdisagg.messages import Finished, Generate, Knobs, Rejected, RequestId, split_hashes
from cbdisagg.sim.demand import demand
from cbdisagg.sim.goodput import Goal, Lab, lasting_s
from cbdisagg.sim.tune import KNOBS, Search
from cbdisagg.sim.variants import Values, changed
from cbdisagg.sim.workload import BLOCK, Ask

WINDOW = 300
"""Requests that a question is about, and that must have ended since the last one."""
BUSY = 429
"""The status of a refusal for want of time or room: not that of a service that has no worker, which no knob helps."""
PART = 0.9
GAIN = 0.03
"""The least that a turn must be predicted to gain: less is the simulator's error."""
LOSS = 0.05
"""A turn is taken back if a greater part than this of the requests is no longer in time: less is chance."""
TURNS = 60
LIVE = tuple(knob for knob in KNOBS if knob.key.removeprefix("policy.") in Knobs.__struct_fields__)
"""What can be turned without a restart, beside the pins."""


@dataclass(slots=True)
class Ended:
    """Of one that was `refused` nobody knows how long its answer would have been: `ask` says how long at most.

    `blocks`: for each full block of BLOCK tokens of its prompt, what stands for all that it begins with up to there.
    """

    ask: Ask
    blocks: Sequence[bytes]
    in_time: bool
    refused: bool = False


class History:
    """The last requests that have ended, as their coordinator saw them. Bounded in what it remembers."""

    def __init__(self, window: int = WINDOW, page_size: int = 0) -> None:
        """`page_size`: of the hashes that requests bring; 0: whether prompts begin alike is not looked at."""
        self._window, self._page_size = window, page_size
        self._open: OrderedDict[RequestId, tuple[float, Generate]] = OrderedDict()
        self._ended: OrderedDict[RequestId, Ended] = OrderedDict()
        self._new = 0

    @property
    def full(self) -> bool:
        """As many as a question needs have ended since the last one."""
        return self._new >= self._window

    def hear(self, now: float, message: object) -> None:
        """What the coordinator is told, and what it tells."""
        if isinstance(message, Generate):
            self._open.setdefault(message.id, (now - message.age_s, message))
            while len(self._open) > 10 * self._window:  # lost with an api or a worker: never Finished
                self._open.popitem(last=False)
        elif isinstance(message, Finished) and message.output_tokens > 0:
            self._end(now, message)
        elif isinstance(message, Rejected) and message.status == BUSY and not message.submission:
            self._refuse(message.id)

    def _end(self, now: float, message: Finished) -> None:
        """A request that has moved ends on each of its workers: the last end has all of its tokens."""
        begun = self._open.get(message.id)
        if begun is None:
            return
        arrival, request = begun
        targets, tokens = request.targets, message.output_tokens
        known = self._ended.pop(message.id, None)
        self._new += known is None
        tokens = max(tokens, known.ask.output_tokens if known is not None else 0)
        in_time = now - arrival <= targets.ttft_s + targets.tpot_s * (tokens - 1)
        self._add(message.id, Ended(_asked(arrival, request, tokens), self._blocks(request), in_time))

    def _refuse(self, id: RequestId) -> None:
        begun = self._open.get(id)
        if begun is not None:
            self._new += 1
            arrival, request = begun
            ask = _asked(arrival, request, request.sampling.max_tokens)
            self._add(id, Ended(ask, self._blocks(request), in_time=False, refused=True))

    def _blocks(self, request: Generate) -> Sequence[bytes]:
        """Its pages' hashes are chained: the one at a block's end stands for all before it, too."""
        if not self._page_size or BLOCK % self._page_size:
            return ()
        stride = BLOCK // self._page_size
        return split_hashes(request.hashes)[stride - 1 :: stride]

    def _add(self, id: RequestId, ended: Ended) -> None:
        self._ended[id] = ended
        while len(self._ended) > self._window:
            gone, _ = self._ended.popitem(last=False)
            self._open.pop(gone, None)

    def begin_anew(self) -> None:
        """What has ended so far does not count for the next question."""
        self._new = 0

    def take(self) -> tuple[list[Ask], float]:
        """The last requests, by arrival from 0 on, and the part of them that was in time; the count begins anew.

        The answers of refused ones are taken to be as long as those of the others are on average.
        """
        self.begin_anew()
        ended = sorted(self._ended.values(), key=lambda one: one.ask.arrival_s)
        start = ended[0].ask.arrival_s
        served = [one.ask.output_tokens for one in ended if not one.refused]
        usual = round(sum(served) / len(served)) if served else sys.maxsize
        numbers: dict[bytes, int] = {}  # of blocks, as prompts that begin alike have them in common
        asks = [
            replace(
                one.ask,
                arrival_s=one.ask.arrival_s - start,
                output_tokens=min(one.ask.output_tokens, usual) if one.refused else one.ask.output_tokens,
                prefix_blocks=tuple(numbers.setdefault(block, len(numbers)) for block in one.blocks),
            )
            for one in ended
        ]
        return asks, sum(one.in_time for one in ended) / len(ended)


def _asked(arrival: float, request: Generate, tokens: int) -> Ask:
    targets = request.targets
    return Ask(
        arrival,
        tokens,
        len(request.prompt) // 4,
        ttft_ms=1e3 * targets.ttft_s,
        tpot_ms=1e3 * targets.tpot_s,
        tenant=request.tenant,
        priority=request.priority,
    )


class Question(Struct, frozen=True):
    """`knobs`: those in force. `most`: simulations."""

    config: Config
    profile: Profile
    asks: tuple[Ask, ...]
    knobs: Knobs
    most: int = TURNS


class Answer(Struct, frozen=True):
    """The best knobs found, and by what part more the service would keep up with under them."""

    knobs: Knobs
    gain: float


def answer(question: Question) -> Answer:
    targets = question.config.targets
    goal = Goal(targets.ttft_ms / 1e3, targets.tpot_ms / 1e3, PART)
    lab = Lab(question.profile, demand(question.asks, lasting_s(goal, question.asks)))
    search = Search(question.config, lab, goal, LIVE)
    found = search.run(question.most, {"now": _values(question.knobs), **search.starts()})
    now = found.starts["now"]
    if not found.sustained:
        return Answer(question.knobs, 0.0)
    gain = found.sustained / now - 1 if now else float(found.sustained > 0)
    return Answer(configured(changed(question.config, found.best)), gain)


def _values(knobs: Knobs) -> Values:
    return {"policy.mode": "auto", **{f"policy.{name}": getattr(knobs, name) for name in knobs.__struct_fields__}}


class Steering:
    """Which knobs are in force, which were the last good ones, and which have disappointed."""

    def __init__(self, knobs: Knobs) -> None:
        self.now = knobs
        self._good = knobs
        self._before: float | None = None  # the part in time when they were turned
        self._bad: list[Knobs] = []

    def judge(self, in_time: float) -> Knobs | None:
        """After the first requests under new knobs: those to go back to, or None if they may stay."""
        before, self._before = self._before, None
        if before is None or in_time >= before - LOSS:
            self._good = self.now
            return None
        self._bad = [*self._bad[-7:], self.now]
        self.now = self._good
        return self.now

    def adopt(self, found: Answer, in_time: float) -> Knobs | None:
        """The knobs to turn to, or None: too little to gain, or tried before in vain."""
        if found.gain <= GAIN or found.knobs == self.now or found.knobs in self._bad:
            return None
        self._good, self.now, self._before = self.now, found.knobs, in_time
        return self.now
