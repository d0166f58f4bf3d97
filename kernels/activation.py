"""The non-linear part of the feed-forward layer."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up (SwiGLU, Shazeer 2020). [rows, 2 * inner], gate first -> [rows, inner]."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def gelu(x: Tensor) -> Tensor:
    """x times the normal distribution's share below x (Hendrycks and Gimpel 2016), exact form. [rows, inner]."""
    return functional.gelu(x)


def relu(x: Tensor) -> Tensor:
    """max(x, 0), in place."""
    return x.relu_()
