"""The steps of one worker: which is next, how long it is predicted to take, and what is learnt when it has been run.

Knows the scheduler, the deadlines and the cost model, which it puts together; neither messages nor peers. With a plan
in flight the next one starts when that is predicted to end.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cbdisagg.core.cost import Sums, Work, sums
from cbdisagg.core.flow import Flow
from cbdisagg.core.forecast import forecast
from cbdisagg.core.pace import Pace, Shares, rows
from cbdisagg.core.refit import Refit
from cbdisagg.core.request import Request
from cbdisagg.core.scheduler import Outcome, Scheduler
from cbdisagg.core.turns import Turns
from cbdisagg.messages import Costs, Forecast, StepPlan, StepResult


class Steps:
    """`pace` may be replaced at any time: the next plan follows it."""

    def __init__(self, scheduler: Scheduler, pace: Pace, costs: Costs, turns: Turns, plans_ahead: int) -> None:
        self.scheduler = scheduler
        self.pace = pace
        self.refit = Refit(costs)
        self.turns = turns
        self.plans_ahead = plans_ahead
        self._flow = Flow()
        self._work: dict[int, Sums] = {}  # of the plans in flight
        self._free_at = 0.0  # when these are predicted to have ended

    def plan(self, now: float) -> tuple[StepPlan | None, list[Request]]:
        """The next step, if one may be planned, and the requests preempted for it."""
        flights = self.scheduler.flights
        if len(flights) > self.plans_ahead or not self.scheduler.has_work:
            return None, []
        starts = max(now, self._free_at) if flights else now
        plan, victims = self.scheduler.plan(lambda streams, prompts: self._share(streams, prompts, starts))
        if plan is not None:
            work = sums(Work(part.start, part.count, part.count == 1 and part.start > 0) for part in plan.slices)
            self._work[plan.number] = work
            self._free_at = starts + self.refit.model.sums_s(work)
        return plan, victims

    def done(self, result: StepResult) -> list[Outcome]:
        """What living requests got. Their tenants have had it."""
        self.refit.observe(self._work.pop(result.number), result.seconds)
        outcomes = self.scheduler.commit(result)
        for request, part, _ in outcomes:
            self.turns.serve(request, part.count - part.draws, part.draws)
        return outcomes

    def to_relieve(self, now: float) -> Request | None:
        """A stream that would better be decoded elsewhere, after a step."""
        return self._flow.pick(self._streams(), self.pace, self.refit.model, now)

    def first_waits(self, request: Request, now: float) -> bool:
        """Whether its first token, drawn by a prefill worker, is told at the end of the step that runs here."""
        if not self.scheduler.flights:
            return False
        following = rows(self._streams()).rows(1, len(request.tokens) + 1)
        return self.pace.first_waits(request, now, max(now, self._free_at), self.refit.model.sums_s(following))

    def forecast(self, taken: Collection[Request], now: float) -> Forecast:
        """`taken`: all requests that decode here, now or later."""
        starts = max(now, self._free_at) if self.scheduler.flights else now
        return forecast(self.refit.model, self.pace, taken, self._streams(), now, starts)

    def waiting(self, now: float) -> list[Request]:
        """Those that wait, in the order in which they are to be looked at."""
        return self.turns.order(self.scheduler.waiting, self.pace, self.refit.model, now)

    def _streams(self) -> list[Request]:
        return [request for request in self.scheduler.running.values() if request.decoding]

    def _share(self, streams: Sequence[Request], prompts: Sequence[Request], starts: float) -> Shares:
        return self.pace.shares(streams, prompts, self.refit.model, starts)
