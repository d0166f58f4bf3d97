"""RMSNorm and LayerNorm over the last dimension.

Statistics are taken in float32 whatever the dtype. Both return a new tensor in the dtype of `x`.
"""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019). `x` [rows, hidden], `weight` [hidden]."""
    return functional.rms_norm(x, weight.shape, weight, eps)


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias (Ba et al. 2016). `x` [rows, hidden]."""
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)
