"""Names, threads and cores of the workers: a pure function of the config and the cores that this machine gives us."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cbdisagg.actors.cores import Cores
from cbdisagg.config import Workers
from cbdisagg.core.sizing import memory_fractions
from cbdisagg.messages import Role
from cbdisagg.validate import UNPINNED, parse_cpus


@dataclass(frozen=True, slots=True)
class Spot:
    """One worker: what it is called, how many threads compute, and the cores they are pinned to (none: not pinned).

    On a GPU: which, and the part of its memory that the worker takes.
    """

    name: str
    role: Role
    threads: int
    cpus: tuple[int, ...]
    device: str = "cpu"
    memory_fraction: float = 0.0


def place_workers(groups: Sequence[Workers], cores: Cores) -> list[Spot]:
    """Groups with `cpus` get those, divided evenly. The other workers share the rest: as many threads as are given,
    else an equal share, at least one; pinned each to cores of its own if all of them fit and there is more than one
    worker, for threads that wander disturb each other (two of a worker on two shared cores lose more than half). Cores
    that others use too are not pinned to: another service may have chosen the same ones.
    """
    named = {core for group in groups if _listed(group) for core in parse_cpus(group.cpus)}
    free = [core for core in cores.numbers if core not in named]
    room = min(len(free), cores.at_once - len(named))
    sharing = [group for group in groups if not _listed(group)]
    taken = sum(group.count * group.threads for group in sharing)
    undecided = sum(group.count for group in sharing if not group.threads)
    share = max(1, (room - taken) // undecided) if undecided else 0
    wanted = sum(group.count * (group.threads or share) for group in sharing)
    alone = sum(group.count for group in groups) == 1
    pinned = wanted <= room and not alone and cores.are_ours
    spots: list[Spot] = []
    names = iter(worker_names(groups))
    fractions = memory_fractions(groups)
    for group in groups:
        where = (group.device, fractions[group.device] if not group.memory_fraction else group.memory_fraction)
        listed = list(parse_cpus(group.cpus)) if _listed(group) else []
        each = len(listed) // group.count
        for _ in range(group.count):
            if listed:
                own, listed = listed[:each], listed[each:]
                spots.append(Spot(next(names), group.role, group.threads or each, tuple(own), *where))
                continue
            threads = group.threads or share
            own = []
            if pinned:
                own, free = free[:threads], free[threads:]
            spots.append(Spot(next(names), group.role, threads, () if group.cpus == UNPINNED else tuple(own), *where))
    return spots


def worker_names(groups: Sequence[Workers]) -> list[str]:
    """Of all workers, in order: numbered within their role."""
    roles = [group.role for group in groups for _ in range(group.count)]
    return [f"{'worker' if role == 'any' else role}-{roles[:n].count(role)}" for n, role in enumerate(roles)]


def _listed(group: Workers) -> bool:
    return group.cpus not in ("", UNPINNED)
