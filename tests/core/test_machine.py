"""State machines over whole worlds: any order of messages, steps, cancels, deaths, duplicates; what must hold."""

from __future__ import annotations

import sys
from random import Random
from typing import Any

import pytest
from core_world import END_ID, SUPERVISOR, Setting, WorkerActor, World, expected_output
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from cbdisagg.config import Config, Kv, Policy, Scheduler
from cbdisagg.messages import Sampling, Targets, unpack

ROLES = [
    ("any",),
    ("prefill", "decode"),
    ("any", "any"),
    ("prefill", "prefill", "decode", "decode"),
    ("prefill", "any"),
]


@st.composite
def settings_of_a_world(draw: st.DrawFn) -> Setting:
    """Small pools, so that everything that can run out does."""
    roles = draw(st.sampled_from(ROLES))
    config = Config(
        kv=Kv(prefix_cache=draw(st.booleans())),
        scheduler=Scheduler(token_budget=draw(st.sampled_from([3, 8])), mixed=draw(st.booleans())),
        policy=Policy(
            mode=draw(st.sampled_from(["disaggregate"] * 4 + ["auto", "aggregate"])),
            queue_limit=draw(st.sampled_from([64, 3])),
            suspect_s=1e9,
            silent_s=1e9,
        ),
    )
    kinds = draw(st.sampled_from([("shm", "shm"), ("zmq", "zmq"), ("shm", "zmq"), ("shm", "")]))

    def kind(prefill: str, decode: str) -> str:
        return kinds[prefill < decode]

    return Setting(
        roles,
        config,
        pages=draw(st.integers(5, 10)),
        max_batch=draw(st.integers(1, 3)),
        plans_ahead=draw(st.integers(0, 1)),
        checksums=draw(st.booleans()),
        kind=kind,
    )


FAULTS = ["kill", "kill", "kill", "suspect", "break", "break", "stop", "api", "coordinator"]

prompts = st.builds(
    lambda shared, own: [1 + n % 3 for n in range(shared)] + own,
    st.integers(0, 8),
    st.lists(st.integers(0, 3), min_size=1, max_size=6),
)
samplings = st.builds(
    Sampling,
    max_tokens=st.integers(1, 10),
    end_ids=st.sampled_from([(), (END_ID,)]),
    seed=st.integers(0, 2),
    logprobs=st.sampled_from([-1, 0]),
    prompt_logprobs=st.sampled_from([-1, -1, -1, 0]),
)


