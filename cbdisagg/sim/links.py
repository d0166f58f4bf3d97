"""How pages get from one worker to another: by which kind of transport, how fast, and how late.

Knows hosts and racks; not what is pushed. Within a host pages go the profile's way. Between hosts there is no shared
memory: they go by zmq over the network, whose bandwidth each pair of workers has for itself, and land when its latency
has passed too. Between racks they do not go at all.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from cbdisagg.core.cost import CostModel
from cbdisagg.core.profile import Profile
from cbdisagg.messages import RECEIVER_PLACED
from cbdisagg.sim.fleet import Layout, Place

BETWEEN_HOSTS = "zmq"


@dataclass(frozen=True, slots=True)
class Link:
    """`late_s`: what its latency adds to a transfer; within a host `t0` was measured with it."""

    kind: str
    cost: CostModel
    late_s: float = 0.0

    @property
    def receiver_placed(self) -> bool:
        """Pages travel beside the step that computes them; else that step copies them itself."""
        return self.kind in RECEIVER_PLACED


class Links:
    """By name. `ways`: (from, to), all directions in which pages can be pushed."""

    def __init__(
        self, profile: Profile, layout: Layout, places: Iterable[Place], ways: Iterable[tuple[str, str]]
    ) -> None:
        self.ways = frozenset(ways)
        cost = profile.cost
        self._hosts = {place.name: place.host for place in places}
        self._near = Link(profile.transfer, cost)
        self._far = Link(BETWEEN_HOSTS, replace(cost, B=layout.link_bytes_per_s or cost.B), layout.far_s)

    def between(self, source: str, to: str) -> Link | None:
        if (source, to) not in self.ways:
            return None
        return self._near if self._hosts[source] == self._hosts[to] else self._far
