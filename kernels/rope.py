"""Rotary position embedding (Su et al. 2021) in the half-split form of Llama's checkpoints.

The pair (i, i + head_dim / 2) of a head is turned by position * frequency[i].
"""

from __future__ import annotations

import torch
from torch import Tensor


def rope_tables(frequencies: Tensor, positions: int, scaling: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines of all positions, each [positions, 1, head_dim], computed in float32 and rounded once.

    `frequencies` [head_dim / 2] in radians per position. The first half of the sines is negated, so that
    `rope_` needs no negation: rotate(x) = x * cos + swap_halves(x) * sin.
    """
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies.float()[None, :]
    cos, sin = angles.cos() * scaling, angles.sin() * scaling
    return torch.cat((cos, cos), -1)[:, None].to(dtype), torch.cat((-sin, sin), -1)[:, None].to(dtype)


def rope_(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn `heads` [rows, heads, head_dim] in place by each row's `cos`, `sin` [rows, 1, head_dim]; may be strided."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads.mul_(cos).addcmul_(swapped, sin)
