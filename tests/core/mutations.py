"""The protocol's rules, each switched off: a walk or a directed scenario that holds a rule must fail without it.

Rules are numbered as in `RULES`. A mutation replaces one method, or a branch of it, by what somebody might have written
who did not know the rule. `finds` is what the failure says, so that it fails for the rule's reason.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import directed
from msgspec.structs import replace
from pytest import MonkeyPatch
from walk_draft import Draft

from cbdisagg.api.client import Client
from cbdisagg.api.stream import Stream
from cbdisagg.core import admission, placement, scheduler
from cbdisagg.core.admission import Admission
from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.effects import RunStep
from cbdisagg.core.handoff import Handoffs, Reservation
from cbdisagg.core.peers import Peers
from cbdisagg.core.placement import Placement
from cbdisagg.core.request import State, Trigger
from cbdisagg.core.scheduler import Scheduler
from cbdisagg.core.streams import Streams
from cbdisagg.core.supply import Supply
from cbdisagg.core.worker import WorkerCore
from cbdisagg.messages import AttemptId

Patch = Callable[[MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    rule: int
    name: str
    patch: Patch
    scenario: str | Callable[[], None]
    finds: str


def instead(owner: Any, name: str, replacement: Any) -> Patch:
    return lambda patcher: patcher.setattr(owner, name, replacement)


def changed(owner: Any, name: str, change: Callable[..., Any]) -> Patch:
    """`change` gets the method as it was, then its arguments."""
    original = getattr(owner, name)
    return instead(owner, name, lambda *arguments, **named: change(original, *arguments, **named))


# ------------------------------------------------------------------------------------ 1 pins


def drop_at_once(self: Scheduler, request: Any) -> None:
    """Pages are given back though a plan or a push still reads them."""
    if request.key in self.running:
        del self.running[request.key]
    elif request in self.waiting:
        self.waiting.remove(request)
    self._leave_slot(request)
    self._give_back(request)


def settle_at_once(self: Supply, target: Any) -> list[Any]:
    """PushStopped is told while copies may still be made."""
    pushes, target.pushes = target.pushes, 0
    effects = _settle(self, target)
    target.pushes = pushes
    return effects


_settle = Supply._settle


# ------------------------------------------------------------------------------------ 9 preemption


def grow_from_reserved(original: Any, self: Scheduler, request: Any, count: int, taken: Any, victims: Any) -> int:
    """The pages of a request that a peer is writing are taken for one that runs."""
    core = self.core  # type: ignore[attr-defined]  # set by `with_core`
    missing = request.pages_for(request.planned + count) - len(request.pages)
    for other in list(core.requests.values()):
        if missing > self.pages.available() and other.state is State.RESERVED:
            core.admission.computes_no_more(other)
            core.handoffs.settle(other.attempt)
            other.move(Trigger.REQUEUE)
            self.pages.release(other.pages)
            other.reset()
            self.wait(other)
    return original(self, request, count, taken, victims)  # type: ignore[no-any-return]


def victimise_reserved(patcher: MonkeyPatch) -> None:
    def with_core(original: Any, self: WorkerCore, *arguments: Any) -> None:
        original(self, *arguments)
        self.scheduler.core = self  # type: ignore[attr-defined]

    changed(WorkerCore, "__init__", with_core)(patcher)
    changed(Scheduler, "_grow", grow_from_reserved)(patcher)


def plan_once(self: WorkerCore) -> None:
    """Where the last that ran was preempted, nobody else is let in."""
    plan, _ = self._next_step()
    if plan is not None:
        self._effects.append(RunStep(plan))


def oldest_first(*values: Any, **named: Any) -> Any:
    """`max` by a key is only used to choose a victim."""
    return builtins.min(*values, **named) if named else builtins.max(*values)


# ------------------------------------------------------------------------------------ 2, 3, 8 and others


def hand_on_the_queue(original: Any, self: Draft, incarnation: int) -> None:
    """What waits for a dead process reaches its successor, which is started at once."""
    waiting = {pair: queue for pair, queue in self.queues.items() if pair[1] == incarnation}
    original(self, incarnation)
    self.start(incarnation + 1)
    for (sender, _), queue in waiting.items():
        pair = (sender, incarnation + 1)
        self.queues[pair] = queue + self.queues.get(pair, ())


def any_submission(self: Client, sender: Any, run: Any) -> None:
    stream = self._streams.get(run.id)
    if stream is not None:
        stream.hear()
        stream.take(run)
        if stream.ended:
            del self._streams[stream.id]


def take_in_order_of_coming(self: Stream, run: Any) -> None:
    self._append(run)
    self._wake()


def count_from_here(original: Any, self: Streams, request: Any, sampled: Any, now: float) -> bool:
    """Indices count the tokens of this submission, not of the stream."""
    before = len(request.spec.output) // 4
    ended = original(self, request, sampled, now)
    run = self._runs[request.spec.id.api][request.spec.id]
    self._runs[request.spec.id.api][request.spec.id] = replace(run, index=run.index - before)
    return ended  # type: ignore[no-any-return]


def trust_a_suspect(self: WorkerCore, prefill: Any) -> None:
    """As if it were dead: the prompt is computed in the pages that it may still write."""
    for attempt in self.handoffs.of(prefill.incarnation):
        self._push_stopped(attempt, "prefill-worker-lost")


def nobody_dies(original: Any, self: Peers, members: Any) -> Any:
    met = dict(self.met)
    change = original(self, members)
    self.met = met | self.met
    change.died = []
    return change


def same_attempt(self: Handoffs, request: Any) -> AttemptId:
    return AttemptId(self.incarnation, request.spec.id, 1)


def write_the_hit_too(original: Any, self: Handoffs, request: Any, hit: int, *others: Any) -> Any:
    return original(self, request, 0, *others)


def match_all(self: Scheduler, request: Any) -> Any:
    if not self.prefix_cache:
        return []
    most = len(request.tokens) // self.page_size
    return self.pages.match(request.chain(most), most)


def join_anything(self: Admission, request: Any, hit: int) -> bool:
    """A job waits for what a peer computes."""
    chain = request.chain((len(request.tokens) - 1) // request.page_size)
    return hit < len(chain) and self.computing.get(chain[hit]) is not None


def answer_only_jobs(original: Any, self: Supply, sender: Any, attempt: AttemptId) -> Any:
    return original(self, sender, attempt) if attempt in self else []


def first_token_never_ends(original: Any, self: WorkerCore, request: Any, sampled: Any) -> None:
    """What the prefill worker has drawn is told, and not looked at."""
    if len(request.tokens) > request.prompt_len or request.first_token is not None:
        original(self, request, sampled)
        return
    request.first_token = self._now
    self.admission.computes_no_more(request)
    self.streams.extend(request, sampled, self._now)


def fold_output(original: Any, self: Client, stream: Stream) -> Any:
    """The prompt of a resubmission is all that is known of the sequence."""
    generate = original(self, stream)
    return replace(generate, prompt=generate.prompt + generate.output, output=b"", hashes=b"")


def resume_nothing_unheard(patcher: MonkeyPatch) -> None:
    original = Client._resubmit
    changed(
        Client,
        "_resubmit",
        lambda _, self, stream, cause: original(self, stream, cause) if cause != "coordinator" else None,
    )(patcher)


def claim_one_more(original: Any, self: Supply, request: Any, target: Any, computed: int, now: float) -> Any:
    """KvReady of a move counts the token just drawn, whose KV is nowhere yet."""
    return original(self, request, target, computed + 1, now)


def keep_writing(self: WorkerCore, request: Any, target: Any, computed: int) -> None:
    """KvReady is told, and the request goes on here as well."""
    self._farewells += self.supply.hand_over(request, target, computed, self._now)


def take_nothing_from_a_suspect(original: Any, self: WorkerCore, prefill: Any) -> None:
    """What it is about to give is given up, though it may have handed that over already."""
    for attempt in self.handoffs.of(prefill.incarnation):
        request = self.handoffs.reservations[attempt].request
        if request is not None and request.moves:
            self._end(request)
    original(self, prefill)


def any_api(original: Any, self: Peers, members: Any) -> Any:
    """Apis that are no longer listed are still served."""
    known = self.apis
    change = original(self, members)
    self.apis = known | self.apis
    return change


def any_term(original: Any, self: WorkerCore, message: Any) -> None:
    original(self, replace(message, term=max(message.term, self.peers.term)))


def tell_half(original: Any, self: CoordinatorCore) -> None:
    """Nobody waits for a supervisor's report."""
    reported, self.reported = self.reported, {"host"}
    original(self)
    self.reported = reported


