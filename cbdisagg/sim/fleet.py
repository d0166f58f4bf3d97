"""Which workers there are and where they stand: the config's groups, on hosts and in racks.

Knows sizes of pools and who reaches whom; makes the WorkerInfo that each worker says of itself. Hosts share memory and
a near network, racks the links over which pages can be pushed. Roles are spread evenly over both.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from cbdisagg.config import Config
from cbdisagg.core.profile import Profile
from cbdisagg.core.sizing import USED_OF_GPU, memory_fractions, size_device_pool, size_pool
from cbdisagg.messages import Address, PoolInfo, Role, WorkerInfo

STEMS: dict[Role, str] = {"prefill": "prefill", "decode": "decode", "any": "worker"}


@dataclass(frozen=True, slots=True)
class Layout:
    """`per_host`, `per_rack`: workers on one host, and workers that can push pages to each other; 0: all of them.

    `near_s`, `far_s`: latency of a message within a host and between hosts. `link_bytes_per_s`: how fast pages go from
    a worker on one host to one on another; 0: as fast as the profile says.
    """

    per_host: int = 0
    per_rack: int = 0
    near_s: float = 50e-6
    far_s: float = 200e-6
    link_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """`memory_fraction`: of its GPU, if the profile's workers have one."""

    name: str
    role: Role
    host: str
    rack: int
    memory_fraction: float


def places(config: Config, layout: Layout) -> list[Place]:
    """One for each worker of the config, named as serve names them. On the CPU, by a GPU's profile: a GPU for each."""
    shared = memory_fractions(config.workers)
    of_role = Counter[Role]()
    for group in config.workers:
        of_role[group.role] += group.count
    named: list[tuple[str, Role, float]] = []
    among: dict[str, float] = {}  # how far among its like it is: neighbours are of all roles
    numbers = Counter[Role]()
    for group in config.workers:
        for _ in range(group.count):
            name = f"{STEMS[group.role]}-{numbers[group.role]}"
            among[name] = (numbers[group.role] + 0.5) / of_role[group.role]
            numbers[group.role] += 1
            named.append((name, group.role, group.memory_fraction or shared[group.device] or USED_OF_GPU))
    seats = {name: seat for seat, name in enumerate(sorted(among, key=among.__getitem__))}
    per_host, per_rack = layout.per_host or len(named), layout.per_rack or len(named)
    return [
        Place(name, role, f"host-{seats[name] // per_host}", seats[name] // per_rack, fraction)
        for name, role, fraction in named
    ]


def pool_size(place: Place, config: Config, profile: Profile) -> tuple[int, int]:
    """(pages of its pool, tokens of the longest request), as the worker itself would find. Raises ConfigError if a
    request cannot fit the pool, or the pool the GPU.
    """
    page_bytes = profile.kv_bytes * config.kv.page_size
    if profile.memory is None:
        return size_pool(config.kv, config.model.max_len, profile.context, page_bytes)
    where = f"{place.name} on {profile.machine}"
    return size_device_pool(config, profile.context, page_bytes, profile.memory, place.memory_fraction, where)


def describe(place: Place, incarnation: int, config: Config, profile: Profile) -> WorkerInfo:
    """What the worker that starts there says of itself."""
    pages, max_len = pool_size(place, config, profile)
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
