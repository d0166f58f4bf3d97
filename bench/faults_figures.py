"""What a run of `bench faults` has found: how long streams paused, how fast requests were, what went wrong.

Pure: answers, strikes and journals in, figures out. The pause of a stream is the longest silence between two events of
one of its choices that a fault falls into, as its client sees it; only streams count that the struck process was
serving just then. A silence may begin a little after the fault, with what was on its way: START_S.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from cbdisagg_bench.faults_answers import Answer, Verdict
from cbdisagg_bench.faults_journal import Journals, Visit
from cbdisagg_bench.faults_moments import Strike
from rich.table import Table

START_S = 0.25
LONGEST = 10
SEVERAL = "several faults"
CAUSES = ("another worker was up", "restart needed", "told to end", "stopped or frozen", "coordinator", SEVERAL)
"""Rows of the pauses. Who takes a stream over can be struck in its turn, before it has said anything."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One answer that is not what it should be, and what one needs to look into it."""

    phase: str
    kind: str
    what: str
    request: int
    salt: str
    began_s: float
    ended_s: float
    body: str
    faults: list[str]
    journals: list[str]


@dataclass(frozen=True, slots=True)
class Spread:
    """Seconds."""

    count: int
    p50: float
    p99: float
    longest: float


@dataclass(frozen=True, slots=True)
class Pause:
    """The silence of one stream that these strikes fell into. Times are of the monotonic clock."""

    answer: Answer
    began: float
    ended: float
    strikes: tuple[Strike, ...]

    @property
    def seconds(self) -> float:
        return self.ended - self.began

    @property
    def cause(self) -> str:
        return cause_of(self.strikes[0]) if len(self.strikes) == 1 else SEVERAL


@dataclass(slots=True)
class Report:
    """Faults by "kind role"; requests a second by phase; pauses in seconds by cause, and "undisturbed".

    `leaked` has a line for each thing that was left; `crashed` for each process that ended by itself; `suspected` for
    each that the service has killed though it was only slow; `errors` counts what clients were told, by text;
    `longest_pauses` are the LONGEST of all pauses, whatever their cause.
    """

    faults: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    left: int = 0
    refused: int = 0
    resumed: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0
    verdicts: dict[str, int] = field(default_factory=lambda: {"lost": 0, "altered": 0, "repeated": 0})
    leaked: list[str] = field(default_factory=list)
    crashed: list[str] = field(default_factory=list)
    suspected: list[str] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    longest_pauses: list[Finding] = field(default_factory=list)
    drift: float = 0.0
    pauses_s: dict[str, Spread] = field(default_factory=dict)
    requests_per_s: dict[str, float] = field(default_factory=dict)

    @property
    def clean(self) -> bool:
        return not (any(self.verdicts.values()) or self.leaked or self.crashed)


def spread(seconds: Sequence[float]) -> Spread:
    if not seconds:
        return Spread(0, 0.0, 0.0, 0.0)
    p50, p99 = (float(value) for value in np.percentile(seconds, [50, 99]))
    return Spread(len(seconds), round(p50, 3), round(p99, 3), round(max(seconds), 3))


def silences(answer: Answer) -> list[tuple[float, float]]:
    """Between two events of one choice."""
    return [silence for times in answer.said_at.values() for silence in pairwise(times)]


def pauses(answers: Iterable[Answer], strikes: Sequence[Strike], visits: Mapping[int, Sequence[Visit]]) -> list[Pause]:
    """For each stream, each of its silences that a fault fell into."""
    found: list[Pause] = []
    for answer in answers:
        met: dict[tuple[float, float], list[Strike]] = {}
        for strike in strikes:
            if not (answer.began < strike.at < answer.ended and serves(answer, strike, visits)):
                continue
            fitting = [(a, b) for a, b in silences(answer) if a < strike.at + START_S and b > strike.at]
            if fitting:
                met.setdefault(max(fitting, key=lambda it: it[1] - it[0]), []).append(strike)
        found += [Pause(answer, began, ended, tuple(those)) for (began, ended), those in met.items()]
    return found


def by_cause(found: Iterable[Pause]) -> dict[str, list[float]]:
    """Seconds; each of CAUSES is there."""
    seconds: dict[str, list[float]] = {cause: [] for cause in CAUSES}
    for pause in found:
        seconds[pause.cause].append(pause.seconds)
    return seconds


def cause_of(strike: Strike) -> str:
    if strike.role == "coordinator":
        return "coordinator"
    if strike.kind in ("stop", "freeze"):
        return "stopped or frozen"
    if strike.alone:
        return "restart needed"
    return "told to end" if strike.kind == "term" else "another worker was up"


