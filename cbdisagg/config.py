"""Settings: frozen structs, their defaults, and the checks that need no file, clock or machine.

Knows what every key means and which values contradict each other. Does not read files or the environment: load.py does.
Keys are those of the TOML files under configs/; a key that is not here is an error there.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct, field

EMBEDDED_MODEL = "smollm2"


class Model(Struct, frozen=True, forbid_unknown_fields=True):
    """`path`: a Hugging Face folder or a .gguf file; `name`: a hub id, or "smollm2", the embedded model.

    `weights`: those of the products in `dtype` too, or rounded to int8 in groups of 64, which needs the C kernels.
    `max_len` is the longest prompt + output in tokens; 0 takes the model's own context, at most what the pool holds.
    """

    path: str = ""
    name: str = ""
    served_name: str = ""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    weights: Literal["same", "int8"] = "same"
    max_len: int = 0


class Targets(Struct, frozen=True, forbid_unknown_fields=True):
    """Time to first token and time per output token that the policy aims for, in milliseconds.

    `gap_ms`: no single gap between two tokens should be longer, however far ahead a stream is; 0: only the mean counts.
    """

    ttft_ms: float = 1000.0
    tpot_ms: float = 50.0
    gap_ms: float = 0.0


class Workers(Struct, frozen=True, forbid_unknown_fields=True):
    """`count` equal workers. `role` is a preference that the policy reads, not a limit.

    `device`: "cpu", or an NVIDIA GPU, "cuda:0" and so on; all workers on one kind. `memory_fraction`: of its GPU's
    memory that each worker takes, weights and KV together; 0: the workers of a GPU share nine tenths.

    `threads` 0 divides the cores among the workers; `cpus` pins ("0,2-3"; "" pins when cores are shared; "none" never).
    """

    role: Literal["prefill", "decode", "any"] = "any"
    count: int = 1
    device: str = "cpu"
    threads: int = 0
    cpus: str = ""
    memory_fraction: float = 0.0


class Kv(Struct, frozen=True, forbid_unknown_fields=True):
    """The paged KV cache of each worker. Give `pages` or `memory_mb`; neither: 512 MiB, on a GPU all of its fraction.

    `allocator`: pages as tokens come (paged), or how others reserve them, to compare with (core/baselines.py): for
    `model.max_len` tokens, for a power of two of output tokens, or for max_tokens as if all of them will come (oracle).
    """

    page_size: int = 16
    pages: int = 0
    memory_mb: int = 0
    prefix_cache: bool = True
    allocator: Literal["paged", "reserve-max", "reserve-pow2", "reserve-oracle"] = "paged"


class Scheduler(Struct, frozen=True, forbid_unknown_fields=True):
    """`max_batch`: sequences that run at once. `token_budget`: tokens of one step, decode and prefill together.

    `mixed` false keeps prefill and decode in separate steps. `batching`, to compare with: static takes what waits, and
    nobody joins until all have ended; static-global also runs every batch for `static_length` iterations (0: as many
    as `model.max_len` leaves).
    """

    max_batch: int = 64
    token_budget: int = 512
    mixed: bool = True
    batching: Literal["continuous", "static", "static-global"] = "continuous"
    static_length: int = 0


class Policy(Struct, frozen=True, forbid_unknown_fields=True):
    """`mode`: decide each request's route by predicted latency, or never, or always hand over.

    `rho`: a worker may be filled until its step takes this part of the TPOT target; 0: requests stay where they were
    prefilled. `eta`: a chunk rides in a step with decodes only if each second that it adds there saves at least so
    many seconds of prefill alone, which is about 1 on a CPU and 2 to 30 on a GPU; 0: always. `gamma`: token k of a
    stream is due by gamma x TPOT x k after its first. `catch_up`: a prompt may make a stream late by what that makes up
    for within so many tokens. `pin_prefill`, `pin_decode`: so many workers do nothing else. aggregate and disaggregate
    set all of these but gamma and catch_up.

    `admission`: who comes too late for the targets waits (queue), or is refused at once (early-reject).
    `queue_limit`: requests that may wait for a worker before new ones get 429. `tuner`: choose rho, eta, gamma,
    catch_up and pins anew, from the requests that came, while serving. `suspect_s`: a worker with work and no
    progress for this long is replaced; `silent_s`: one, or a coordinator, that says nothing at all for this long.
    """

    mode: Literal["auto", "aggregate", "disaggregate"] = "auto"
    rho: float = 0.9
    eta: float = 0.0
    gamma: float = 0.98
    catch_up: int = 0
    pin_prefill: int = 0
    pin_decode: int = 0
    admission: Literal["queue", "early-reject"] = "queue"
    queue_limit: int = 256
    tuner: bool = False
    suspect_s: float = 20.0
    silent_s: float = 6.0


class Transfer(Struct, frozen=True, forbid_unknown_fields=True):
    """`kind`: how pages move between workers; auto takes the fastest that the self-test passes.

    `floor_gbps`: a pair whose self-test is slower (in 10^9 bytes per second) is reported and not used. 0: no floor.
    """

    kind: Literal["auto", "shm", "cuda_ipc", "zmq"] = "auto"
    floor_gbps: float = 0.0


class Http(Struct, frozen=True, forbid_unknown_fields=True):
    """With an `api_key`, or the first line of `api_key_file`, every path but /health and /ready asks for it."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_key: str = ""
    api_key_file: str = ""


