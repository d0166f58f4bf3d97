"""A run of `bench faults` from a started service to a report: undisturbed, struck, undisturbed again.

Phases: "reference" takes every answer once; "before" asks all again and shows that the service agrees with itself
without faults; "during" asks over and over while faults are made, in stretches, with a look at the idle service after
each; "after" asks once more. Every answer but the reference's is compared.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from itertools import islice

from cbdisagg_bench.faults_answers import Answer, compare
from cbdisagg_bench.faults_client import Client, ask_all, open_session
from cbdisagg_bench.faults_figures import Report, by_cause, finding, first_events, longest, pauses, silences, spread
from cbdisagg_bench.faults_journal import Journals
from cbdisagg_bench.faults_load import Ask, draw_load, rounds
from cbdisagg_bench.faults_moments import Striker, draw_fault
from cbdisagg_bench.faults_service import Rest
from cbdisagg_bench.service import ServiceFailed

STRETCH = 20
"""So many faults, then a look at the idle service: what leaks is seen before its worker is killed."""


@dataclass(frozen=True, slots=True)
class Plan:
    """`kills`: faults to make. `requests`: of one round. `tolerance`: of log probabilities, in nats.

    `each`: kills of each role's workers, in place of faults of all kinds; 0: those. `limit_s`: so long after the
    service was begun to be started no further fault is made; 0: all are.
    """

    kills: int
    requests: int
    concurrency: int
    seed: int
    suspect_s: float
    tolerance: float
    each: int = 0
    limit_s: float = 0.0


Advance = Callable[[str, int, int], None]
"""(phase, done, of)"""


@dataclass
class Trial:
    """One service under load; no fault is made after `until`. `report` has everything once `run` has returned."""

    plan: Plan
    rest: Rest
    striker: Striker
    journals: Journals
    advance: Advance
    until: float
    report: Report = field(default_factory=Report)
    _references: dict[int, Answer] = field(default_factory=dict)
    _answers: defaultdict[str, list[Answer]] = field(default_factory=lambda: defaultdict(list))
    _seconds: Counter[str] = field(default_factory=Counter)
    _origin: float = field(default_factory=time.monotonic)

    async def run(self) -> None:
        """Raises ServiceFailed if there is no reference to compare with."""
        model, room = await self.rest.room()
        load = draw_load(self.plan.requests, self.plan.seed, room)
        async with open_session() as session:
            patient = Client(session, self.rest.url, model, stays=True)
            await self._phase("reference", patient, islice(rounds(load, self.plan.seed), len(load)), len(load))
            self._take_references()
            client = Client(session, self.rest.url, model)
            asks = rounds(load, self.plan.seed + 1)
            await self._phase("before", client, islice(asks, len(load)), len(load))
            await self.rest.settle("before the first fault")
            await self._strike(client, asks)
            await self._phase("after", client, islice(asks, len(load)), len(load))
        await self.rest.settle("at the end")
        await self._sum_up()

    async def _phase(self, phase: str, client: Client, asks: Iterator[tuple[str, Ask]], total: int = 0) -> None:
        answers = self._answers[phase]

        def done(answer: Answer) -> None:
            answers.append(answer)
            if total:
                self.advance(phase, len(answers), total)

        self._seconds[phase] += await ask_all(client, asks, self.plan.concurrency, done)

    def _take_references(self) -> None:
        for answer in self._answers.pop("reference"):
            if answer.error or not answer.whole:
                raise ServiceFailed(f"no fault was made, and request {answer.ask.number} failed: {answer.error}")
            self._references[answer.ask.number] = answer

    async def _strike(self, client: Client, asks: Iterator[tuple[str, Ask]]) -> None:
        if self.plan.each:
            await self._under_load(client, asks, self._kill_each())
            return
        rng, strikes = random.Random(self.plan.seed), self.striker.strikes
        while len(strikes) < self.plan.kills and time.monotonic() < self.until:
            goal = min(self.plan.kills, len(strikes) + STRETCH)
            await self._under_load(client, asks, self._stretch(rng, goal))

    async def _stretch(self, rng: random.Random, goal: int) -> None:
        strikes = self.striker.strikes
        while len(strikes) < goal and time.monotonic() < self.until:
            await self.striker.strike(draw_fault(rng, self.plan.suspect_s))
            self.advance("faults", len(strikes), self.plan.kills)

    async def _kill_each(self) -> None:
        """Workers of all roles at once, each role by itself."""
        async with asyncio.TaskGroup() as group:
            for role in sorted({it.role for it in self.rest.processes.look().values() if it.computes}):
                group.create_task(self.striker.kill_workers(role, self.plan.each, self.until))

    async def _under_load(
        self, client: Client, asks: Iterator[tuple[str, Ask]], faults: Coroutine[None, None, None]
    ) -> None:
        """Make faults while requests run; then a look at the idle service."""
        ended = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._phase("during", client, _until(ended, asks)))
            await faults
            await self.striker.well()
            ended.set()
        await self.rest.settle(f"after {len(self.striker.strikes)} faults")

    async def _sum_up(self) -> None:
        report, strikes = self.report, self.striker.strikes
        for phase, answers in self._answers.items():
            for answer in answers:
                self._judge(phase, answer)
            report.requests_per_s[phase] = round(len(answers) / self._seconds[phase], 2)
        calm = [*self._answers["before"], *self._answers["after"]]
        struck = self._answers["during"]
        report.faults = dict(Counter(f"{it.kind} {it.role}" for it in strikes))
        report.pauses_s = {
            "undisturbed": spread([max(b - a for a, b in gaps) for it in calm if (gaps := silences(it))])
        }
        found = pauses(struck, strikes, self.journals.visits)
        rows = by_cause(found) | first_events(struck, strikes)
        report.pauses_s |= {row: spread(seconds) for row, seconds in rows.items()}
        report.longest_pauses = longest(found, self.journals, self._origin)
        report.leaked = self.rest.leaked
        for process in self.rest.processes.unstruck:
            cause = self.journals.causes.get(process.incarnation, "of an unknown cause")
            # The service has no other reason to send SIGKILL than that a process made no progress.
            (report.suspected if cause == "SIGKILL" else report.crashed).append(f"{process.name} ended: {cause}")
        scrape = await self.rest.scrape()
        report.resumed = {labels: int(count) for labels, count in scrape.of("request_resumed_total").items()}
        report.preemptions = int(scrape.total("num_preemptions_total"))

    def _judge(self, phase: str, answer: Answer) -> None:
        report = self.report
        verdict = compare(answer, self._references[answer.ask.number], self.plan.tolerance)
        report.requests += 1
        report.left += answer.left
        report.refused += answer.refused
        report.drift = max(report.drift, verdict.drift)
        if verdict.kind != "same":
            report.verdicts[verdict.kind] += 1
            report.findings.append(finding(phase, verdict, answer, self.striker.strikes, self.journals, self._origin))
        if answer.error:
            report.errors[answer.error] = report.errors.get(answer.error, 0) + 1


def _until(ended: asyncio.Event, asks: Iterator[tuple[str, Ask]]) -> Iterator[tuple[str, Ask]]:
    while not ended.is_set():
        yield next(asks)