def serves(answer: Answer, strike: Strike, visits: Mapping[int, Sequence[Visit]]) -> bool:
    """Whether the struck process was serving this request just then; a coordinator serves everyone."""
    if strike.role == "coordinator":
        return True
    newest: dict[tuple[int, int], Visit] = {}
    for visit in visits.get(answer.ask.number, ()):
        if answer.began <= visit.at <= strike.at:
            newest[visit.sequence.api, visit.sequence.n * 2 + visit.decodes] = visit
    return any(
        visit.incarnation == strike.incarnation
        and (visit.decodes or not any(visit.at < time < strike.at for time in answer.times))
        for visit in newest.values()
    )


def first_events(answers: Iterable[Answer], strikes: Sequence[Strike]) -> dict[str, list[float]]:
    """Seconds to a stream's first event, apart for those that a fault anywhere fell into."""
    calm, struck = "first event, no fault before it", "first event, a fault before it"
    found: dict[str, list[float]] = {calm: [], struck: []}
    for answer in answers:
        if answer.times and answer.ask.streamed:
            met = any(answer.began < strike.at < answer.times[0] for strike in strikes)
            found[struck if met else calm].append(answer.times[0] - answer.began)
    return found


def finding(
    phase: str, verdict: Verdict, answer: Answer, strikes: Sequence[Strike], journals: Journals, origin: float
) -> Finding:
    """`origin` is the time that counts as 0."""
    met = [strike for strike in strikes if answer.began - 1.0 < strike.at < answer.ended]
    return _finding(phase, verdict.kind, verdict.what, answer, met, journals, origin)


def longest(found: Sequence[Pause], journals: Journals, origin: float) -> list[Finding]:
    """The LONGEST pauses, with what one needs to see where the time went."""
    return [
        _finding(
            "during",
            pause.cause,
            f"{pause.seconds:.2f} s of silence from {pause.began - origin:.3f} s on",
            pause.answer,
            pause.strikes,
            journals,
            origin,
        )
        for pause in sorted(found, key=lambda pause: -pause.seconds)[:LONGEST]
    ]


def _finding(
    phase: str, kind: str, what: str, answer: Answer, met: Sequence[Strike], journals: Journals, origin: float
) -> Finding:
    body = {name: value for name, value in answer.ask.body.items() if name not in ("prompt", "messages")}
    mine = [visit for visit in journals.visits.get(answer.ask.number, ()) if answer.began <= visit.at <= answer.ended]
    return Finding(
        phase=phase,
        kind=kind,
        what=what,
        request=answer.ask.number,
        salt=answer.salt,
        began_s=round(answer.began - origin, 3),
        ended_s=round(answer.ended - origin, 3),
        body=f"{'chat' if answer.ask.chat else 'completion'} {body}",
        faults=[f"{it.at - origin:.3f} s: {it.kind} {it.name} {it.event and f'after {it.event}'}" for it in met],
        journals=[journals.first_part(incarnation).name for incarnation in {it.incarnation: 0 for it in mine}],
    )


def tables(report: Report) -> list[Table]:
    faults = Table(title="Faults")
    for name in ("kind", "count"):
        faults.add_column(name, justify="right" if name == "count" else "left")
    for name, count in sorted(report.faults.items()):
        faults.add_row(name, str(count))
    outcome = Table(title=f"{report.requests} answers, {report.left} cut short by their clients")
    outcome.add_column("")
    outcome.add_column("count", justify="right")
    counts = {"leaked": len(report.leaked), "crashed": len(report.crashed), "refused, and came back": report.refused}
    counts |= {"suspected, and only slow": len(report.suspected)}
    counts |= {"sequences that went on elsewhere": sum(report.resumed.values()), "preemptions": report.preemptions}
    for name, count in (report.verdicts | counts).items():
        outcome.add_row(name, str(count))
    pauses = Table(title="Pauses of streams that a fault met, in seconds")
    for name in ("", "streams", "p50", "p99", "longest"):
        pauses.add_column(name, justify="right" if name else "left")
    for cause, it in report.pauses_s.items():
        pauses.add_row(cause, str(it.count), f"{it.p50:.2f}", f"{it.p99:.2f}", f"{it.longest:.2f}")
    rates = Table(title="Requests a second")
    for name in report.requests_per_s:
        rates.add_column(name, justify="right")
    rates.add_row(*(f"{rate:.2f}" for rate in report.requests_per_s.values()))
    return [faults, outcome, pauses, rates]