class Limits(Struct, frozen=True, forbid_unknown_fields=True):
    """What one request may ask for; more is a 400 that names the field (413 for the body). And how long things last.

    `resume_s`: a stream that has lost its worker ends with an error if none takes it on within this time. `drain_s`:
    when the service or a worker is asked to end, running requests have this long to finish or to move.
    """

    max_output_tokens: int = 0  # 0: whatever the context leaves
    body_mb: float = 16.0
    header_kb: int = 32
    json_depth: int = 128
    n: int = 16
    prompts: int = 64
    logprobs: int = 20
    stop: int = 16
    stop_chars: int = 1024
    stop_token_ids: int = 256
    logit_bias: int = 1024
    stalled_reader_s: float = 300.0
    resume_s: float = 60.0
    drain_s: float = 30.0


class Cluster(Struct, frozen=True, forbid_unknown_fields=True):
    """Sockets between the processes. Empty `bind`: Unix sockets in a private folder.

    `bind`: an IP address to listen on by tcp; `advertise`: the address that others use to reach it; `curve_keys`: a
    folder with the CURVE key pair (`cbdisagg.key`, `cbdisagg.key_secret`), required with tcp.
    """

    bind: str = ""
    advertise: str = ""
    curve_keys: str = ""


class ProfileFile(Struct, frozen=True, forbid_unknown_fields=True):
    """`path`: what steps cost on these workers, as `cbdisagg profile` has measured it; "": learnt while serving."""

    path: str = ""


class Debug(Struct, frozen=True, forbid_unknown_fields=True):
    """`invariants`: check the cores after every event. `journal`: a folder for one file of events per process.

    `trace`: log each decision of the coordinator with the predictions that led to it, one line for each request.
    """

    invariants: bool = False
    journal: str = ""
    trace: bool = False


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    model: Model = Model(name=EMBEDDED_MODEL)
    targets: Targets = Targets()
    workers: tuple[Workers, ...] = (Workers(role="prefill"), Workers(role="decode"))
    kv: Kv = field(default_factory=Kv)
    scheduler: Scheduler = field(default_factory=Scheduler)
    policy: Policy = field(default_factory=Policy)
    transfer: Transfer = field(default_factory=Transfer)
    http: Http = field(default_factory=Http)
    limits: Limits = field(default_factory=Limits)
    cluster: Cluster = field(default_factory=Cluster)
    profile: ProfileFile = field(default_factory=ProfileFile)
    debug: Debug = field(default_factory=Debug)


def on_gpus(config: Config) -> bool:
    """Whether the workers are on GPUs: all are, or none is. Then they take one plan ahead of the one under way."""
    return config.workers[0].device != "cpu"


class ConfigError(Exception):
    """A setting that cannot be used: one line that names the key, the value and what would be right."""


class ModelError(ConfigError):
    """A model that cannot be prepared or read: one line that names the file or the hub id, and what would be right."""
