"""Matrix products with a weight that never changes: y = x W^T + b.

Knows how a weight is best laid out for this CPU; knows no model. A `Linear` is made once, at loading, from a plain
[out, in] weight and keeps only its own layout of it.

Measured on a Zen 5 core: oneDNN's blocked layout takes half the time of `F.linear` for 1 to 16 rows in bfloat16 and
float32, and is never slower, up to 512 rows.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

TYPICAL_ROWS = 64
"""The row count that oneDNN is told when it chooses a layout: with 1 it takes another that is slow for more rows."""


class Linear(Protocol):
    """[rows, in] -> [rows, out], in the weight's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...


class PlainLinear:
    """`F.linear`: for devices and dtypes for which torch has no packed form, and the reference in tests."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor) -> Tensor:
        return functional.linear(x, self.weight, self.bias)


class PackedLinear:
    """The weight in oneDNN's own blocked layout."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_ROWS)
        self.bias = bias
        self.multiply = torch.ops.mkldnn._linear_pointwise

    def __call__(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.weight, self.bias, "none", [], "")


def has_packed_form(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` works here. bfloat16 needs AVX-512 (or its Arm counterpart), which oneDNN reports."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
