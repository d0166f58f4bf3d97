"""The operators for NVIDIA GPUs: Triton's kernels, and cuBLAS for the large products.

Imports Triton, so it is itself imported only where a device is wanted. A device "cpu" means Triton's interpreter: slow,
for tests, and only if TRITON_INTERPRET=1 was set before the import.
"""

from __future__ import annotations

from typing import Any

import torch
from cbdisagg_kernels.activation import gelu, relu
from cbdisagg_kernels.gpu.activation import silu_mul
from cbdisagg_kernels.gpu.attention import TritonSelfAttention
from cbdisagg_kernels.gpu.layers import TritonLayers, can_fuse
from cbdisagg_kernels.gpu.linear import DeviceLinear
from cbdisagg_kernels.gpu.norm import rms_norm
from cbdisagg_kernels.gpu.sample import argmax
from cbdisagg_kernels.linear import Linear
from cbdisagg_kernels.norm import layer_norm
from cbdisagg_kernels.ops import Ops
from cbdisagg_kernels.self_attention import SelfAttention, Shape
from torch import Tensor


def triton_ops(device: torch.device) -> Ops:
    """For float32, float16 and bfloat16."""

    def linear(weight: Tensor, bias: Tensor | None) -> Linear:
        return DeviceLinear(weight, bias, device)

    def attention(shape: Shape) -> SelfAttention[Any]:
        return TritonSelfAttention(shape, device)

    return Ops(
        name="triton",
        linear=linear,
        attention=attention,
        rms_norm=rms_norm,
        layer_norm=layer_norm,
        silu_mul=silu_mul,
        relu=relu,
        gelu=gelu,
        argmax=argmax,
        fuse=lambda stack: TritonLayers(stack) if can_fuse(stack) else None,
        sampling=None,
        packer=None,
    )
