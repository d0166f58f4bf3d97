"""Every struct that crosses a process, and the plan that crosses to the runner's thread.

Knows shapes and the wire format (msgpack, tagged, one union per inbox); knows no behaviour. Token ids and page
numbers travel as int32 little-endian bytes (`pack`, `unpack`): 0.5 us against 150 us for a list of 4,096.
Times that cross a process are ages and durations in seconds, never instants: hosts do not share a clock.

An incarnation names one start of one process. Every message travels in an `Envelope` that carries the sender's and the
addressee's; a mailbox drops what is addressed to another incarnation than its own.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple, NewType, TypeAlias, cast

import msgspec
from msgspec import Struct

PROTOCOL_VERSION = 8

Page = NewType("Page", int)
Slot = NewType("Slot", int)
Hash = NewType("Hash", bytes)
HASH_BYTES = 16

Role: TypeAlias = Literal["prefill", "decode", "any"]


class RequestId(NamedTuple):
    """One sequence to generate: the api process that owns its stream, and that api's count."""

    api: int
    n: int


class AttemptId(NamedTuple):
    """One try of a prefill worker to fill pages of a decode worker; `decode` is the latter's incarnation."""

    decode: int
    request: RequestId
    n: int


class Address(NamedTuple):
    """Where one incarnation of a process receives messages. `public_key` is its CURVE key on tcp, else empty."""

    name: str
    incarnation: int
    endpoint: str
    public_key: str = ""


class Envelope(Struct, frozen=True, array_like=True):
    """The first frame of every message; the second is the message itself."""

    sender: Address
    addressee: int
    number: int  # counts from 0 on each connection: a gap means that a message was lost


# ---------------------------------------------------------------------------------------------------- requests


class Sampling(Struct, frozen=True, omit_defaults=True):
    """How to draw the tokens of one sequence. Values are valid: the api has checked them.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1, `min_p` 0 switch the filters off. `end_ids` are the ids that end
    the sequence (the model's end tokens, unless they are to be ignored, and the request's stop ids); before
    `min_tokens` they cannot be drawn. `logprobs` and `prompt_logprobs` are the number of alternatives, -1 for none at
    all; they are taken from the model's own distribution, before temperature, bias and penalties.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    end_ids: tuple[int, ...] = ()
    seed: int = 0
    choice: int = 0
    logprobs: int = -1
    prompt_logprobs: int = -1


class Targets(Struct, frozen=True, array_like=True):
    """What a request should get: time to first token and time per output token, in seconds."""

    ttft_s: float
    tpot_s: float


class Generate(Struct, frozen=True, tag=True):
    """api -> coordinator: continue `prompt` + `output`.

    `output` holds what earlier submissions have already given the client. `hashes` are the chained hashes of the
    prompt's full pages, HASH_BYTES each (`page_hashes`); `salt_root` is the root of that chain, which the worker needs
    to go on with it. `group` names the first of sibling sequences (n > 1) with the same prompt.

    `first_age_s`: since the client got its first token; -1 if it has none. `tenant`: whose turn it is, among those who
    wait ("": nobody's in particular); a higher `priority` goes first.
    """

    id: RequestId
    submission: int
    prompt: bytes
    output: bytes
    root: bytes
    hashes: bytes
    sampling: Sampling
    targets: Targets
    age_s: float
    group: RequestId | None = None
    first_age_s: float = -1.0
    tenant: str = ""
    priority: int = 0


class Route(Struct, frozen=True, array_like=True):
    """Where each phase of a request runs. Equal addresses: it never moves."""

    prefill: Address
    decode: Address


class Submit(Struct, frozen=True, tag=True):
    """coordinator -> decode worker. `term` is the coordinator's incarnation; an older one's routes are dropped.

    `moves`: `route.prefill` runs this submission now and writes its stream, until it hands the request over.
    """

    request: Generate
    route: Route
    term: int
    moves: bool = False


class Cancel(Struct, frozen=True, tag=True):
    """api -> coordinator -> decode worker, or straight to the worker that has accepted. Ends one submission.

    `submission` is the newest that is to end; a worker that holds a newer one ignores it.
    """

    id: RequestId
    submission: int
    reason: Literal["stop", "disconnect", "error", "stale"]


class Accepted(Struct, frozen=True, tag=True):
    """decode worker -> api: `worker` writes the stream of this submission, from output token `index` on.

    A request that moves is named twice: by the worker that gives it away, after its last token, and by the one that has
    taken it, before its first. `hops` counts the moves of this submission.
    """

    id: RequestId
    submission: int
    worker: Address
    hops: int = 0
    index: int = 0


class Rejected(Struct, frozen=True, tag=True):
    """coordinator or worker -> api: the submission ends without a token. `status` is the HTTP status to give."""

    id: RequestId
    submission: int
    status: int
    message: str
    retry_after_s: float = 0.0


class Logprobs(Struct, frozen=True, array_like=True):
    """Log probability of one token, and the best alternatives in descending order (nats)."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top: tuple[float, ...] = ()


class Finish(Struct, frozen=True, array_like=True):
    """How a sequence ended, and what it cost. Durations in seconds, tokens as counts."""

    reason: Literal["stop", "length", "error"]
    message: str = ""
    preemptions: int = 0
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0


class TokenRun(Struct, frozen=True, array_like=True):
    """New tokens of one stream. `index` is the position of the first among the request's output tokens.

    `prompt_logprobs` has one entry per prompt token (the first is None); it comes once, with the first token. So does
    `cached_tokens`, how many tokens of the prompt need not be computed: a later submission, which finds in caches what
    this one has left there, does not change what is told of the request.
    """

    id: RequestId
    submission: int
    index: int
    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs | None, ...] = ()
    finish: Finish | None = None
    cached_tokens: int | None = None


