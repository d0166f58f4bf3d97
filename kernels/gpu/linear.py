"""Matrix products on the device, which stay with cuBLAS through torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


class DeviceLinear:
    """y = x W^T + b; see `Linear`. The residual is summed inside the product, in its accumulator."""

    def __init__(self, weight: Tensor, bias: Tensor | None, device: torch.device) -> None:
        self.weight = weight.to(device).contiguous()
        self.bias = None if bias is None else bias.to(device)

    def __call__(self, x: Tensor, residual: Tensor | None = None, wide: bool = False) -> Tensor:
        if residual is None:
            y = functional.linear(x, self.weight, self.bias)
        else:
            y = residual.addmm_(x, self.weight.t())
            if self.bias is not None:
                y += self.bias
        return y.float() if wide else y
