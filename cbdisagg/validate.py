"""Which values of a Config are possible, alone and together.

Pure: knows ranges and contradictions, and is told which cores the machine has. Whether a file that a key names can be
read is load.py's to find out, whether a model fits its pool the worker's: neither is known here.
"""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from cbdisagg.config import Config, ConfigError, Workers

UNPINNED = "none"
SECRET = "http.api_key"

RANGES: dict[str, tuple[float, float]] = {
    "model.max_len": (0, 1 << 24),
    "targets.ttft_ms": (1, 3_600_000),
    "targets.tpot_ms": (0.1, 600_000),
    "targets.gap_ms": (0, 600_000),
    "kv.page_size": (8, 128),
    "kv.pages": (0, 1 << 30),
    "kv.memory_mb": (0, 1 << 24),
    "scheduler.max_batch": (1, 4096),
    "scheduler.token_budget": (1, 1 << 20),
    "scheduler.static_length": (0, 1 << 24),
    "policy.rho": (0, 10),
    "policy.eta": (0, 10),
    "policy.gamma": (0.1, 1),
    "policy.catch_up": (0, 1 << 16),
    "policy.pin_prefill": (0, 1 << 16),
    "policy.pin_decode": (0, 1 << 16),
    "policy.queue_limit": (1, 1 << 20),
    "policy.suspect_s": (1, 3600),
    "policy.silent_s": (1.5, 3600),
    "transfer.floor_gbps": (0, 10_000),
    "http.port": (0, 65535),
    "limits.max_output_tokens": (0, 1 << 24),
    "limits.body_mb": (0.001, 4096),
    "limits.header_kb": (1, 1024),
    "limits.json_depth": (8, 1000),
    "limits.n": (1, 1024),
    "limits.prompts": (1, 1 << 16),
    "limits.logprobs": (0, 1024),
    "limits.stop": (0, 1024),
    "limits.stop_chars": (1, 1 << 20),
    "limits.stop_token_ids": (0, 1 << 20),
    "limits.logit_bias": (0, 1 << 20),
    "limits.stalled_reader_s": (1, 86_400),
    "limits.resume_s": (1, 86_400),
    "limits.drain_s": (0, 86_400),
}
"""The least and the greatest value of each number outside [[workers]], in the unit that the key's name ends in."""

ONE_OF = (("model.path", "model.name"), ("kv.pages", "kv.memory_mb"), ("http.api_key", "http.api_key_file"))
"""Keys that say the same thing in two ways: at most one of each pair may be given."""


@dataclass(frozen=True, slots=True)
class Problem:
    """`key` (dotted, as for --set) cannot have `value`; `text` says why and what would be right."""

    key: str
    value: object
    text: str

    def __str__(self) -> str:
        return f"{label(self.key)} = {show(self.value, self.key)}: {self.text}"


def label(key: str) -> str:
    """How a message names a key: `kv.page_size` is "[kv] page_size", `workers.1.cpus` is "[workers.1] cpus"."""
    section, _, name = key.rpartition(".")
    return f"[{section}] {name}" if section else name


def show(value: object, key: str = "") -> str:
    """A value as TOML would have it, shortened, and hidden if it is a secret."""
    if key == SECRET and value:
        return '"***"'
    text = json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def validate(config: Config, cpus: Collection[int]) -> None:
    """Raise ConfigError for the first problem. `cpus`: the numbers of the cores that workers may use."""
    for problem in problems(config, cpus):
        raise ConfigError(str(problem))


def problems(config: Config, cpus: Collection[int]) -> Iterator[Problem]:
    yield from _ranges(config)
    yield from _twice(config)
    yield from _model(config)
    yield from _groups(config, cpus)
    yield from _devices(config)
    yield from _pinning(config, cpus)
    yield from _roles(config)
    yield from _pins(config)
    yield from _steps(config)
    yield from _baselines(config)
    yield from _sockets(config)


def cautions(config: Config) -> list[str]:
    """What can be meant, but is rarely wanted: lines for the operator."""
    if not is_loopback(config.http.host) and not (config.http.api_key or config.http.api_key_file):
        return [
            f"{label('http.host')} = {show(config.http.host)}: everyone who can reach this address can use the "
            "server; set http.api_key_file to ask for a key"
        ]
    return []


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def parse_cpus(text: str) -> tuple[int, ...]:
    """The cores of a list such as "0,2-3", ascending; raises ValueError when it is not one or names a core twice."""
    cores: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not (first.isascii() and first.isdigit()) or (dash and not (last.isascii() and last.isdigit())):
            raise ValueError(f"{part.strip()!r} is neither a core nor a range of cores")
        start, end = int(first), int(last or first)
        if end < start or end > 4095:
            raise ValueError(f"{part.strip()!r} is no range of cores from 0 to 4095")
        cores.extend(range(start, end + 1))
    if len(set(cores)) < len(cores):
        raise ValueError("a core is named twice")
    return tuple(sorted(cores))