class Tokens(Struct, frozen=True, tag=True):
    """decode worker -> api: one message per step and api."""

    runs: tuple[TokenRun, ...]


class Leaving(Struct, frozen=True, tag=True):
    """worker -> coordinator: route nothing more to me; I end when nothing is left here."""


class Return(Struct, frozen=True, tag=True):
    """worker -> coordinator: this request of mine should go on elsewhere. It stays mine until another takes it.

    `request.output` is what it has given so far: the worker goes on with it, if it can. `late`: the sender does not
    leave, but cannot keep all of its streams within their targets; it goes only where it is better off.
    """

    request: Generate
    late: bool = False


class Finished(Struct, frozen=True, tag=True):
    """decode worker -> coordinator: this submission no longer occupies the worker; it has ended or been handed over."""

    id: RequestId
    submission: int
    output_tokens: int


# ----------------------------------------------------------------------------------------------- the step


class Push(Struct, frozen=True, array_like=True):
    """Pages that a slice completes, and where the decode worker wants them. `source[i]` goes to `target[i]`.

    `serial` is unique within the pushing worker: PushDone names it. `last` marks the attempt's final push.
    """

    serial: int
    attempt: AttemptId
    to: Address
    source: tuple[int, ...]
    target: tuple[int, ...]
    last: bool


class Admit(Struct, frozen=True, array_like=True):
    """A sequence enters a slot of the runner. `prompt` and `output` are int32 bytes; pages in order of position."""

    slot: int
    prompt: bytes
    output: bytes
    pages: tuple[int, ...]
    sampling: Sampling


class Slice(Struct, frozen=True, array_like=True):
    """Compute tokens [start, start + count) of a slot's prompt + output + drawn tokens.

    `draws` tokens are drawn after the last one (0 or 1) and appended to the slot's ids. `scores` asks for the log
    probabilities of those of its tokens that belong to the prompt. `push` names the pages to send once each layer has
    written them.
    """

    slot: int
    start: int
    count: int
    draws: int
    scores: bool = False
    push: Push | None = None


class StepPlan(Struct, frozen=True, tag=True):
    """A delta on the runner's slots, then one forward pass. Applied in the order release, admit, grow, slices."""

    number: int
    release: tuple[int, ...]
    admit: tuple[Admit, ...]
    grow: tuple[tuple[int, tuple[int, ...]], ...]
    slices: tuple[Slice, ...]


class Sampled(Struct, frozen=True, array_like=True):
    """What one slice gave: drawn ids with their log probabilities, and the scores of prompt tokens.

    `prompt_logprobs[i]` belongs to prompt token `start + 1 + i` of the slice.
    """

    ids: tuple[int, ...]
    logprobs: tuple[Logprobs, ...] = ()
    prompt_logprobs: tuple[Logprobs, ...] = ()


class StepResult(Struct, frozen=True, tag=True):
    """`sampled[i]` belongs to `slices[i]` of plan `number`; `seconds` is the time of the whole step."""

    number: int
    sampled: tuple[Sampled, ...]
    seconds: float


# -------------------------------------------------------------------------------------------------- hand-over


