"""When a first token from a prefill worker is told that comes while a step runs here: at once, or at the step's end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
from core_world import END_ID, VOCAB, Setting, WorkerActor, World, expected_output, next_token
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from cbdisagg.api.client import Stream
from cbdisagg.config import Config, Policy
from cbdisagg.config import Targets as Aims
from cbdisagg.core.effects import Effect, Tell
from cbdisagg.core.request import Request, State
from cbdisagg.messages import Costs, KvReady, Sampling, Targets, Tokens

STEP = 0.0625
HURRIED, EASY = Targets(10.0, 0.001), Targets(10.0, 10.0)
LONG = Sampling(max_tokens=12)


@dataclass
class Landing:
    """A decode worker in a step from `began` on, and a stream whose KV has come all but for the word of it."""

    service: World
    prefill: WorkerActor
    decode: WorkerActor
    stream: Stream
    began: float
    told: list[float] = field(default_factory=list)  # when its tokens were

    @property
    def request(self) -> Request:
        return self.decode.core.requests[self.stream.id]

    def land(self, after: float) -> None:
        """The KvReady arrives so long after the step has begun."""
        self.service.now = self.began + after
        self.service.deliver((self.prefill.address.incarnation, self.decode.address.incarnation))

    def end_step(self, after: float = STEP) -> None:
        self.service.now = self.began + after
        self.decode.step()

    def finish(self) -> None:
        self.service.settle()
        self.service.check_quiet()
        for stream in self.service.api.streams:
            if stream.id.n not in self.service.api.cancelled:
                prompt = list(stream.request.prompt[::4])
                wanted = expected_output(prompt, stream.request.sampling, self.service.setting.max_len)
                assert list(stream.output) == wanted


def landing(
    targets: Targets = HURRIED,
    *,
    gamma: float = 1.0,
    gap_ms: float = 0.0,
    waited: float = 0.0,
    step: float = STEP,
    sampling: Sampling = LONG,
    prompt: tuple[int, ...] = (3, 2, 1),
    busy: bool = True,
    plans_ahead: int = 0,
    checksums: bool = False,
) -> Landing:
    """The stream was asked for `waited` before the step began. Every step takes `step`, as is predicted."""
    config = Config(
        policy=Policy(mode="disaggregate", gamma=gamma, suspect_s=1e9, silent_s=1e9), targets=Aims(gap_ms=gap_ms)
    )
    costs = Costs(0.0, 0.0, ((1, step), (512, step)), 0.0, 0.0, 0.0, 0.0, 1e9)
    setting = Setting(
        ("prefill", "decode"),
        config,
        pages=24,
        plans_ahead=plans_ahead,
        checksums=checksums,
        step_s=lambda slices: step,
        costs=costs,
    )
    service = World(setting)
    service.settle()
    prefill, decode = service.workers
    if busy:
        running = service.api.submit([1, 2, 3], Sampling(max_tokens=30), EASY, None)
        _until(service, lambda: len(running.output) >= 3 and bool(decode.plans), [prefill, decode])
    stream = service.api.submit(list(prompt), sampling, targets, None)
    _until(service, lambda: _ready_pair(service) is not None, [prefill])
    service.now += waited
    if busy:
        decode.step()  # a step ends, and the next begins
    here = Landing(service, prefill, decode, stream, service.now)
    _watch(here)
    return here


def _until(service: World, true: Callable[[], bool], workers: list[WorkerActor]) -> None:
    """Messages arrive, and these workers do what they have to."""
    for _ in range(2_000):
        if true():
            return
        pairs = service.busy_pairs()
        if pairs:
            service.deliver(pairs[0])
            continue
        worker, name = next((worker, name) for worker in workers for name in worker.possible())
        getattr(worker, name)()
    raise AssertionError("it has not come to that")


def _ready_pair(service: World) -> tuple[int, int] | None:
    """Between whom the next message is a KvReady."""
    return next((pair for pair in service.busy_pairs() if isinstance(service.queues[pair][0][1], KvReady)), None)


def _watch(here: Landing) -> None:
    """Note when each token of the stream leaves the decode worker."""
    perform = here.decode.perform

    def watched(effect: Effect) -> None:
        if isinstance(effect, Tell) and isinstance(effect.message, Tokens):
            for run in effect.message.runs:
                if run.id == here.stream.id:
                    assert run.index == len(here.told), "a token is told twice, or left out"
                    here.told += [here.service.now] * len(run.ids)
        perform(effect)

    here.decode.perform = watched  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------------------------ the rule

SLACK = 1e-6  # predictions are sums of floats: cases on the very edge say nothing

fractions = st.floats(0.0, 1.0)


@given(
    tpot=st.floats(0.01, 3.0),  # in steps
    ttft=st.floats(0.1, 4.0),
    waited=st.floats(0.0, 2.0),
    after=fractions,
    gamma=st.sampled_from([0.5, 0.98, 1.0]),
    gap=st.sampled_from([0.0, 0.7, 1.5]),
    tokens=st.sampled_from([2, 3, 12]),
    step=st.sampled_from([0.01, 0.0625]),
)
@example(tpot=3.0, ttft=4.0, waited=0.0, after=0.25, gamma=1.0, gap=1.5, tokens=12, step=STEP)
@example(tpot=1.25, ttft=4.0, waited=0.0, after=0.25, gamma=1.0, gap=0.0, tokens=12, step=STEP)
@example(tpot=1.25, ttft=4.0, waited=0.0, after=0.35, gamma=1.0, gap=0.0, tokens=3, step=STEP)
@settings(max_examples=60, deadline=None)
def test_a_first_token_waits_for_the_end_of_the_step_if_that_keeps_a_deadline_and_breaks_none(
    tpot: float, ttft: float, waited: float, after: float, gamma: float, gap: float, tokens: int, step: float
) -> None:
    """Times in steps: token n, but for the first, comes n after the step has begun, whenever the first is told."""
    spare = after + gamma * tpot * (tokens - 1) - tokens  # at the last one, if the first is told at once
    soonest = after + min(gap or 9.0, gamma * tpot) - 2  # and at the second one
    assume(min(abs(spare), abs(soonest), abs(2 - after - gap), abs(waited + 1 - ttft)) > SLACK)
    targets = Targets(ttft * step, tpot * step)
    here = landing(
        targets, gamma=gamma, gap_ms=gap * step * 1e3, waited=waited * step, step=step, sampling=Sampling(tokens)
    )
    here.land(after * step)
    waits = not here.told
    keeps_all = soonest >= 0 or (spare >= 0 and not 0 < gap < 2 - after)
    assert waits == (not keeps_all and waited + 1 <= ttft)
    here.end_step(step)
    assert here.told == [here.began + (step if waits else after * step)], "told at the end of the step, and once"
    for n in range(2, tokens + 1):
        here.end_step(n * step)
        assert len(here.told) == n
    if keeps_all or (waits and gamma * tpot >= 1):
        assert here.told[-1] - here.told[0] <= (tpot * (tokens - 1) + SLACK) * step, "its TPOT is kept"
    here.finish()


def test_a_first_token_never_waits_where_no_step_runs() -> None:
    here = landing(busy=False)
    here.land(0.01)
    assert here.told == [here.began + 0.01]
    here.finish()


@pytest.mark.parametrize("ends", ["length", "end token"])
def test_a_first_token_that_is_the_last_does_not_wait(ends: str) -> None:
    prompt = next((a, b, 1) for a in range(1, VOCAB) for b in range(VOCAB) if next_token([a, b, 1], 0) == END_ID)
    sampling = Sampling(max_tokens=12, end_ids=(END_ID,))
    here = landing(sampling=sampling, prompt=prompt)
    if ends == "length":
        here.request.limit = here.request.prompt_len + 1
        here.request.spec = replace(here.request.spec, sampling=LONG)
    here.land(0.01)
    assert here.told == [here.began + 0.01] and here.stream.id not in here.decode.core.requests
    here.end_step()
    assert len(here.told) == 1


def test_a_token_that_is_not_the_first_does_not_wait() -> None:
    """The prompt and what was drawn have been computed anew elsewhere: its clock has long been running."""
    here = landing(Targets(10.0, 1.2 * STEP), sampling=Sampling(3))
    here.request.first_token = here.began
    here.request.tokens.append(1)
    here.told.append(here.began)
    here.land(0.01)
    assert here.told == [here.began, here.began + 0.01]


# ---------------------------------------------------------------------------------------- what happens meanwhile


def waiting(**options: object) -> Landing:
    here = landing(**options)  # type: ignore[arg-type]  # the same
    here.land(0.01)
    if here.decode.checks:
        here.decode.check()
    assert not here.told and here.request.state is State.RESERVED
    return here


def test_it_is_counted_while_it_waits() -> None:
    here = waiting()
    core = here.decode.core
    load = core.reporter._load(core, here.service.now)
    assert (load.running, load.reserved, load.busy) == (1, 1, True)
    one = core.steps.forecast([], here.service.now)
    assert one.tpot_s == 0.0 and load.forecast.tpot_s == HURRIED.tpot_s, "the forecast is for it too"
    here.finish()


def test_whoever_is_cancelled_while_its_first_token_waits_gets_none() -> None:
    here = waiting()
    here.service.api.cancel(here.stream)
    while pairs := here.service.busy_pairs():
        here.service.deliver(pairs[0])
    here.end_step()
    assert not here.told and not here.decode.core.handoffs.reservations
    here.finish()


def test_its_prefill_worker_may_die_while_it_waits() -> None:
    here = waiting()
    here.service.kill(here.prefill.address.incarnation)
    while pairs := here.service.busy_pairs():
        here.service.deliver(pairs[0])
    assert here.request.state is State.RESERVED and not here.told
    here.end_step()
    assert here.told == [here.began + STEP] and not here.decode.core.reporter.local_prefills
    here.finish()


def test_a_worker_that_leaves_tells_it_before_it_asks_who_goes_on() -> None:
    here = waiting()
    here.decode.leave()
    assert not here.request.returned
    here.end_step()
    assert here.told == [here.began + STEP] and here.request.returned
    here.service.settle()
    assert list(here.stream.output) == expected_output([3, 2, 1], LONG, here.service.setting.max_len)


def test_whose_api_dies_while_it_waits_is_forgotten() -> None:
    here = waiting()
    here.service.kill(here.service.api.address.incarnation)
    while pairs := here.service.busy_pairs():
        here.service.deliver(pairs[0])
    assert here.stream.id not in here.decode.core.requests
    here.end_step()
    assert not here.told
    here.service.settle()
    here.service.check_quiet()


def test_damaged_pages_are_computed_anew_at_once() -> None:
    here = landing(checksums=True)
    for page in here.request.pages:
        here.decode.pool[page] = [7] * here.service.setting.page_size
    here.land(0.01)
    here.decode.check()
    assert here.request.state is State.RUNNING and not here.told
    assert here.decode.core.reporter.local_prefills == {"damaged": 1}
    here.finish()


def test_checked_pages_wait_as_others_do() -> None:
    here = waiting(checksums=True)
    here.end_step()
    assert here.told == [here.began + STEP]
    here.finish()


def test_with_a_plan_ahead_it_waits_for_one_step_and_no_more() -> None:
    here = waiting(plans_ahead=1)
    assert len(here.decode.core.scheduler.flights) == 2
    here.end_step()
    assert here.told == [here.began + STEP]
    here.finish()
