"""RMSNorm, with the residual sum before it in the same pass. Triton.

The reference is `rms_norm` of cbdisagg_kernels.norm. Statistics in float32 whatever the dtype.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def normalise(x, residual, weight, out, x_stride, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr):
    """Program (row)."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    wide = tl.load(x + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        summed = wide + tl.load(residual + row * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = summed.to(residual.dtype.element_ty)
        tl.store(residual + row * WIDTH + columns, rounded, mask=inside)
        wide = rounded.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(wide * wide, 0) / WIDTH + eps)
    scaled = wide * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * WIDTH + columns, scaled.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, a new tensor. `x` [rows, hidden], rows may be strided; `weight` [hidden].

    `residual` [rows, hidden], contiguous: becomes x + residual, rounded to its dtype, which is what is normed.
    """
    rows, width = x.shape
    out = torch.empty(rows, width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    normalise[(rows,)](
        x,
        x if residual is None else residual,
        weight,
        out,
        x.stride(0),
        eps,
        WIDTH=width,
        BLOCK=block,
        ADDS=residual is not None,
        num_warps=min(16, max(4, block // 512)),
    )
    return out
