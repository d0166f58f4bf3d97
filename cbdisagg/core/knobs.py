"""What can be turned while a service runs, what a mode makes of it, and which workers a pin falls on.

One family of policies, from aggregation with deadline chunks (rho = 0, eta = 0, no pins: a request decodes where it was
prefilled, and prompts ride in any step) to pure disaggregation (every worker pinned, eta = 2, rho = 0: each phase
goes to the least loaded of its workers, and no step is mixed). The modes `aggregate` and `disaggregate` are these two.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from msgspec.structs import replace

from cbdisagg.config import Config
from cbdisagg.messages import Address, Knobs, Role

NEVER_MIX = 2.0
"""More than a chunk gains where arithmetic bounds steps: about 1, a short one beside a single stream 1.6. Where memory
does, as on a GPU, it gains 2 to 30: there it is the pins alone that keep prompts from streams.
"""
_PREFILLS_FIRST: dict[Role, int] = {"prefill": 0, "any": 1, "decode": 2}


def configured(config: Config) -> Knobs:
    """Those of the config's `[policy]`, with what its mode sets.

    `disaggregate` pins every worker: as `pin_prefill` and `pin_decode` say, else by role, else half to each phase.
    """
    policy = config.policy
    knobs = Knobs(*(getattr(policy, name) for name in Knobs.__struct_fields__))
    if policy.mode == "aggregate":
        return replace(knobs, rho=0.0, eta=0.0, pin_prefill=0, pin_decode=0)
    if policy.mode == "disaggregate":
        roles = [group.role for group in config.workers for _ in range(group.count)]
        prefills, decodes = _split(roles, policy.pin_prefill, policy.pin_decode)
        return replace(knobs, rho=0.0, eta=NEVER_MIX, pin_prefill=prefills, pin_decode=decodes)
    return knobs


def pinned(knobs: Knobs, workers: Sequence[tuple[Address, Role]]) -> dict[Address, Role]:
    """Which of these workers do only one phase: first those whose role asks for it, then by name.

    A worker whose role is the other phase is never pinned: if all that prefill have died, nobody is pinned to prefill.
    """
    if not (knobs.pin_prefill or knobs.pin_decode):
        return {}
    order = sorted(workers, key=lambda worker: (_PREFILLS_FIRST[worker[1]], _by_number(worker[0].name), worker[0]))
    prefills = [address for address, role in order if role != "decode"][: knobs.pin_prefill]
    decodes = [address for address, role in reversed(order) if role != "prefill"][: knobs.pin_decode]
    pins: dict[Address, Role] = dict.fromkeys(prefills, "prefill")
    return pins | dict.fromkeys((address for address in decodes if address not in pins), "decode")


def _split(roles: Sequence[Role], prefills: int, decodes: int) -> tuple[int, int]:
    """(workers that only prefill, workers that only decode), all of them."""
    total = len(roles)
    prefills = prefills or (total - decodes if decodes else roles.count("prefill"))
    if not prefills:
        prefills = total - roles.count("decode") if "decode" in roles else max(1, total // 2)
    return prefills, total - prefills


def _by_number(name: str) -> tuple[str, int]:
    """worker-2 comes before worker-10."""
    stem, number = re.fullmatch(r"(.*?)(\d*)", name, re.DOTALL).groups()  # type: ignore[union-attr]  # any text matches
    return stem, int(number or 0)
