"""Whole runs: times that can be worked out by hand, determinism, and that nothing is lost whatever happens."""

from __future__ import annotations

import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from sim_world import config, costs

from cbdisagg.actors.placement import worker_names
from cbdisagg.config import Policy
from cbdisagg.core.invariants import check_coordinator, check_worker
from cbdisagg.core.profile import Host, Profile
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import Prefill, Role
from cbdisagg.sim.arrivals import Lengths, make_workload
from cbdisagg.sim.faults import Fault
from cbdisagg.sim.fleet import Layout, places
from cbdisagg.sim.machine import Machine
from cbdisagg.sim.simulation import Outcome, Stuck, simulate
from cbdisagg.sim.variants import changed, disaggregate
from cbdisagg.sim.workload import Ask

INSTANT = Layout(near_s=0.0, far_s=0.0)
SETTLE_S = 60.0
"""By then everybody has been started anew, and who was asked to leave has left, finished or not."""


class Watcher:
    """Sees every event: their digest, and at the end the cores of those that lived."""

    def __init__(self, check: bool = False) -> None:
        self.digest = 0
        self.workers: dict[int, WorkerCore] = {}
        self.living: dict[str, WorkerCore] = {}  # once all have been started anew: the last of each name
        self._check = check

    def __call__(self, process: Any, now: float, event: Any, effects: Any) -> None:
        seen = msgspec.msgpack.encode((process.address, now, event, effects))
        self.digest = zlib.crc32(seen, self.digest)
        if isinstance(process, Machine):
            self.workers[process.address.incarnation] = process.core
            newest = self.living.get(process.address.name)
            if newest is None or newest.peers.me.address.incarnation <= process.address.incarnation:
                self.living[process.address.name] = process.core
            if self._check:
                check_worker(process.core)
        elif self._check:
            check_coordinator(process.core)


def some(count: int, rate: float = 20.0, seed: int = 1) -> list[Ask]:
    return make_workload(count, rate, Lengths(100, "exponential", 600), Lengths(20, "exponential", 80), seed)


def check_all_there(outcome: Outcome, asks: list[Ask]) -> None:
    """Every request has ended once, with each of its tokens, in order of time."""
    assert [record.ask for record in outcome.records] == asks
    for record in outcome.records:
        assert record.status == "done" and record.tokens == record.ask.output_tokens
        assert record.arrival <= record.first <= record.last
    assert len(outcome.gaps) == sum(ask.output_tokens - 1 for ask in asks)
    assert min(outcome.gaps, default=0.0) >= 0.0


# ------------------------------------------------------------------------------------------- worked out by hand


def test_one_request_on_one_worker_takes_what_the_formula_says() -> None:
    profile = costs(host=Host(event_s=0.0, step_s=0.003, token_s=0.001, request_s=0.5))
    outcome = simulate(config("any"), profile, [Ask(1.0, 3, prompt_tokens=100)], INSTANT)
    (record,) = outcome.records
    prompt, later = 0.004 + 0.010, [0.004 + 0.001 + 1e-6 * context for context in (101, 102)]
    assert record.arrival == 1.0
    assert record.ttft_s == pytest.approx(0.5 + 0.004 + prompt)
    assert record.tpot_s == pytest.approx(sum(later) / 2 + 0.004)
    assert list(outcome.gaps) == pytest.approx([seconds + 0.004 for seconds in later])
    meter = outcome.meters["worker-0"]
    assert (meter.steps, meter.tokens, meter.draws, meter.most_pages) == (3, 102, 3, 7)
    assert meter.busy_s == pytest.approx(prompt + sum(later))


def test_what_a_service_adds_delays_a_stream_as_a_whole() -> None:
    ask = [Ask(1.0, 3, prompt_tokens=100)]
    (plain,), (late,) = (simulate(config("any"), costs(first_s=s), ask, INSTANT).records for s in (0.0, 0.02))
    assert late.ttft_s == pytest.approx(plain.ttft_s + 0.02)
    assert late.tpot_s == pytest.approx(plain.tpot_s)