def value_of(config: Config, key: str) -> object:
    """The value at a dotted key outside [[workers]]."""
    section, name = key.split(".")
    value: object = getattr(getattr(config, section), name)
    return value


def _ranges(config: Config) -> Iterator[Problem]:
    for key, (low, high) in RANGES.items():
        value = value_of(config, key)
        assert isinstance(value, int | float)
        if not low <= value <= high:  # so written, NaN is out of range too
            yield Problem(key, value, f"must be from {low} to {high}")


def _twice(config: Config) -> Iterator[Problem]:
    for first, second in ONE_OF:
        if value_of(config, first) and value_of(config, second):
            yield Problem(second, value_of(config, second), f"{label(first)} is given too; keep one of the two")


def _model(config: Config) -> Iterator[Problem]:
    if any(character.isspace() or not character.isprintable() for character in config.model.served_name):
        yield Problem("model.served_name", config.model.served_name, "must have no white space")
    size = config.kv.page_size
    if size & (size - 1):
        yield Problem("kv.page_size", size, "must be a power of two from 8 to 128")
    holds = config.kv.pages * size
    if holds and config.model.max_len > holds:
        text = f"must be at least {-(-config.model.max_len // size)} for [model] max_len = {config.model.max_len}"
        yield Problem("kv.pages", config.kv.pages, f"{text}: one request must fit in the pool")


def _groups(config: Config, cpus: Collection[int]) -> Iterator[Problem]:
    """Each group of workers by itself."""
    if not config.workers:
        yield Problem("workers", [], "at least one group of workers is needed")
    for index, group in enumerate(config.workers):
        if not 1 <= group.count <= 256:
            yield Problem(f"workers.{index}.count", group.count, "must be from 1 to 256")
        if not 0 <= group.threads <= len(cpus):
            text = f"must be from 0 (shared out) to {len(cpus)}, the cores of this machine"
            yield Problem(f"workers.{index}.threads", group.threads, text)


def _devices(config: Config) -> Iterator[Problem]:
    """Which workers are on GPUs, and what of the rest goes with that."""
    for index, group in enumerate(config.workers):
        if not re.fullmatch(r"cpu|cuda:(0|[1-9][0-9]?)", group.device):
            yield Problem(f"workers.{index}.device", group.device, 'must be "cpu" or a GPU, as "cuda:0"')
    kinds = {group.device.partition(":")[0] for group in config.workers}
    if len(kinds) > 1:
        first = config.workers[0].device
        index, other = next((n, each.device) for n, each in enumerate(config.workers) if each.device[:3] != first[:3])
        text = f'other workers are on "{first}", another kind of device: pages of one mean nothing to the other'
        yield Problem(f"workers.{index}.device", other, text)
    yield from _memory_fractions(config)
    if kinds == {"cpu"} and config.model.dtype == "float16":
        yield Problem("model.dtype", "float16", 'is for GPUs; CPUs compute "bfloat16" and "float32"')
    elif kinds == {"cuda"} and config.model.weights == "int8":
        yield Problem("model.weights", "int8", 'is for CPUs; on GPUs only "same" is there')
    if kinds == {"cpu"} and config.transfer.kind == "cuda_ipc":
        yield Problem("transfer.kind", "cuda_ipc", 'is for GPUs; on CPUs there are "shm" and "zmq"')
    if kinds == {"cuda"} and config.transfer.kind == "shm":
        yield Problem("transfer.kind", "shm", 'is for CPUs; on GPUs there are "cuda_ipc" and "zmq"')


def _memory_fractions(config: Config) -> Iterator[Problem]:
    shares: dict[str, float] = {}
    for index, group in enumerate(config.workers):
        key = f"workers.{index}.memory_fraction"
        if group.device == "cpu" and group.memory_fraction:
            yield Problem(key, group.memory_fraction, "is for GPUs; on a CPU set [kv] memory_mb")
        if not 0 <= group.memory_fraction <= 1:
            yield Problem(key, group.memory_fraction, "must be from 0 (shared evenly) to 1")
        shares[group.device] = shares.get(group.device, 0.0) + group.count * group.memory_fraction
        if group.device != "cpu" and shares[group.device] > 1:
            text = f"the workers on {group.device} would take {shares[group.device]:.2f} of its memory; at most 1"
            yield Problem(key, group.memory_fraction, text)


