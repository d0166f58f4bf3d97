"""How many pages a worker's pool has and how long a request may be: the model's geometry meets the config.

On a GPU, also what its memory leaves for the pool.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from cbdisagg.config import Config, ConfigError, Kv, Scheduler, Workers

DEFAULT_POOL_BYTES = 512 << 20

USED_OF_GPU = 0.9
"""The part of a GPU's memory that workers share, if nothing else is said: the rest is for contexts and libraries."""

WORKING_BYTES = 1 << 30
"""On a GPU, besides weights and pages: the CUDA context, libraries' workspaces, graphs,"""
ROW_BYTES = 1 << 18
"""what a token of a step needs on its way through the layers,"""
LOGIT_BYTES = 12
"""and for each sequence and id a logit, rounded and whole, and its depth."""


class DeviceMemory(Struct, frozen=True, forbid_unknown_fields=True):
    """A GPU's memory in bytes: all of it, and what the model's weights take. `vocab`: ids that have a logit."""

    total: int
    weights: int
    vocab: int


def size_pool(
    kv: Kv, max_len: int, context: int, page_bytes: int, default_bytes: int = DEFAULT_POOL_BYTES
) -> tuple[int, int]:
    """(pages of the pool, tokens of the longest request).

    `max_len` is the configured one (0: as long as possible), `context` the model's, `page_bytes` what a page takes in
    all layers together, `default_bytes` the size of the pool if the config gives none. Raises ConfigError if they
    contradict each other: one request must fit the pool, or it would wait for ever.
    """
    if max_len > context:
        raise ConfigError(f"[model] max_len = {max_len}: this model's context is {context} tokens; lower max_len")
    pages = kv.pages or ((kv.memory_mb << 20) or default_bytes) // page_bytes
    if pages < 2:
        raise ConfigError(
            f"[kv] memory_mb = {kv.memory_mb} holds less than two pages of {page_bytes / 2**20:.1f} MiB; raise it"
            if kv.memory_mb
            else f"[kv] pages = {kv.pages}: at least 2 are needed"
        )
    holds = pages * kv.page_size
    if max_len > holds:
        needed = -(-max_len // kv.page_size)
        megabytes = -(-needed * page_bytes >> 20)
        raise ConfigError(
            f"[model] max_len = {max_len}: the pool holds {holds} tokens ({pages} pages); "
            f"lower max_len, or set kv.pages to {needed} or kv.memory_mb to {megabytes}"
        )
    return pages, max_len or min(context, holds)


def size_device_pool(
    config: Config, context: int, page_bytes: int, memory: DeviceMemory, fraction: float, where: str
) -> tuple[int, int]:
    """As `size_pool`, for a worker with `fraction` of a GPU: if the config gives no size, its pool gets the rest."""
    room = 0
    if not (config.kv.pages or config.kv.memory_mb):
        longest = -(-(config.model.max_len or config.kv.page_size) // config.kv.page_size)
        room = device_pool_bytes(memory, fraction, config.scheduler, max(2, longest) * page_bytes, where)
    return size_pool(config.kv, config.model.max_len, context, page_bytes, room)


def device_pool_bytes(memory: DeviceMemory, fraction: float, scheduler: Scheduler, least: int, where: str) -> int:
    """What is left for the pool in `fraction` of a GPU, after weights and what a step needs.

    `least`: the smallest pool that is of use. `where` names the worker's settings. Raises ConfigError if it is less.
    """
    total, weights = memory.total, memory.weights
    working = WORKING_BYTES + scheduler.token_budget * ROW_BYTES + scheduler.max_batch * memory.vocab * LOGIT_BYTES
    left = int(fraction * total) - weights - working
    if left < least:
        needed = weights + working + least
        raise ConfigError(
            f"{where}: needs about {needed / 2**30:.1f} GiB of GPU memory (weights {weights / 2**30:.1f}, a step "
            f"{working / 2**30:.1f}, KV of one request {least / 2**30:.1f}) and memory_fraction {fraction:.2f} of "
            f"{total / 2**30:.1f} GiB is {fraction * total / 2**30:.1f}: raise memory_fraction, lower model.max_len, "
            "scheduler.token_budget or scheduler.max_batch, or serve a smaller model"
        )
    return left


def memory_fractions(groups: Sequence[Workers]) -> dict[str, float]:
    """By device, what each worker takes of its memory whose config does not say it: an equal part of what is left."""
    fractions = {}
    for device in {group.device for group in groups}:
        here = [group for group in groups if group.device == device]
        undecided = sum(group.count for group in here if not group.memory_fraction)
        left = USED_OF_GPU - sum(group.count * group.memory_fraction for group in here)
        fractions[device] = max(0.0, left) / undecided if undecided and device != "cpu" else 0.0
    return fractions
