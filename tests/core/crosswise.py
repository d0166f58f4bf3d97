"""A coordinator whose workers hand over to each other, for worlds in which pages are to cross."""

from __future__ import annotations

from collections.abc import Mapping

from cbdisagg.config import Config
from cbdisagg.core.coordinator import CoordinatorCore
from cbdisagg.core.placement import Placement
from cbdisagg.core.policy import Decision, Wanted
from cbdisagg.messages import Address, Generate


class Crosswise(Placement):
    """The least loaded worker decodes, and another one prefills."""

    def decide(self, request: Generate, wanted: Wanted, cached: Mapping[Address, int], now: float) -> Decision:
        chosen = super().decide(request, wanted, cached, now)
        sight = self.board.everybody(self._serves)
        decode = min(sight.views, key=lambda view: (view.sequences, view.address)).address
        ways = sorted(sight.links.get(decode, {}))
        if chosen.reason == "sibling" or not ways:
            return chosen
        return Decision(ways[0], decode, "crosswise", 0.0)


def coordinator_core(address: Address, config: Config) -> CoordinatorCore:
    """The production core. Where no role is split and hand-overs are asked for, they go both ways."""
    core = CoordinatorCore(address, config)
    if {group.role for group in config.workers} == {"any"} and config.policy.mode == "disaggregate":
        core.placement = Crosswise(address.incarnation, config, core.workers, core._serves)
        core.placed, core.decisions = core.placement.placed, core.placement.decisions
    return core
