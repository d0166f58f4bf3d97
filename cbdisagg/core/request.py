"""One sequence on one worker: what is known of it, how far it is, and the states it may pass through.

Knows progress, not phase: a request has `tokens` (prompt, then output) and the count `computed` of those whose KV is in
its pages. The same record serves a request that this worker decodes and a `PrefillJob`, the part of a remote request
that this worker prefills; the job additionally knows its attempt and where its pages go.

    WAITING  -> RUNNING   admit: computed here, in pages taken as it grows
    WAITING  -> RESERVED  reserve: its pages are being written by a prefill worker
    RESERVED -> RUNNING   land (all KV has come) or take_over (the writer declined or died: computed here)
    RESERVED -> WAITING   requeue (the writer is suspected: other pages, the old ones are quarantined)
    RUNNING  -> WAITING   preempt: pages given back, tokens kept
    any      -> ENDED     end: finished, cancelled, failed, or handed over to another worker
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, TypeAlias

from cbdisagg.messages import (
    Address,
    AttemptId,
    Generate,
    Hash,
    Logprobs,
    Page,
    Route,
    Slot,
    next_hash,
    split_hashes,
    unpack,
)


class State(Enum):
    WAITING = "waiting"
    RESERVED = "reserved"
    RUNNING = "running"
    ENDED = "ended"


class Trigger(Enum):
    ADMIT = "admit"
    RESERVE = "reserve"
    LAND = "land"
    TAKE_OVER = "take_over"
    REQUEUE = "requeue"
    PREEMPT = "preempt"
    END = "end"


TRANSITIONS: dict[tuple[State, Trigger], State] = {
    (State.WAITING, Trigger.ADMIT): State.RUNNING,
    (State.WAITING, Trigger.RESERVE): State.RESERVED,
    (State.WAITING, Trigger.END): State.ENDED,
    (State.RESERVED, Trigger.LAND): State.RUNNING,
    (State.RESERVED, Trigger.TAKE_OVER): State.RUNNING,
    (State.RESERVED, Trigger.REQUEUE): State.WAITING,
    (State.RESERVED, Trigger.END): State.ENDED,
    (State.RUNNING, Trigger.PREEMPT): State.WAITING,
    (State.RUNNING, Trigger.END): State.ENDED,
}


class IllegalTransition(Exception):
    """A trigger that the state does not know: a bug in a core."""


@dataclass(slots=True)
class JobTarget:
    """Where pages of a sequence go, and how far that is: pages [first_page, end) to `pages` of `decode`'s pool.

    `known`: the tokens of the sequence that the decode worker knows.
    """

    attempt: AttemptId
    decode: Address
    first_page: int
    pages: list[Page]
    known: int
    pushed: int = 0  # pages of the sequence below this index have been given to the transport, or are not wanted
    pushes: int = 0  # pushes planned whose pages may still be read
    closing: bool = False  # the last push is planned
    over: bool = False  # no push will be planned any more
    answer: Literal["", "stopped", "declined", "ended"] = ""  # what to tell once no push is in flight
    checksums: bytes = b""

    def __post_init__(self) -> None:
        self.pushed = self.first_page

    @property
    def end(self) -> int:
        return self.first_page + len(self.pages)


Order: TypeAlias = tuple[float, int]


@dataclass(slots=True, eq=False)
class Request:
    """`arrival` is on this worker's clock; `key` is unique on this worker and grows."""

    key: int
    spec: Generate
    route: Route
    arrival: float
    page_size: int
    limit: int  # it ends when it has this many tokens, prompt included
    job: JobTarget | None = None
    giving: JobTarget | None = None  # it runs here, and moves to another worker
    moves: bool = False  # another worker runs it, until its KV has come
    hops: int = 0  # moves of this submission
    returned: bool = False  # the coordinator has been asked to find it another worker
    state: State = State.WAITING

    tokens: array[int] = field(default_factory=lambda: array("i"))
    prompt_len: int = 0
    computed: int = 0
    planned: int = 0  # computed, once the plans in flight are done
    draws_in_flight: int = 0
    in_flight: int = 0  # plans and pushes that read its pages

    pages: list[Page] = field(default_factory=list)
    hashes: list[Hash] = field(default_factory=list)
    published: int = 0
    computing: list[Hash] = field(default_factory=list)  # pages that others may wait for instead of computing them
    slot: Slot | None = None
    granted: int = 0  # pages that the runner has been told of

    attempt: AttemptId | None = None

    scores: list[Logprobs] = field(default_factory=list)
    wants_scores: bool = False
    cached_tokens: int = 0
    preemptions: int = 0
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    passed: int = 0  # steps without tokens for its prompt, in a row
    overtaken: int = 0  # later arrivals that have started before it
    queue_s: float = 0.0
    prefill_s: float = 0.0

    def __post_init__(self) -> None:
        self.tokens = unpack(self.spec.prompt)
        self.prompt_len = len(self.tokens)
        self.tokens.extend(unpack(self.spec.output))
        self.hashes = list(split_hashes(self.spec.hashes))
        self.wants_scores = self.spec.sampling.prompt_logprobs >= 0 and not self.spec.output

    def move(self, trigger: Trigger) -> None:
        """The only way to change `state`."""
        after = TRANSITIONS.get((self.state, trigger))
        if after is None:
            raise IllegalTransition(f"{self.spec.id}: {trigger.value} while {self.state.value}")
        self.state = after

    @property
    def order(self) -> Order:
        return (self.arrival, self.key)

    @property
    def ended(self) -> bool:
        return self.state is State.ENDED

    @property
    def remaining(self) -> int:
        """Tokens still to compute that are known, or will be when the plans in flight are done."""
        return len(self.tokens) + self.draws_in_flight - self.planned

    @property
    def decoding(self) -> bool:
        """Only its newest token is missing: each further step gives the client a token."""
        known = len(self.tokens) + self.draws_in_flight
        return known - self.planned == 1 and known > self.prompt_len

    @property
    def output(self) -> array[int]:
        return self.tokens[self.prompt_len :]

    def pages_for(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def chain(self, pages: int) -> list[Hash]:
        """The hashes of the first `pages` full pages of the tokens known, extending the api's chain over the output."""
        while len(self.hashes) < pages:
            start = len(self.hashes) * self.page_size
            previous = self.hashes[-1] if self.hashes else self.spec.root
            self.hashes.append(next_hash(previous, self.tokens[start : start + self.page_size].tobytes()))
        return self.hashes[:pages]

    def reset(self) -> None:
        """Its pages are gone: everything is to be computed again."""
        self.pages = []
        self.computed = self.planned = self.published = self.granted = 0
        self.slot = None
        self.scores = []
