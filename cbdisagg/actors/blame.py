"""Workers of whom a message to us was lost (rule 6), until they are known to be dead.

Pure. A suspicion is told to the coordinator and can die with it, or be lost itself. So it is told again to each new
one, and to one that still names such a worker as a member: who knows of it leaves suspects out.
"""

from __future__ import annotations

from cbdisagg.messages import Members, Suspect

KEPT = 64
"""At most so many are remembered: whoever pretends to be many should not fill our memory."""


class Blame:
    """By incarnation: a successor starts afresh."""

    def __init__(self) -> None:
        self._lost: dict[int, Suspect] = {}

    def add(self, suspect: Suspect) -> None:
        self._lost[suspect.incarnation] = suspect
        if len(self._lost) > KEPT:
            del self._lost[next(iter(self._lost))]

    def all(self) -> list[Suspect]:
        """What a new coordinator does not know."""
        return list(self._lost.values())

    def again(self, members: Members) -> list[Suspect]:
        """What a coordinator that names these members does not know."""
        newest = {info.address.name: info.address.incarnation for info in members.workers}
        dead = {incarnation for _, incarnation in members.dead}
        self._lost = {
            incarnation: suspect
            for incarnation, suspect in self._lost.items()
            if incarnation not in dead and incarnation >= newest.get(suspect.name, 0)
        }
        return [suspect for incarnation, suspect in self._lost.items() if newest.get(suspect.name) == incarnation]