@pytest.mark.parametrize(("cores", "taken"), [(0, 0), (1, 1), (2, 0)])
def test_processes_beside_the_workers_take_cores_that_nobody_has_free(cores: int, taken: int) -> None:
    """A message with two tokens in the middle of each step but the first, and the second request in that one."""
    host = Host(others_message_s=0.002, others_token_s=0.0005, others_request_s=0.1, cores=cores)
    asks = [Ask(0.0, 20, prompt_tokens=50), Ask(0.0, 20, prompt_tokens=50), Ask(0.003, 1, prompt_tokens=1)]
    latency = Layout(near_s=0.001)
    before, after = (simulate(config("any"), costs(host=each), asks, latency) for each in (Host(), host))
    first, later = 0.1 if taken else 0.0, 0.003 if taken else 0.0
    assert before.records[0].tokens == after.records[0].tokens == 20
    work_s = after.meters["worker-0"].busy_s - before.meters["worker-0"].busy_s
    assert work_s == pytest.approx(first + 18 * later, abs=2 * later)
    assert after.meters["worker-0"].steps == before.meters["worker-0"].steps


@pytest.mark.parametrize("transfer", ["shm", "zmq"])
def test_a_hand_over_costs_its_copy_within_the_step_or_what_is_left_of_it_after(transfer: Any) -> None:
    profile = costs(transfer=transfer, B=1e7)
    cost = profile.cost
    pair = changed(config("prefill", "decode"), disaggregate(1, 1))
    outcome = simulate(pair, profile, [Ask(0.0, 2, prompt_tokens=100)], INSTANT)
    (record,) = outcome.records
    nbytes = 7 * 16 * profile.kv_bytes
    whole, step = cost.transfer_s(nbytes), 0.014
    exposed = cost.exposed_transfer_s(nbytes, step, profile.layers)
    assert record.worker == "decode-0" and [kind for kind, _ in outcome.decisions] == ["remote"]
    assert record.ttft_s == pytest.approx(step + (whole if transfer == "shm" else exposed))
    assert outcome.meters["prefill-0"].pushed_bytes == nbytes


def test_messages_are_late_by_their_latency() -> None:
    ask, latency = [Ask(1.0, 1, prompt_tokens=100)], Layout(near_s=0.001, far_s=0.1)
    (record,) = simulate(config("any"), costs(), ask, latency).records
    assert record.ttft_s == pytest.approx(0.014 + 3 * 0.001)  # to the coordinator, to the worker, and back
    apart = Layout(per_host=1, near_s=0.001, far_s=0.1)
    asks = [Ask(1.0, 1, prompt_tokens=100)] * 2
    near, far = simulate(config("any", "any"), costs(), asks, apart).records
    assert (near.worker, far.worker) == ("worker-0", "worker-1")
    assert far.ttft_s - near.ttft_s == pytest.approx(2 * (0.1 - 0.001))


def test_workers_that_share_a_memory_slow_each_other() -> None:
    asks = [Ask(0.0, 50, prompt_tokens=50), Ask(0.0, 50, prompt_tokens=50)]
    alone, shared, apart = (
        simulate(config("any", "any"), costs(beside_step=beside), asks, layout)
        for beside, layout in ((0.0, Layout()), (0.5, Layout()), (0.5, Layout(per_host=1)))
    )
    assert {record.worker for record in alone.records} == {"worker-0", "worker-1"}
    slowdown = shared.meters["worker-0"].busy_s / alone.meters["worker-0"].busy_s
    assert 1.4 < slowdown <= 1.5
    assert apart.meters["worker-0"].busy_s == pytest.approx(alone.meters["worker-0"].busy_s)


@pytest.mark.parametrize("transfer", ["shm", "zmq"])
def test_a_push_slows_whoever_decodes_beside_it_from_the_start_of_its_step(transfer: Any) -> None:
    """A long prompt is computed and pushed while a stream decodes on the worker that its pages go to."""
    pair = changed(config("prefill", "decode"), disaggregate(1, 1))
    asks = [Ask(0.0, 60, prompt_tokens=2), Ask(0.1, 2, prompt_tokens=400)]

    def steps(beside_push: float) -> tuple[float, float]:
        """Seconds of decode-0's steps that began in the prompt's step, and of prefill-0's."""
        profile = costs(transfer=transfer, B=4e7, beside_push=beside_push)
        outcome = simulate(pair, profile, asks, INSTANT)
        return outcome.meters["decode-0"].busy_s, outcome.meters["prefill-0"].busy_s

    (alone, prompt), (beside, prompt_then) = steps(0.0), steps(1.0)
    moving = 25 * 16 * 1000 / 4e7  # bytes of the prompt's pages, at B
    assert 0.3 * moving < beside - alone < 1.1 * moving
    assert prompt_then == pytest.approx(prompt, abs=moving)
    if transfer == "shm":
        assert prompt_then == pytest.approx(prompt)  # its own copy is in its time already


