"""Which workers there are and where they stand: the config's groups, on hosts and in racks.

Knows sizes of pools and who reaches whom; makes the WorkerInfo that each worker says of itself. Hosts share memory and
a near network, racks the links over which pages can be pushed. Roles are spread evenly over both.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from cbdisagg.config import Config, ConfigError
from cbdisagg.core.profile import Profile
from cbdisagg.messages import Address, PoolInfo, Role, WorkerInfo

STEMS: dict[Role, str] = {"prefill": "prefill", "decode": "decode", "any": "worker"}
DEFAULT_POOL_BYTES = 512 << 20  # as a worker takes without kv.pages and kv.memory_mb


@dataclass(frozen=True, slots=True)
class Layout:
    """`per_host`, `per_rack`: workers on one host, and workers that can push pages to each other; 0: all of them.

    `near_s`, `far_s`: latency of a message within a host and between hosts.
    """

    per_host: int = 0
    per_rack: int = 0
    near_s: float = 50e-6
    far_s: float = 200e-6


@dataclass(frozen=True, slots=True)
class Place:
    name: str
    role: Role
    host: str
    rack: int


def places(config: Config, layout: Layout) -> list[Place]:
    """One for each worker of the config, named as serve names them."""
    roles = [group.role for group in config.workers for _ in range(group.count)]
    named: list[tuple[str, Role, float]] = []  # and how far among its like it is: neighbours are of all roles
    counts: dict[Role, int] = {}
    for role in roles:
        index = counts.get(role, 0)
        counts[role] = index + 1
        named.append((f"{STEMS[role]}-{index}", role, (index + 0.5) / roles.count(role)))
    seats = {name: seat for seat, (name, _, _) in enumerate(sorted(named, key=lambda worker: worker[2]))}
    per_host, per_rack = layout.per_host or len(roles), layout.per_rack or len(roles)
    return [Place(name, role, f"host-{seats[name] // per_host}", seats[name] // per_rack) for name, role, _ in named]


def pool_size(config: Config, profile: Profile) -> tuple[int, int]:
    """(pages of each pool, tokens of the longest request). Raises ConfigError if a request cannot fit the pool."""
    kv = config.kv
    page_bytes = profile.kv_bytes * kv.page_size
    pages = kv.pages or ((kv.memory_mb << 20) or DEFAULT_POOL_BYTES) // page_bytes
    holds = pages * kv.page_size
    if pages < 2 or config.model.max_len > holds:
        raise ConfigError(
            f"the pool holds {holds} tokens of {profile.kv_bytes} bytes ({profile.model}); "
            "raise kv.pages or kv.memory_mb"
        )
    return pages, config.model.max_len or min(profile.context, holds)


def describe(place: Place, incarnation: int, config: Config, profile: Profile) -> WorkerInfo:
    """What the worker that starts there says of itself."""
    pages, max_len = pool_size(config, profile)
    layer_page_bytes = profile.kv_bytes * config.kv.page_size // profile.layers
    pool = PoolInfo(0, 0, "", 0, 0, profile.layers, pages, layer_page_bytes, "")
    address = Address(place.name, incarnation, "")
    fingerprint = f"{profile.model} {profile.dtype}"
    size, batch = config.kv.page_size, config.scheduler.max_batch
    return WorkerInfo(address, place.role, place.host, fingerprint, pool, size, batch, max_len, profile.cost)


def ways(found: list[Place]) -> Iterator[tuple[str, str]]:
    """(from, to), by name: all directions in which pages can be pushed, as workers open them."""
    racks: dict[int, list[Place]] = {}
    for place in found:
        racks.setdefault(place.rack, []).append(place)
    for rack in racks.values():
        for to in rack:
            if to.role != "prefill":
                yield from ((place.name, to.name) for place in rack if place is not to)
