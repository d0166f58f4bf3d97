"""What each step of a worker did: which sequence had which slot, what was computed for it, what the pool held.

A step trace is never recorded: it is read off a core as events pass through it, while it runs under a benchmark's or a
simulation's clock, or afterwards while a journal is replayed (`trace_journal`), so a live server has one too.

Cells name what a slot did in a step: `prefill` (tokens of a prompt), `decode` (one token drawn), `end` (the same, and
it was the last) or `wasted` (computed for nobody: padding of a static batch).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from cbdisagg.actors.journal import JournalError, read_journal
from cbdisagg.core.effects import Effect, RunStep
from cbdisagg.core.events import StepDone
from cbdisagg.core.request import Request
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import RequestId, Slice

Phase: TypeAlias = Literal["prefill", "decode", "end", "wasted"]


class Cell(NamedTuple):
    """So many `tokens` of `request` from `start` on, in `slot`; `drawn` came of it, maybe the `last` one."""

    slot: int
    request: RequestId
    phase: Phase
    start: int
    tokens: int
    drawn: int
    last: bool


class Step(NamedTuple):
    """Tokens by what they were for; sequences in the batch; the pool's tokens when the step began.

    `held`: of all pages that somebody holds. `filled`: with KV of a living sequence. `promised`: held, and to be filled
    by the sequence that holds them. `waiting`: requests that could not start. `cells` is empty beyond the first
    `detail` steps of a trace.
    """

    at_s: float
    seconds: float
    prefill: int
    decode: int
    wasted: int
    batch: int
    held: int
    filled: int
    promised: int
    waiting: int
    cells: tuple[Cell, ...]

    @property
    def tokens(self) -> int:
        return self.prefill + self.decode + self.wasted


@dataclass(slots=True)
class _Planned:
    at_s: float
    flight: list[tuple[Request, Slice, bool]]  # the last: it was wanted when it was planned
    pool: tuple[int, int, int, int]


@dataclass(slots=True)
class Trace:
    """The steps of one worker. Call `observe` after every event; cells are kept for the first `detail` steps."""

    page_size: int
    pool_tokens: int
    detail: int = 1 << 30
    steps: list[Step] = field(default_factory=list)
    _planned: dict[int, _Planned] = field(default_factory=dict)

    @classmethod
    def of(cls, core: WorkerCore, detail: int = 1 << 30) -> Trace:
        return cls(core.info.page_size, core.pages.total * core.info.page_size, detail)

    def observe(self, core: WorkerCore, now: float, event: object, effects: Sequence[Effect]) -> None:
        if isinstance(event, StepDone):
            self._done(event)
        for effect in effects:
            if isinstance(effect, RunStep):
                flight = [(r, s, not r.ended) for r, s in core.scheduler.flights[effect.plan.number]]
                self._planned[effect.plan.number] = _Planned(now, flight, self._pool(core))

    def _pool(self, core: WorkerCore) -> tuple[int, int, int, int]:
        held = (core.pages.total - core.pages.available()) * self.page_size
        filled = promised = 0
        for request in core.scheduler.running.values():
            capacity, final = len(request.pages) * self.page_size, request.limit - 1  # the last token has no KV
            computed = min(request.planned, capacity)
            filled += computed
            promised += max(0, min(capacity, final) - computed)
        return held, filled, promised, len(core.scheduler.waiting)

    def _done(self, event: StepDone) -> None:
        planned = self._planned.pop(event.result.number, None)
        if planned is None:
            return  # the trace was begun while it was in flight
        cells = [
            _cell(request, part, wanted, len(sampled.ids))
            for (request, part, wanted), sampled in zip(planned.flight, event.result.sampled, strict=True)
        ]
        self.steps.append(
            Step(
                planned.at_s,
                event.result.seconds,
                sum(cell.tokens for cell in cells if cell.phase == "prefill"),
                sum(cell.tokens for cell in cells if cell.phase in ("decode", "end")),
                sum(cell.tokens for cell in cells if cell.phase == "wasted"),
                len({cell.slot for cell in cells if cell.phase != "wasted"}),
                *planned.pool,
                tuple(cells) if len(self.steps) < self.detail else (),
            )
        )


def _cell(request: Request, part: Slice, wanted: bool, drawn: int) -> Cell:
    phase: Phase = "decode"
    if not wanted:
        phase = "wasted"
    elif part.start < request.prompt_len or part.count > 1:
        phase = "prefill"
    elif request.ended:
        phase = "end"
    last = bool(wanted and drawn and request.ended)
    return Cell(part.slot, request.spec.id, phase, part.start, part.count, drawn, last)


def decoding(workers: Sequence[tuple[WorkerCore, Trace]]) -> Trace:
    """That of the first worker which decodes and had something to do; if none had, answers ended with their prompts."""
    busy = [(core, trace) for core, trace in workers if trace.steps]
    return min(busy, key=lambda one: one[0].info.role == "prefill")[1]


def trace_journal(first: Path, detail: int = 1 << 30) -> Trace:
    """The steps in a worker's journal. Raises JournalError if it is none, or the coordinator's."""
    for core, now, event, effects in replay(first):
        if event is None:
            trace = Trace.of(core, detail)
        else:
            trace.observe(core, now, event, effects)
    return trace


def replay(first: Path) -> Iterator[tuple[WorkerCore, float, object, list[Effect]]]:
    """The core of a worker's journal, before any event, then after each with its effects. Raises JournalError."""
    header, records = read_journal(first)
    if header.worker is None:
        raise JournalError(f"{first} is the coordinator's journal; steps are in those of workers")
    core = WorkerCore(header.worker, header.config)
    yield core, 0.0, None, []
    for _, now, _, event, _ in records:
        yield core, now, event, core.handle(event, now)  # type: ignore[arg-type]  # a worker's


def chrome_events(trace: Trace, name: str) -> dict[str, Any]:
    """The Chrome and Perfetto trace format: a row for each slot, counters for pool and batch. Times in microseconds."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": name}},
    ]
    for step in trace.steps:
        at, length = step.at_s * 1e6, step.seconds * 1e6
        pool = {"filled": step.filled, "promised": step.promised, "unused": step.held - step.filled - step.promised}
        events.append({"ph": "C", "pid": 1, "ts": at, "name": "KV tokens", "args": pool})
        events.append({"ph": "C", "pid": 1, "ts": at, "name": "sequences", "args": {"batch": step.batch}})
        events.extend(_event(cell, at, length) for cell in step.cells)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _event(cell: Cell, at: float, length: float) -> dict[str, Any]:
    told = {"request": str(cell.request), "start": cell.start, "tokens": cell.tokens}
    return {
        "ph": "X",
        "pid": 1,
        "tid": cell.slot,
        "ts": at,
        "dur": length,
        "name": f"{cell.phase} {cell.request.n}",
        "cat": cell.phase,
        "args": told,
    }


def mean_batch(steps: Iterable[Step]) -> float:
    """Living sequences in a step, weighted by the steps' seconds; by their number if they took no time."""
    steps = list(steps)
    total = sum(step.seconds for step in steps)
    if not total:
        return sum(step.batch for step in steps) / max(1, len(steps))
    return sum(step.batch * step.seconds for step in steps) / total