def test_pages_between_hosts_go_over_the_link_and_are_late_by_its_latency() -> None:
    pair = changed(config("prefill", "decode"), disaggregate(1, 1))
    nbytes, step = 7 * 16 * 1000, 0.014

    def first(profile: Profile, layout: Layout) -> float:
        (record,) = simulate(pair, profile, [Ask(0.0, 2, prompt_tokens=100)], layout).records
        assert record.worker == "decode-0"
        return record.ttft_s

    for transfer in ("shm", "zmq"):  # there is no shared memory between hosts
        profile = costs(transfer=transfer)
        slow = replace(profile.cost, B=1e7)
        apart = Layout(per_host=1, near_s=0.0, far_s=0.0, link_bytes_per_s=1e7)
        exposed = slow.exposed_transfer_s(nbytes, step, profile.layers)
        assert first(profile, apart) == pytest.approx(step + exposed)
        later = Layout(per_host=1, near_s=0.0, far_s=0.05, link_bytes_per_s=1e7)
        # decode-0 hears of the request, asks prefill-0, is sent pages, and its first token goes back: by the link
        assert first(profile, later) == pytest.approx(step + exposed + 4 * 0.05, abs=0.051)
        assert first(profile, later) - first(profile, apart) > 0.15
    near = Layout(near_s=0.0, far_s=9.0, link_bytes_per_s=1.0)
    assert first(costs(transfer="zmq", B=1e7), near) == pytest.approx(first(costs(transfer="zmq", B=1e7), INSTANT))


# ----------------------------------------------------------------------------------------------- how requests come


def test_a_closed_loop_has_as_many_requests_as_clients() -> None:
    asks = [Ask(99.0, 5, prompt_tokens=20) for _ in range(12)]
    outcome = simulate(config("any"), costs(), asks, concurrency=3)
    check_all_there(outcome, asks)
    for record in outcome.records:
        open_then = sum(other.arrival <= record.arrival < other.last for other in outcome.records)
        assert open_then <= 3
    assert outcome.seconds < 5


def test_what_the_queue_does_not_hold_is_refused_and_counts() -> None:
    asks = [Ask(0.01 * n, 100, prompt_tokens=100) for n in range(60)]
    outcome = simulate(config("any", queue_limit=4), costs(), asks)
    refused = [record for record in outcome.records if record.status == "rejected"]
    assert refused and all("policy.queue_limit" in record.message and not record.good for record in refused)
    assert len(outcome.records) == 60


def test_prompts_that_begin_alike_are_computed_once() -> None:
    asks = [Ask(2.0 * n, 2, prompt_tokens=600, prefix_blocks=(7,)) for n in range(2)]
    outcome = simulate(config("any"), costs(), asks)
    assert [record.cached_tokens for record in outcome.records] == [0, 512]


# ------------------------------------------------------------------------------------------------- the whole of it


@pytest.mark.parametrize("roles", [("any",), ("any", "any"), ("prefill", "decode"), ("prefill", "decode", "decode")])
def test_all_requests_end_and_all_pages_come_back(roles: tuple[Role, ...]) -> None:
    asks, watcher = some(60), Watcher(check=True)
    outcome = simulate(config(*roles), costs(), asks, observer=watcher)
    check_all_there(outcome, asks)
    assert not outcome.notes
    for core in watcher.workers.values():
        assert not core.requests and core.pages.available() == core.pages.total and core.reporter.page_leaks == 0


@pytest.mark.parametrize("transfer", ["shm", "zmq"])
def test_equal_runs_are_equal_event_by_event(transfer: Any) -> None:
    faults = [Fault(1.0, "kill", "decode-0"), Fault(1.5, "kill", "coordinator")]
    digests, told = set(), []
    for _ in range(2):
        watcher = Watcher()
        outcome = simulate(
            config("prefill", "decode", "decode"),
            costs(transfer=transfer, beside_step=0.2, beside_push=0.1),
            some(40),
            faults=faults,
            restart_s=0.5,
            observer=watcher,
        )
        digests.add(watcher.digest)
        told.append(outcome)
    assert len(digests) == 1 and told[0] == told[1]


