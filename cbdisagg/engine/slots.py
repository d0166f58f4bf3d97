"""The sequences that a runner holds: their token ids, their pages, and how each draws.

Knows slots by number. Life cycle of a slot: admit, then grow and append (on a device: expect, and later settle) any
number of times, then release. What stands here is a function of prompt, output and sampling, so a moved or preempted
sequence is rebuilt by admitting it anew.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cbdisagg.engine.sampler import Drawer
from cbdisagg.messages import Admit, Sampling, StepPlan


@dataclass(slots=True)
class Held:
    """One slot's counts: tokens of its prompt, tokens known so far, pages it has."""

    prompt: int
    length: int
    pages: int
    sampling: Sampling
    drawer: Drawer


class Slots:
    """Ids and page tables are two arrays with a row for each slot, so that a batch is cut from them at once."""

    def __init__(self, max_len: int, page_size: int, vocab: int) -> None:
        self.max_len, self.page_size, self.vocab = max_len, page_size, vocab
        self.ids: NDArray[np.int32] = np.zeros((0, max_len + 1), np.int32)
        self.pages: NDArray[np.int32] = np.zeros((0, -(-(max_len + 1) // page_size)), np.int32)
        self.held: dict[int, Held] = {}

    def __getitem__(self, slot: int) -> Held:
        return self.held[slot]

    def apply(self, plan: StepPlan) -> None:
        """What the plan changes, before its slices are computed. Raises KeyError or ValueError as its parts do."""
        for slot in plan.release:
            self.release(slot)
        for admit in plan.admit:
            self.admit(admit)
        for slot, pages in plan.grow:
            self.grow(slot, pages)

    def admit(self, admit: Admit) -> None:
        """Raises ValueError if the slot is taken."""
        slot = admit.slot
        if slot in self.held:
            raise ValueError(f"slot {slot} is taken")
        self._make_room(slot)
        prompt, output = np.frombuffer(admit.prompt, np.int32), np.frombuffer(admit.output, np.int32)
        length = len(prompt) + len(output)
        self.ids[slot, :length] = np.concatenate((prompt, output))
        drawer = Drawer(admit.sampling, prompt, output, self.vocab)
        self.held[slot] = Held(len(prompt), length, 0, admit.sampling, drawer)
        self.grow(slot, admit.pages)

    def grow(self, slot: int, pages: Sequence[int]) -> None:
        """The next pages of the slot, in order of position."""
        held = self.held[slot]
        self.pages[slot, held.pages : held.pages + len(pages)] = pages
        held.pages += len(pages)

    def append(self, slot: int, token: int) -> None:
        """A drawn token joins the slot's ids."""
        held = self.held[slot]
        self.ids[slot, held.length] = token
        held.length += 1
        held.drawer.observe(token)

    def expect(self, slot: int) -> None:
        """A token that a device is drawing joins the slot's ids, as -1 - slot until it is known."""
        held = self.held[slot]
        self.ids[slot, held.length] = -1 - slot
        held.length += 1

    def settle(self, slot: int, place: int, token: int) -> None:
        """The id of a token that was expected at `place`."""
        self.ids[slot, place] = token

    def release(self, slot: int) -> None:
        del self.held[slot]

    def _make_room(self, slot: int) -> None:
        missing = slot + 1 - len(self.ids)
        if missing > 0:
            missing = max(missing, len(self.ids))  # double, so that rows are copied a few times at most
            self.ids = np.pad(self.ids, ((0, missing), (0, 0)))
            self.pages = np.pad(self.pages, ((0, missing), (0, 0)))
