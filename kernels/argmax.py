"""The largest of each row: what a greedy sequence draws."""

from __future__ import annotations

import torch
from torch import Tensor


def argmax(x: Tensor) -> Tensor:
    """`x` [rows, width] -> [rows] int64: the place of each row's largest, the lowest among equals.

    By numpy, for torch's argmax does not say which of equals it takes.
    """
    return torch.from_numpy(x.float().numpy().argmax(-1))