class Prefill(Struct, frozen=True, tag=True):
    """decode worker -> prefill worker: compute prompt + output and push pages [first_page, ...) to `pages`.

    `moves`: the receiver runs this very submission; it is to push the KV that it has, and to stop writing the stream.
    No `pages` then means that there is no way to push: the request alone is wanted.
    """

    attempt: AttemptId
    request: Generate
    first_page: int
    pages: bytes
    moves: bool = False


class Moved(Struct, frozen=True, array_like=True):
    """What goes with a request that another worker has run. `computed` tokens have their KV in the pages named.

    `decode_s` counts from its first token, -1 if it has none yet; `hops` counts this move too.
    """

    computed: int
    hops: int
    cached_tokens: int
    preemptions: int
    decode_s: float


class KvReady(Struct, frozen=True, tag=True):
    """prefill worker -> decode worker: the last push has been handed to the transport.

    With a sender-placed transport (shm) every byte is in place before this message; with a receiver-placed one (zmq)
    the decode worker also waits until all have landed. `checksums`, under debug.invariants: the CRC-32 of each page
    pushed, 4 bytes each, in order of position. With `moved`, `sampled.ids` are the tokens drawn since the request
    was returned; its stream has them already, and from here on the receiver writes it.
    """

    attempt: AttemptId
    sampled: Sampled
    queue_s: float
    prefill_s: float
    checksums: bytes = b""
    moved: Moved | None = None


class StopPush(Struct, frozen=True, tag=True):
    """decode worker -> prefill worker: give up this attempt. Always answered by PushStopped."""

    attempt: AttemptId


class PushStopped(Struct, frozen=True, tag=True):
    """prefill worker -> decode worker: no copy of this attempt is in flight and none will start.

    `stopped` answers a StopPush; `declined`: compute the prompt yourself; `ended`: the request that was to move has
    ended, or stays where it is.
    """

    attempt: AttemptId
    reason: Literal["stopped", "declined", "ended"]


# ------------------------------------------------------------------------------------------------ membership


class PoolInfo(Struct, frozen=True, array_like=True):
    """One worker's KV pool, as a peer needs to know it.

    Pages lie `[layer][page][page_bytes]` from `offset` in the memory file `fd` of process `pid`, or in the memory of a
    GPU that CUDA IPC opens by `handle`; the first bytes hold `nonce`, so a peer that opens another pool by mistake
    notices. [`scratch`, `offset`) takes self-tests. `unshared`: why a pool on a GPU has no handle.
    """

    pid: int
    fd: int
    nonce: str
    scratch: int
    offset: int
    layers: int
    pages: int
    page_bytes: int
    data_endpoint: str
    data_public_key: str = ""
    handle: bytes = b""
    unshared: str = ""


class Costs(Struct, frozen=True):
    """Coefficients of the cost model (`core/cost.py` has the formula), in seconds, tokens and bytes.

    `L`: (tokens, seconds), by rising tokens, at least one point. `first_s`: until a client has its first token, beside
    waiting and steps: messages, text, HTTP, and what begins and ends in a worker.
    """

    h: float
    h_mix: float
    L: tuple[tuple[int, float], ...]
    a: float
    d: float
    t0: float
    t_d: float
    B: float
    s: float = 0.0
    first_s: float = 0.0


COARSE = Costs(0.002, 0.0, ((1, 0.012), (8, 0.016), (512, 0.4)), 0.0, 2e-7, 0.001, 0.0, 1e9, 5e-4)
"""What a worker starts from that has no profile: a small model on one core. It is fitted to what steps take."""


class WorkerInfo(Struct, frozen=True, array_like=True):
    """What a worker says of itself. Workers whose fingerprints differ are never paired.

    `costs`: what its steps are predicted to cost until some have been measured. `operators`: the name of what computes.
    """

    address: Address
    role: Role
    host: str
    fingerprint: str
    pool: PoolInfo
    page_size: int
    max_batch: int
    max_len: int
    costs: Costs = COARSE
    operators: str = ""


class Hello(Struct, frozen=True, tag=True):
    """worker -> coordinator, at its start and again to each new coordinator."""

    info: WorkerInfo


class Counters(Struct, frozen=True, array_like=True):
    """Totals of one worker incarnation; they only grow. Tokens, events, bytes, seconds."""

    steps: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    transfer_bytes: dict[str, int] = {}
    transfer_seconds: dict[str, float] = {}
    transfers: dict[str, int] = {}
    page_leaks: int = 0
    local_prefills: dict[str, int] = {}  # by reason: what was sent here to be prefilled elsewhere, and was not
    step_errors: tuple[int, ...] = ()  # steps by how far the prediction was off: up to each of ERROR_BOUNDS, and beyond
    step_error_sum: float = 0.0


