"""What must be true of a core between two events. Checked by the property tests, and live with `debug.invariants`."""

from __future__ import annotations

from collections import Counter

from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.request import State
from cbdisagg.core.worker import WorkerCore


class BrokenInvariant(AssertionError):
    """A bug in a core: the message says which rule and where."""


def check_worker(core: WorkerCore) -> None:
    """Raises BrokenInvariant. Costs time in proportion to pages and requests."""
    _pages_add_up(core)
    _readers_are_known(core)
    _writers_are_known(core)
    _requests_are_in_one_place(core)
    _plans_hold_their_pages(core)
    _held_landings_have_a_step_to_wait_for(core)
    _nobody_waits_for_nothing(core)
    _one_live_job_per_request(core)
    _tenants_are_those_here(core)


def _require(truth: bool, text: str) -> None:
    if not truth:
        raise BrokenInvariant(text)


def _pages_add_up(core: WorkerCore) -> None:
    pages = core.pages
    places = [*pages.free, *pages.readers, *pages.cached, *pages.quarantined]
    _require(sorted(places) == list(range(pages.total)), f"pages not in exactly one place: {sorted(places)}")
    _require(all(page in pages.hash_of for page in pages.cached), "a cached page without a hash")
    _require(
        {page: value for value, page in pages.by_hash.items()} == pages.hash_of, "the prefix index is not one to one"
    )


def _readers_are_known(core: WorkerCore) -> None:
    holders = [*core.requests.values(), *core.jobs.values(), *_flying(core)]
    unique = {request.key: request for request in holders}
    counted = Counter(page for request in unique.values() for page in request.pages)
    _require(dict(counted) == core.pages.readers, f"readers {core.pages.readers} but requests hold {dict(counted)}")


def _writers_are_known(core: WorkerCore) -> None:
    for page, attempt in core.pages.writers.items():
        _require(attempt in core.handoffs.reservations, f"page {page} is written by unknown attempt {attempt}")
        _require(page not in core.pages.hash_of, f"page {page} has a writer and is published")
        held = core.pages.readers.get(page, 0)
        _require(held == 1 or page in core.pages.quarantined, f"page {page} has a writer and {held} readers")


def _requests_are_in_one_place(core: WorkerCore) -> None:
    waiting = {request.key for request in core.scheduler.waiting}
    _require(len(waiting) == len(core.scheduler.waiting), "a request waits twice")
    living = [r for r in [*core.requests.values(), *core.jobs.values()] if not r.ended]
    for request in living:
        state = request.state
        _require((request.key in waiting) == (state is State.WAITING), f"{request.spec.id} waits but is {state.value}")
        running = request.key in core.scheduler.running
        _require(running == (state is State.RUNNING), f"{request.spec.id} runs but is {state.value}")
        reserved = request.attempt in core.handoffs.reservations
        _require(reserved == (state is State.RESERVED), f"{request.spec.id} has an attempt but is {state.value}")
    _require(
        len(core.scheduler.running) + len(waiting) + core.handoffs.waiting() == len(living), "a request is in no place"
    )
    batch = len(core.scheduler.running) + core.handoffs.waiting()
    _require(batch <= core.info.max_batch, f"{batch} sequences in a batch of {core.info.max_batch}")


def _plans_hold_their_pages(core: WorkerCore) -> None:
    for flight in core.scheduler.flights.values():
        tokens = sum(slice_.count for _, slice_ in flight)
        budget = max(core.config.scheduler.token_budget, core.info.max_batch)
        _require(tokens <= budget, f"a plan of {tokens} tokens, the budget is {budget}")
        for request, slice_ in flight:
            _require(request.in_flight > 0, f"{request.spec.id} is in a plan that does not pin it")
            capacity = len(request.pages) * core.info.page_size
            _require(slice_.start + slice_.count <= capacity, f"{request.spec.id}: a slice beyond its pages")
    for request, target in core.scheduler.pushes.values():
        _require(request.in_flight > 0, f"{request.spec.id} has a push that does not pin it")
        _require(
            target.attempt in core.supply, f"{request.spec.id} has a push of the forgotten attempt {target.attempt}"
        )


def _held_landings_have_a_step_to_wait_for(core: WorkerCore) -> None:
    for reservation in core.handoffs.held():
        _require(reservation.complete, "a landing is held whose KV is not all here")
        _require(bool(core.scheduler.flights), "a landing is held, and no step runs")


def _nobody_waits_for_nothing(core: WorkerCore) -> None:
    """Where nothing runs, nothing that happens here would let a job in later: it has started or has been declined."""
    scheduler = core.scheduler
    if not (scheduler.running or scheduler.flights or scheduler.pushes):
        jobs = [request.spec.id for request in scheduler.waiting if request.job is not None]
        _require(not jobs, f"jobs wait where nothing runs: {jobs}")


def _one_live_job_per_request(core: WorkerCore) -> None:
    live = Counter((a.decode, a.request) for a, request in core.jobs.items() if not request.ended)
    _require(all(count == 1 for count in live.values()), f"two live jobs for one request: {live}")


def _tenants_are_those_here(core: WorkerCore) -> None:
    living = Counter(r.spec.tenant for r in [*core.requests.values(), *core.jobs.values()] if not r.ended)
    _require(core.turns.here == living, f"requests by tenant are {dict(living)}, but {dict(core.turns.here)} are known")


def _flying(core: WorkerCore) -> list:  # type: ignore[type-arg]
    planned = [request for flight in core.scheduler.flights.values() for request, _ in flight]
    padding = core.scheduler.batch.padding if core.scheduler.batch is not None else []
    return planned + [request for request, _ in core.scheduler.pushes.values()] + padding


def check_coordinator(core: CoordinatorCore) -> None:
    """Raises BrokenInvariant."""
    for member in core.workers.values():
        key = (member.address.name, member.address.incarnation)
        _require(key not in core.dead, f"{key} is a member and dead")
    for pair in core.pairs.values():
        for end in (pair.prefill, pair.decode):
            _require((end.name, end.incarnation) not in core.dead, f"a pair names {end.name}, which is dead")
    for placed in core.placed.values():
        _require(
            placed.decode.incarnation in core.workers, f"a request is placed on {placed.decode.name}, a non-member"
        )