def _pinning(config: Config, cpus: Collection[int]) -> Iterator[Problem]:
    taken: dict[int, int] = {}
    for index, group in enumerate(config.workers):
        if group.cpus in ("", UNPINNED):
            continue
        key = f"workers.{index}.cpus"
        try:
            cores = parse_cpus(group.cpus)
        except ValueError as error:
            yield Problem(key, group.cpus, f'{error}; write "0,2-3", "{UNPINNED}", or "" to let serve choose')
            continue
        absent = [core for core in cores if core not in cpus]
        if absent:
            text = f"core {absent[0]} is not there; usable cores: {_runs(cpus)}"
            yield Problem(key, group.cpus, text)
        shared = [core for core in cores if core in taken]
        if shared:
            yield Problem(key, group.cpus, f"core {shared[0]} is pinned by [workers.{taken[shared[0]]}] too")
        wanted = group.count * max(group.threads, 1)
        if len(cores) < wanted:
            yield Problem(key, group.cpus, f"{len(cores)} cores for {_needs(group)}; name at least {wanted}")
        elif len(cores) % group.count:
            yield Problem(key, group.cpus, f"{len(cores)} cores cannot be shared evenly by {group.count} workers")
        taken |= dict.fromkeys(cores, index)


def _needs(group: Workers) -> str:
    workers = "1 worker" if group.count == 1 else f"{group.count} workers"
    return workers if group.threads <= 1 else f"{workers} of {group.threads} threads"


def _runs(cpus: Collection[int]) -> str:
    """ "0-3,8" for {0, 1, 2, 3, 8}."""
    runs: list[list[int]] = []
    for core in sorted(cpus):
        if runs and runs[-1][1] == core - 1:
            runs[-1][1] = core
        else:
            runs.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def _roles(config: Config) -> Iterator[Problem]:
    roles = {group.role for group in config.workers}
    for present, missing in (("prefill", "decode"), ("decode", "prefill")):
        if roles == {present}:
            yield Problem("workers.0.role", present, f'no worker is there to {missing}; add role "{missing}" or "any"')
    if config.policy.mode == "disaggregate" and sum(group.count for group in config.workers) == 1:
        yield Problem("policy.mode", "disaggregate", "needs two workers, one to prefill and one to decode; there is 1")


def _pins(config: Config) -> Iterator[Problem]:
    """Pins fall on workers whose role does not say otherwise; somebody must do what the others do not."""
    policy, total = config.policy, sum(group.count for group in config.workers)
    pins = (("prefill", policy.pin_prefill), ("decode", policy.pin_decode))
    for phase, pinned in pins:
        other = "decode" if phase == "prefill" else "prefill"
        able = sum(group.count for group in config.workers if group.role != other)
        key = f"policy.pin_{phase}"
        if pinned and policy.mode == "aggregate":
            yield Problem(key, pinned, 'must be 0 with mode = "aggregate": there each worker does both')
        elif pinned > able:
            yield Problem(key, pinned, f'must be at most {able}, the workers whose role is not "{other}"')
        elif pinned and pinned == total:
            yield Problem(key, pinned, f"must be at most {total - 1}: some worker has to {other}")
    if policy.pin_prefill + policy.pin_decode > total:
        text = f"with pin_prefill = {policy.pin_prefill} must be at most {total - policy.pin_prefill}"
        yield Problem("policy.pin_decode", policy.pin_decode, f"{text}: there are {total} workers")


def _steps(config: Config) -> Iterator[Problem]:
    batch, budget = config.scheduler.max_batch, config.scheduler.token_budget
    if budget < batch:
        text = f"must be at least [scheduler] max_batch = {batch}: each running sequence takes one token of a step"
        yield Problem("scheduler.token_budget", budget, text)


def _baselines(config: Config) -> Iterator[Problem]:
    """What is there to compare with knows neither hand-overs nor, when it is static, pages that come late."""
    batching, allocator = config.scheduler.batching, config.kv.allocator
    if batching != "continuous" and allocator != "reserve-max":
        text = 'needs [kv] allocator = "reserve-max": a static batch reserves what a sequence can need'
        yield Problem("scheduler.batching", batching, text)
    if config.scheduler.static_length and batching != "static-global":
        text = 'has an effect with [scheduler] batching = "static-global" only'
        yield Problem("scheduler.static_length", config.scheduler.static_length, text)
    alone = sum(group.count for group in config.workers) == 1 or config.policy.mode == "aggregate"
    if allocator != "paged" and not (alone and {group.role for group in config.workers} == {"any"}):
        text = 'needs one worker, or [policy] mode = "aggregate", and no role but "any": it cannot hand requests over'
        yield Problem("kv.allocator", allocator, text)


def _sockets(config: Config) -> Iterator[Problem]:
    if not config.http.host:
        yield Problem("http.host", "", 'must be an address or a name, as "127.0.0.1"')
    cluster = config.cluster
    if not cluster.bind:
        for name, value in (("advertise", cluster.advertise), ("curve_keys", cluster.curve_keys)):
            if value:
                yield Problem(f"cluster.{name}", value, "has no effect without [cluster] bind, which switches to tcp")
        return
    try:
        ipaddress.ip_address(cluster.bind)
    except ValueError:
        yield Problem("cluster.bind", cluster.bind, 'must be an IP address, as "10.0.0.1"')
    if not cluster.curve_keys:
        text = "tcp needs [cluster] curve_keys, a folder with cbdisagg.key and cbdisagg.key_secret"
        yield Problem("cluster.bind", cluster.bind, text)