ERROR_BOUNDS = (0.01, 0.02, 0.05, 0.08, 0.12, 0.2, 0.35, 0.5, 1.0)
"""Of |predicted - measured| / measured."""


class Forecast(Struct, frozen=True, array_like=True):
    """What a worker predicts of itself, from its own fitted model. Seconds, tokens.

    `step_s`: a step in which all sequences that it has taken decode; `row_s` more for one more of them, `context_s`
    for each token of its context. `gain`: seconds of prefill alone that a chunk saves for each second that it adds to a
    step of decodes. `tpot_s`: the tightest target of those that decode here, 0 if there are none.

    Prompts: `free_s` until the step that runs has ended; the next one may hold `chunk` tokens of them beside what
    decodes now, and takes `full_s` with all of these, be they none, `chunk_s[k]` with 2^k; further ones hold `steady`
    tokens, within the targets of what decodes, and take `token_s` for each. A prompt takes `square_s` x tokens^2 more;
    what a first token takes beside waiting and steps is `first_s`. Where streams are late, `owed_s` passes with steps
    of theirs before prompts are taken on again.
    """

    step_s: float = 0.0
    row_s: float = 0.0
    context_s: float = 0.0
    gain: float = 1.0
    tpot_s: float = 0.0
    free_s: float = 0.0
    chunk: int = 0
    full_s: float = 0.0
    chunk_s: tuple[float, ...] = (0.0,)
    steady: int = 1
    token_s: float = 0.0
    square_s: float = 0.0
    first_s: float = 0.0
    owed_s: float = 0.0


class Load(Struct, frozen=True, tag=True):
    """worker -> coordinator: after changes, and at least once a second.

    `queued_tokens`: prompt tokens still to compute here. `decodes`: of those running, how many have computed theirs.
    `busy`: it has work, so `counters.steps` must grow.
    `received` counts the Submits that this coordinator has sent and these numbers include, `jobs` the Prefills of new
    prompts that have come since it leads.
    """

    busy: bool
    running: int
    waiting: int
    reserved: int
    queued_tokens: int
    pages_total: int
    pages_free: int
    pages_cached: int
    counters: Counters
    received: int = 0
    jobs: int = 0
    decodes: int = 0
    forecast: Forecast = Forecast()


class Pair(Struct, frozen=True, array_like=True):
    """One direction of hand-over between two worker incarnations, as its self-test found it.

    `kind` is empty when no transport works; `note` then says why, or why it is not the first choice.
    """

    prefill: Address
    decode: Address
    kind: str
    bytes_per_s: float
    note: str = ""


RECEIVER_PLACED = frozenset({"zmq"})
"""Transports whose data travel beside the messages: the receiver places them, and waits for them besides KvReady."""


class Paired(Struct, frozen=True, tag=True):
    """decode worker -> coordinator: what the self-test of one direction found."""

    pair: Pair


class Probe(Struct, frozen=True, tag=True):
    """prefill worker -> decode worker: a test pattern has been sent; check that it is there.

    `kind` is the transport it went through (empty: none could be opened), `checksum` a CRC-32 of its `nbytes`.
    """

    kind: str
    nbytes: int
    checksum: int
    seconds: float
    note: str = ""


class Knobs(Struct, frozen=True, array_like=True):
    """What can be turned while a service runs: `config.Policy` says what each means, `core/knobs.py` what modes set."""

    rho: float
    eta: float
    gamma: float
    pin_prefill: int
    pin_decode: int
    catch_up: int = 0


class Steer(Struct, frozen=True, tag=True):
    """tuner -> coordinator -> workers: decide by these from now on. `reason`: one line for the log."""

    knobs: Knobs
    reason: str = ""


class Members(Struct, frozen=True, tag=True):
    """coordinator -> everyone: who is alive, whole, at each change. `dead` names known ends: (name, incarnation)."""

    term: int
    apis: tuple[Address, ...]
    workers: tuple[WorkerInfo, ...]
    pairs: tuple[Pair, ...]
    dead: tuple[tuple[str, int], ...]


class Lead(Struct, frozen=True, tag=True):
    """supervisor -> worker, api: this is the coordinator now."""

    coordinator: Address


class Up(Struct, frozen=True, tag=True):
    """process -> supervisor -> coordinator: this incarnation has started and receives at this address."""

    address: Address
    kind: Literal["worker", "api", "coordinator"]
    pid: int