class Service(RuleBasedStateMachine):
    """One world. `faults`: workers die, connections break; otherwise every request must give all of its tokens."""

    faults = True
    coordinator_restarts = True

    @initialize(setting=settings_of_a_world(), ready=st.sampled_from([True, True, True, False]))
    def start(self, setting: Setting, ready: bool) -> None:
        self.world = World(setting)
        if ready:
            self.world.settle()

    # ---------------------------------------------------------------------------------------------- the users

    @rule(
        requests=st.lists(st.tuples(prompts, samplings), min_size=1, max_size=4),
        siblings=st.booleans(),
        tpot_s=st.sampled_from([0.05, 0.001]),  # with the latter first tokens wait for the end of a step
    )
    def submit(self, requests: list[tuple[list[int], Sampling]], siblings: bool, tpot_s: float) -> None:
        first = None
        for prompt, sampling in requests:
            shared = prompt if first is None else list(unpack(first.request.prompt))
            stream = self.world.api.submit(shared, sampling, Targets(0.5, tpot_s), first)
            first = (first or stream) if siblings else None

    @precondition(lambda self: any(not stream.ended for stream in self.world.api.streams))
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        living = [stream for stream in self.world.api.streams if not stream.ended]
        self.world.api.cancel(data.draw(st.sampled_from(living)))

    # ------------------------------------------------------------------------------------------ what happens

    @rule(picks=st.lists(st.integers(0, 40), min_size=1, max_size=10))
    def happen(self, picks: list[int]) -> None:
        for pick in picks:
            actions = list(self.world.actions())
            if actions:
                actions[pick % len(actions)]()

    @rule(random=st.randoms(use_true_random=True), count=st.integers(10, 80))
    def much_happens(self, random: Random, count: int) -> None:
        for _ in range(count):
            actions = list(self.world.actions())
            if actions:
                random.choice(actions)()

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A worker is asked to end: no stream may notice."""
        busy = [worker for worker in self.world.workers if worker.core.requests] or self.world.workers
        worker = data.draw(st.sampled_from(busy))
        if not worker.leaving:
            worker.leave()

    @precondition(lambda self: any(worker.core.requests for worker in self.world.workers))
    @rule(data=st.data())
    def relieve(self, data: st.DataObject) -> None:
        """A worker wants to be rid of a request, in whatever state, without leaving: no stream may notice."""
        worker = data.draw(st.sampled_from([worker for worker in self.world.workers if worker.core.requests]))
        request = data.draw(st.sampled_from(list(worker.core.requests.values())))
        if not request.moves:
            worker.relieve(request.spec.id)

    @rule(seconds=st.sampled_from([0.01, 0.1, 1.0]))
    def wait(self, seconds: float) -> None:
        self.world.now += seconds

    @precondition(lambda self: self.world.busy_pairs())
    @rule(data=st.data())
    def duplicate(self, data: st.DataObject) -> None:
        self.world.duplicate(data.draw(st.sampled_from(self.world.busy_pairs())))

    # -------------------------------------------------------------------------------------------------- faults

    @precondition(lambda self: self.faults)
    @rule(data=st.data(), fault=st.sampled_from(FAULTS))
    def fail(self, data: st.DataObject, fault: str) -> None:
        world = self.world
        match fault:
            case "coordinator" if self.coordinator_restarts:
                world.start_coordinator()
            case "api":
                world.kill(world.api.address.incarnation)
            case "break":
                if pairs := self.connections():
                    world.lose(data.draw(st.sampled_from(pairs)))
            case "stop":
                stoppable = [*world.workers, world.coordinator]
                world.stopped.add(data.draw(st.sampled_from(stoppable)).address.incarnation)
            case "suspect":
                world.suspect(self.draw_worker(data).address.incarnation)
            case "kill":
                worker = self.draw_worker(data)
                if worker.plans and data.draw(st.booleans()):
                    worker.step(only_push=True)
                world.kill(worker.address.incarnation, unsent=data.draw(st.booleans()))

    @precondition(lambda self: self.world.stopped)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        """SIGCONT: what has waited for it comes at once."""
        self.world.stopped.remove(data.draw(st.sampled_from(sorted(self.world.stopped))))

    def draw_worker(self, data: st.DataObject) -> WorkerActor:
        busy = [worker for worker in self.world.workers if worker.core.jobs] or self.world.workers
        return data.draw(st.sampled_from(busy))

    def connections(self) -> list[tuple[int, int]]:
        """Those that may break. Not the supervisor's, whose end is everybody's."""
        spared = {SUPERVISOR.incarnation}
        if not self.coordinator_restarts:
            spared.add(self.world.coordinator.address.incarnation)
        living = self.world.actors.keys() - spared
        return [pair for pair in self.world.busy_pairs() if living.issuperset(pair)]

    # --------------------------------------------------------------------------------------------------- the end

    def teardown(self) -> None:
        if not hasattr(self, "world") or sys.exc_info()[0] is not None:
            return  # a rule has failed: that is what is to be seen
        self.world.stopped.clear()
        self.world.settle()
        self.world.check_quiet()
        for stream in self.world.api.streams:
            self.check_stream(stream)

    def check_stream(self, stream: Any) -> None:
        prompt = list(unpack(stream.request.prompt))
        wanted = expected_output(prompt, stream.request.sampling, self.world.setting.max_len)
        output = list(stream.output)
        if stream._error is None and stream.id.n not in self.world.api.cancelled:
            assert output == wanted
        assert output == wanted[: len(output)]
        if stream._error is not None and not self.faults:
            assert stream._error.status in (400, 429, 503), stream._error


class FailingService(Service):
    """Workers die and connections break under one coordinator."""

    coordinator_restarts = False


class QuietService(Service):
    """No faults: nothing may be refused but for its length, a full queue, or before the service is ready."""

    faults = False


def case(machine: type[Service], examples: int) -> type:
    class Case(machine.TestCase):  # type: ignore[name-defined]
        settings = settings(
            max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
        )

    return Case


TestQuietService = case(QuietService, 150)
TestFailingService = case(FailingService, 150)
TestService = case(Service, 150)


@pytest.mark.slow
class TestServiceAtLength(case(Service, 1000)):  # type: ignore[misc]
    """The same walk, for hours that nobody is waiting."""