def no_groups(original: Any, self: Placement, request: Any, *others: Any) -> Any:
    return original(self, replace(request, group=None), *others)


def one_token_is_two(original: Any, sight: Any, knobs: Any, wanted: Any) -> Any:
    return original(sight, knobs, wanted._replace(max_tokens=wanted.max_tokens + 1))


def instants(original: Any, self: Client, stream: Stream) -> Any:
    """When it was asked for, on the api's clock, is told as it is."""
    return replace(original(self, stream), age_s=stream.born)


def no(*_: Any) -> None:
    """The method does nothing."""


def admit_to_the_last_page(needed: int, available: int, running: int) -> bool:
    return needed <= available


MUTATIONS = [
    Mutation(
        1,
        "pages of an ended request are free at once",
        instead(Scheduler, "drop", drop_at_once),
        "cancel",
        "a slice beyond its pages",
    ),
    Mutation(
        1,
        "PushStopped while copies may be made",
        instead(Supply, "_settle", settle_at_once),
        "cancel in mid-transfer",
        "a push of the forgotten attempt",
    ),
    Mutation(
        2,
        "a dead worker's queue reaches its successor",
        changed(Draft, "kill", hand_on_the_queue),
        "P dies twice",
        "writes page",
    ),
    Mutation(
        2,
        "an attempt does not say which try",
        instead(Handoffs, "next_attempt", same_attempt),
        "coordinator, P and api late",
        "has not ended|writes page",
    ),
    Mutation(
        3,
        "tokens of any submission are heard",
        instead(Client, "_tokens", any_submission),
        "coordinator and worker",
        "has not ended",
    ),
    Mutation(
        3, "gaps are not waited for", instead(Stream, "take", take_in_order_of_coming), "leaves, api late", "gave"
    ),
    Mutation(
        3,
        "indices count from the submission",
        changed(Streams, "extend", count_from_here),
        "D dies, all late",
        "no continuation",
    ),
    Mutation(
        3,
        "what is stale is not refused",
        instead(Client, "_refuse", no),
        directed.a_submission_that_arrives_after_its_stream_has_ended_is_refused,
        "no reader",
    ),
    Mutation(
        4,
        "KvReady is enough",
        instead(Reservation, "complete", property(lambda self: self.ready is not None)),
        "data apart",
        "another's KV",
    ),
    Mutation(
        5,
        "a suspect is taken for dead",
        instead(WorkerCore, "_abandon_attempts", trust_a_suspect),
        "P is suspected",
        "writes page",
    ),
    Mutation(5, "death is no evidence", changed(Peers, "update", nobody_dies), "P dies, all late", "has not ended"),
    Mutation(
        7,
        "a job waits for ever",
        instead(Admission, "waits_for_peers", lambda *_: False),
        "crossed, no room",
        "jobs wait where nothing runs",
    ),
    Mutation(
        7,
        "no page is left to grow",
        instead(admission, "admissible", admit_to_the_last_page),
        directed.a_reservation_leaves_each_running_request_a_page_to_grow,
        "has lost its pages",
    ),
    Mutation(8, "what was unheard is not asked for again", resume_nothing_unheard, "coordinator", "has not ended"),
    Mutation(
        8,
        "an older coordinator's members count",
        changed(WorkerCore, "_members", any_term),
        directed.what_an_older_coordinator_says_of_members_is_dropped,
        "has not ended",
    ),
    Mutation(
        8,
        "an older coordinator's routes count",
        changed(WorkerCore, "_submit", any_term),
        directed.a_route_of_an_older_coordinator_is_dropped,
        "a route of the older one",
    ),
    Mutation(
        8,
        "half a membership is told",
        changed(CoordinatorCore, "_broadcast", tell_half),
        directed.half_a_membership_is_told_to_nobody,
        "its api for dead",
    ),
    Mutation(9, "a reserved request is a victim", victimise_reserved, "preemption", "still expects data"),
    Mutation(
        9,
        "the oldest is the victim",
        lambda patcher: patcher.setattr(scheduler, "max", oldest_first, raising=False),
        directed.the_latest_arrival_is_preempted,
        "the oldest has lost its pages",
    ),
    Mutation(
        9,
        "what the preempted held is left free",
        instead(WorkerCore, "_plan", plan_once),
        "preemption of the last",
        "jobs wait where nothing runs",
    ),
    Mutation(10, "the hit is written too", changed(Handoffs, "open", write_the_hit_too), "hit", "writes page"),
    Mutation(10, "a hit may be the whole prompt", instead(Scheduler, "match", match_all), "prefix", "has not ended"),
    Mutation(
        10, "who joins waits for ever", instead(Admission, "computes_no_more", no), "prefix", "waits for a prefix"
    ),
    Mutation(
        10,
        "jobs join what a peer computes",
        instead(Admission, "joins", join_anything),
        "crossed prefix",
        "jobs wait where nothing runs",
    ),
    Mutation(
        11,
        "a StopPush of an unknown attempt is not answered",
        changed(Supply, "stop", answer_only_jobs),
        "cancel",
        "still has",
    ),
    Mutation(
        12,
        "the first token never ends a sequence",
        changed(WorkerCore, "_draw", first_token_never_ends),
        "one token",
        "still has",
    ),
    Mutation(
        12,
        "a first token that waits is forgotten",
        instead(Handoffs, "held", lambda self: []),
        "first waits",
        "has not ended",
    ),
    Mutation(
        12,
        "a resubmission's prompt is all that is known",
        changed(Client, "_generate", fold_output),
        "D dies, all late",
        "no continuation",
    ),
    Mutation(
        12,
        "one token is handed over",
        changed(placement, "route", one_token_is_two),
        directed.one_token_is_not_handed_over,
        "it took the way of",
    ),
    Mutation(
        13,
        "what is stopped is not cancelled",
        instead(Client, "_end_at_worker", no),
        directed.what_is_cancelled_is_given_up_at_once,
        "no reader",
    ),
    Mutation(
        14,
        "siblings go anywhere",
        changed(Placement, "decide", no_groups),
        directed.siblings_go_to_one_worker_and_join_its_prefix,
        "not on one worker",
    ),
    Mutation(
        15,
        "the requests of a dead api go on",
        changed(Peers, "update", any_api),
        directed.an_api_that_dies_has_nothing_computed_any_more,
        "an api that is dead",
    ),
    Mutation(
        16,
        "more is said to have moved than has",
        changed(Supply, "hand_over", claim_one_more),
        "leaves",
        "another's KV",
    ),
    Mutation(16, "both write", instead(WorkerCore, "_hand_over", keep_writing), "leaves", "two workers write"),
    Mutation(
        16,
        "in transit is not looked at",
        instead(Stream, "in_transit", property(lambda self: False)),
        "leaves, dies",
        "has not ended",
    ),
    Mutation(
        16,
        "who is suspected has nothing to give",
        changed(WorkerCore, "_abandon_attempts", take_nothing_from_a_suspect),
        directed.what_a_suspect_has_handed_over_is_taken,
        "has not ended",
    ),
    Mutation(
        17,
        "instants are told",
        changed(Client, "_generate", instants),
        directed.a_request_keeps_its_turn_when_it_goes_on_elsewhere,
        "the younger one",
    ),
]

ELSEWHERE: dict[int, tuple[str, ...]] = {
    2: ("tests/actors/test_mailbox.py::test_another_incarnation_is_not_mistaken_for_this_one",),
    4: (
        "tests/transfer/test_transfer.py::test_late_data_are_not_written",
        "tests/transfer/test_boxes.py::test_nothing_is_written_after_an_attempt_is_forgotten",
    ),
    6: (
        "tests/actors/test_mailbox.py::test_a_gap_in_the_numbers_is_reported_once",
        "tests/actors/test_mailbox.py::test_neither_a_stopped_nor_a_dead_peer_holds_up_the_sender",
    ),
    13: ("tests/api/test_http_completions.py::test_a_stop_string_cancels_the_work",),
}
"""Rules, or halves of rules, that live outside the cores, and the tests that hold them there."""