class PeerDown(Struct, frozen=True, tag=True):
    """supervisor -> coordinator: the process has been reaped. Evidence, not suspicion."""

    name: str
    incarnation: int
    cause: str
    kind: Literal["worker", "api", "coordinator"] = "worker"


class Reported(Struct, frozen=True, tag=True):
    """supervisor -> coordinator: all live and dead incarnations of this host have been told; routing may start."""

    host: str


class Suspect(Struct, frozen=True, tag=True):
    """anyone -> coordinator -> supervisor: this incarnation shows work and no progress, or lost messages."""

    name: str
    incarnation: int
    reason: str


class Progress(Struct, frozen=True, tag=True):
    """child -> supervisor: what a starting process is doing; `fraction` from 0 to 1."""

    stage: str
    fraction: float


class Failed(Struct, frozen=True, tag=True):
    """child -> supervisor: it cannot start, and a restart would not help. One line for the operator."""

    message: str


class Listening(Struct, frozen=True, tag=True):
    """api -> supervisor: the HTTP port is open."""

    url: str


class Drain(Struct, frozen=True, tag=True):
    """api -> supervisor: let the workers named here hand over their requests, one after the other, and start them anew.

    No names: take no new requests, finish those that run, and end the service. `reload`: read the config file again.
    """

    workers: tuple[str, ...] = ()
    reload: bool = False


class Stats(Struct, frozen=True, tag=True):
    """coordinator -> api: what /metrics and /ready show. A few times a second while something changes, and at least
    once in STATS_HEARTBEAT_S: an api that hears nothing for longer knows that the coordinator is not well.
    """

    loads: tuple[tuple[Address, Role, Load], ...]
    decisions: tuple[tuple[str, str, int], ...]  # (local | remote, reason, count)
    restarts: dict[str, int]
    ready: bool
    reason: str  # why not ready


STATS_HEARTBEAT_S = 2.0

ToCoordinator: TypeAlias = (
    Generate | Cancel | Hello | Load | Paired | Finished | Leaving | Return | Steer | Suspect | Up | PeerDown | Reported
)
ToWorker: TypeAlias = Submit | Cancel | Prefill | KvReady | StopPush | PushStopped | Probe | Members | Steer | Lead
ToApi: TypeAlias = Accepted | Rejected | Tokens | Members | Stats | Lead
ToSupervisor: TypeAlias = Up | Suspect | Members | Progress | Failed | Listening | Drain
Message: TypeAlias = ToCoordinator | ToWorker | ToApi | ToSupervisor

_encoder = msgspec.msgpack.Encoder()


def encode(message: Message | Envelope) -> bytes:
    """The msgpack bytes of a message; decode with a `msgspec.msgpack.Decoder` of the inbox's union."""
    return _encoder.encode(message)


# ------------------------------------------------------------------------------------------------------ arrays


def pack(numbers: Iterable[int]) -> bytes:
    """int32 bytes of token ids or page numbers."""
    return array("i", numbers).tobytes()


def unpack(data: bytes) -> array[int]:
    """The int32 numbers in `data`; raises ValueError if its length is not a multiple of 4."""
    numbers = array("i")
    numbers.frombytes(data)
    return numbers


def page_root(*parts: str) -> Hash:
    """The root of a chain of page hashes: what must be equal for pages to be shared (model, adapter, salt)."""
    return Hash(blake2b("\0".join(parts).encode(), digest_size=HASH_BYTES).digest())


def next_hash(previous: bytes, ids: bytes) -> Hash:
    """The hash of one full page: of its token ids (int32 bytes) and of all before it."""
    return Hash(blake2b(previous + ids, digest_size=HASH_BYTES).digest())


def page_hashes(root: bytes, ids: bytes, page_size: int) -> bytes:
    """The chained hashes of all full pages of `ids` (int32 bytes), HASH_BYTES each, one after the other."""
    hashes, previous, step = [], root, 4 * page_size
    for end in range(step, len(ids) + 1, step):
        previous = next_hash(previous, ids[end - step : end])
        hashes.append(previous)
    return b"".join(hashes)


def split_hashes(data: bytes) -> Sequence[Hash]:
    """Of a chain as `page_hashes` gives it."""
    parts = struct.unpack_from(f"{HASH_BYTES}s" * (len(data) // HASH_BYTES), data)
    return cast("tuple[Hash, ...]", parts)  # no call for each: a prompt has hundreds