def test_equal_runs_of_many_workers_in_racks_give_equal_records() -> None:
    roles: tuple[Role, ...] = ("prefill",) * 12 + ("decode",) * 8 + ("any",) * 4
    asks = make_workload(150, 400.0, Lengths(100, "lognormal", 600), Lengths(8, "exponential", 40), 3, burst=4.0)
    first, second = (
        simulate(config(*roles), costs(beside_step=0.1), asks, Layout(per_host=4, per_rack=8)) for _ in range(2)
    )
    assert first.records == second.records and first.meters == second.meters
    check_all_there(first, asks)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.builds(
            Fault,
            st.floats(0, 4),
            st.sampled_from(["kill", "kill", "leave", "slow"]),
            st.sampled_from(["prefill-0", "decode-0", "decode-1"]),
            st.sampled_from([0.5, 3.0]),
        )
        | st.builds(Fault, st.floats(0, 4), st.just("kill"), st.just("coordinator")),
        max_size=4,
    ),
    st.sampled_from(["shm", "zmq"]),
)
def test_whatever_is_struck_no_request_page_or_token_is_lost(faults: list[Fault], transfer: Any) -> None:
    asks, watcher = some(50), Watcher(check=True)
    service = config("prefill", "decode", "decode", pages=120)
    profile = costs(transfer=transfer)
    outcome = simulate(service, profile, asks, faults=faults, restart_s=0.3, settle_s=SETTLE_S, observer=watcher)
    lost = [record for record in outcome.records if record.status != "done"]
    assert all(record.status == "rejected" and not record.tokens and "no worker" in record.message for record in lost)
    for record in outcome.records:
        assert record.status != "done" or record.tokens == record.ask.output_tokens
    assert all(core.reporter.page_leaks == 0 for core in watcher.workers.values())
    for core in watcher.living.values():
        assert not core.requests and not core.supply and core.pages.available() == core.pages.total


def test_streams_of_a_dead_worker_go_on_elsewhere() -> None:
    asks = [Ask(0.0, 200, prompt_tokens=50) for _ in range(4)]
    outcome = simulate(config("any", "any"), costs(), asks, faults=[Fault(0.5, "kill", "worker-0")], restart_s=60.0)
    check_all_there(outcome, asks)
    assert sorted(record.submissions for record in outcome.records) == [1, 1, 2, 2]
    assert {record.worker for record in outcome.records} == {"worker-1"}
    assert max(outcome.gaps) > 0.01  # reaped, routed, computed again


def test_a_worker_that_leaves_hands_its_streams_over() -> None:
    asks = [Ask(0.0, 200, prompt_tokens=50) for _ in range(4)]
    outcome = simulate(config("any", "any"), costs(), asks, faults=[Fault(0.5, "leave", "worker-0")], restart_s=60.0)
    check_all_there(outcome, asks)
    assert {record.worker for record in outcome.records} == {"worker-1"}
    assert {record.submissions for record in outcome.records} == {1}


def test_a_slow_worker_is_slow_until_it_is_not() -> None:
    asks = [Ask(0.0, 100, prompt_tokens=50)]
    faults = [Fault(0.2, "slow", "worker-0", 3.0), Fault(0.4, "slow", "worker-0", 1.0)]
    gaps = simulate(config("any"), costs(), asks, faults=faults).gaps
    assert max(gaps) == pytest.approx(3 * min(gaps), rel=0.1) and gaps[-1] < 0.006


def test_a_service_that_can_do_nothing_more_is_no_endless_run() -> None:
    with pytest.raises(Stuck, match="1 requests do not end; 0 workers live"):
        simulate(
            config("any"),
            costs(),
            [Ask(0.0, 100, prompt_tokens=50)],
            faults=[Fault(0.1, "kill", "worker-0")],
            restart_s=1e9,
        )


def test_pages_move_within_a_rack_only_and_the_load_is_spread_over_all_racks() -> None:
    layout = Layout(per_rack=4)
    asks = make_workload(200, 400.0, Lengths(200), Lengths(20), 5)
    told: set[tuple[str, str]] = set()

    def watch(process: Any, now: float, event: Any, effects: Any) -> None:
        told.update((process.address.name, e.to.name) for e in effects if isinstance(getattr(e, "message", 0), Prefill))

    service = msgspec.structs.replace(
        config(*["prefill"] * 20, *["decode"] * 20), policy=Policy(mode="disaggregate", queue_limit=1000)
    )
    outcome = simulate(service, costs(h=0.02), asks, layout, observer=watch)
    check_all_there(outcome, asks)
    assert [place.name for place in places(service, layout)] == worker_names(service.workers)
    racks = {place.name: place.rack for place in places(service, layout)}
    assert len(set(racks.values())) == 10 and told
    assert all(racks[asking] == racks[asked] for asking, asked in told)
    assert {racks[asking] for asking, _ in told} == set(racks.values())
