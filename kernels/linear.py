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
MOST_INPUTS = 1024
"""Inputs that one bfloat16 product sums, in an order that does not depend on the number of rows."""


class Linear(Protocol):
    """[rows, in] -> [rows, out], in the weight's dtype. `residual` [rows, out] is added, and may be overwritten.

    `wide`: float32 whatever the dtype, with more than its precision where that costs nothing.
    """

    def __call__(self, x: Tensor, residual: Tensor | None = None, wide: bool = False) -> Tensor: ...


class PlainLinear:
    """`F.linear`: for devices and dtypes for which torch has no packed form, and the reference in tests."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight.contiguous(), bias

    def __call__(self, x: Tensor, residual: Tensor | None = None, wide: bool = False) -> Tensor:
        return _finished(functional.linear(x, self.weight, self.bias), residual, wide)


class PackedLinear:
    """The weight in oneDNN's own blocked layout, in bfloat16 cut along its inputs: a row never depends on others.

    Above 1,024 inputs oneDNN cuts a bfloat16 sum where the number of rows tells it to, so a request's result would
    change with its company. Sums that we cut ourselves, at fixed places, do not: measured, for 1 to 512 rows.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        most = MOST_INPUTS if weight.dtype == torch.bfloat16 else weight.shape[1]
        self.widths = [len(part) for part in torch.arange(weight.shape[1]).tensor_split(-(-weight.shape[1] // most))]
        self.weights = [
            torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), TYPICAL_ROWS)
            for part in weight.split(self.widths, 1)
        ]
        self.bias = bias
        self.multiply = torch.ops.mkldnn._linear_pointwise
        self.multiply_add = torch.ops.mkldnn._linear_pointwise.binary

    def __call__(self, x: Tensor, residual: Tensor | None = None, wide: bool = False) -> Tensor:
        return _finished(self._product(x), residual, wide)

    def _product(self, x: Tensor) -> Tensor:
        if len(self.weights) == 1:
            return self.multiply(x, self.weights[0], self.bias, "none", [], "")
        parts = x.split(self.widths, -1)
        y = self.multiply(parts[0], self.weights[0], self.bias, "none", [], "")
        for part, weight in zip(parts[1:], self.weights[1:], strict=True):
            y = self.multiply_add(part, y, weight, None, "add")
        return y


def _finished(y: Tensor, residual: Tensor | None, wide: bool) -> Tensor:
    y = y if residual is None else y.add_(residual)
    return y.float() if wide else y


def has_packed_form(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether `PackedLinear` works here. bfloat16 needs AVX-512 (or its Arm counterpart), which oneDNN reports."""
    if device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    return dtype == torch.float32 or (dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported())
