"""The tokens of a step, row by row: for those who look them up in the embeddings.

Knows ids and positions; not what is computed of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from cbdisagg_kernels.self_attention import positions_of
from numpy.typing import NDArray
from torch import Tensor


class Tokens(Protocol):
    """`ids`, `positions` int32 [rows]."""

    @property
    def ids(self) -> Tensor: ...
    @property
    def positions(self) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class RowTokens:
    """As they are, wherever that is."""

    ids: Tensor
    positions: Tensor


@dataclass(frozen=True, slots=True)
class SlotTokens:
    """In the table of all slots, `table` int32 [slots, position], contiguous; `segments` as in `SelfAttention.plan`.

    A kernel reads them there; what it does not need is not made.
    """

    table: NDArray[np.int32]
    segments: NDArray[np.int32]

    @property
    def ids(self) -> Tensor:
        slots = np.repeat(self.segments[:, 3], self.segments[:, 1])
        return torch.from_numpy(self.table[slots, positions_of(self.segments)])

    @property
    def positions(self) -> Tensor:
        return torch.from_numpy(positions_of(self.segments))
